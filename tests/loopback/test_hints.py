"""Errors of frequent mistakes say what to write instead."""

import asyncio
import functools
import importlib
import sys
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from aiorpc_torch import (
    CallTimeout,
    Group,
    RRef,
    autograd,
    batched,
    call,
    create,
    exclusive,
    fetch,
    in_thread,
    local_world,
    members,
    paused,
    proxy,
    register,
    remote,
    supervised,
    timeout,
    worker,
)
from aiorpc_torch.types import LocalWorker, Supervised

pytestmark = pytest.mark.usefixtures("world")


class Model:
    size = 3

    def double(self, x: int) -> int:
        return 2 * x

    def rows(self) -> Iterator[int]:
        yield 1

    async def pages(self) -> AsyncIterator[int]:
        yield 1

    def stops(self) -> Iterator[int]:
        yield 1
        raise StopIteration

    async def stops_async(self) -> AsyncIterator[int]:
        yield 1
        raise StopAsyncIteration

    def through(self, rref: Any) -> int:
        return rref.double(1)  # type: ignore[no-any-return]

    @batched(max_size=4)
    def relu(self, xs: Any) -> Any:
        return torch.relu(xs)

    @batched(max_size=4)
    def product(self, xs: Any) -> Any:
        return torch.ones(2) @ xs

    @batched(max_size=4)
    def best(self, xs: Any) -> Any:
        return xs.argmax(1)

    @batched(max_size=4)
    def none(self, xs: Any) -> None:
        pass

    @batched(max_size=4)
    def broken(self, xs: Any) -> Any:
        raise TypeError("list")


def notes(error: pytest.ExceptionInfo[BaseException]) -> str:
    return "\n".join(error.value.__notes__)


async def test_a_method_that_is_not_called() -> None:
    model = RRef(Model())
    assert repr(remote(model).size) == "<remote method size>"
    with pytest.raises(TypeError, match=r"size was not called: write `await remote\(rref\).size"):
        await remote(model).size  # type: ignore[misc]


async def test_a_timeout_among_the_arguments() -> None:
    model = RRef(Model())
    with pytest.raises(TypeError) as error:
        await remote(model).double(1, timeout=5)
    assert "aiorpc_torch.timeout(5)" in notes(error)
    with pytest.raises(TypeError) as error:
        await call("main", int, 1, 2, 3)
    assert not hasattr(error.value, "__notes__")


@pytest.mark.parametrize("method", ["relu", "product", "best"])
async def test_a_batch_that_is_not_stacked(method: str) -> None:
    model = RRef(Model())
    with pytest.raises((TypeError, AttributeError)) as error:
        await getattr(remote(model), method)(torch.ones(2))
    assert "stack=True" in notes(error)


async def test_another_error_of_a_batch() -> None:
    with pytest.raises(TypeError) as error:
        await remote(RRef(Model())).broken(torch.ones(2))
    assert "stack=True" not in "".join(getattr(error.value, "__notes__", []))


async def test_a_task_is_named_by_its_call() -> None:
    task = asyncio.ensure_future(remote(RRef(Model())).double(1))
    assert "coro=<call of double()>" in repr(task)
    assert await task == 2


async def test_a_peer_that_is_no_name(world: LocalWorker) -> None:
    """Of a worker that is to be started, stopped or awaited: of another type, or unknown."""
    lists: Any = ["a"]
    with pytest.raises(TypeError, match="a worker's name must be a str, got"):
        await world.start(lists)
    with pytest.raises(TypeError, match="a worker's name must be a str, got"):
        await world.stop(lists)
    with pytest.raises(ValueError, match=r"peer must be one of \(no peer\), got \['a'\]"):
        await world.wait_for(lists)
    with pytest.raises(ValueError, match=r"until must be one of \(no peer\), got \['a'\]"):
        await world.serve(lists)
    with pytest.raises(TypeError, match="count must be an int, got 'a'"):
        await members("a").wait(lists[0])


# ── what is no method ─────────────────────────────────────────────────────────────────────────────


async def handles() -> list[Any]:
    made = Group(await create(["main", "main"], Model))
    return [remote(each) for each in (made[0], made, made.any())]


async def test_parts_of_an_object() -> None:
    for handle in await handles():
        with pytest.raises(
            AttributeError, match=r"'size.bit_count' is not a method.*call\(rref, f"
        ):
            handle.size.bit_count()
        with pytest.raises(TypeError, match=r"'rows\[...\]' is not a method.*call\(rref, f, x\)"):
            handle.rows[0]
        assert not hasattr(handle.size, "_private")


async def test_habits_of_other_libraries() -> None:
    for handle in await handles():
        with pytest.raises(AttributeError, match=r"write `await remote\(rref\).double\(\.\.\.\)`"):
            handle.double.remote(1)
        with pytest.raises(TypeError, match="write `async for"):
            async for _ in handle.rows:
                pass
        made = handle.double(1)
        with pytest.raises(AttributeError, match=r"`await` <call of .*double.*> first"):
            made.result()
        with pytest.raises(TypeError, match=r"write `async for` for a generator's items"):
            iter(made)
        made.close()


# ── forgotten `await`s and `remote`s ──────────────────────────────────────────────────────────────


async def test_a_call_that_is_not_awaited() -> None:
    model = RRef(Model())
    for made in (remote(model).double(1), remote(model, retries=1).double(1)):
        assert repr(made) == "<call of double, not sent: await it>"
        with pytest.raises(TypeError, match=r"cannot be sent, only its result can: `await` the"):
            await remote(model).double(made)
        assert await made == 2
        assert repr(made) == "<call of double>"
    with pytest.warns(RuntimeWarning, match="^<call of double> was never awaited$"):
        remote(model).double(1)


USES: list[Callable[[Any], object]] = [
    lambda made: made + 1,
    lambda made: sum([made]),
    lambda made: torch.ones(2) - made,
    lambda made: made @ torch.ones(2),
    lambda made: made < 0.5,
    lambda made: made[0],
    "{:.2f}".format,
    len,
    float,
    torch.relu,
    torch.as_tensor,
    lambda made: torch.stack([made]),
    lambda made: torch.nn.functional.mse_loss(made, torch.ones(2)),
]


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("use", USES)
async def test_a_call_that_is_used_as_its_result(
    use: Callable[[Any], object], retries: int
) -> None:
    made = remote(RRef(Model()), retries=retries).double(1)
    with pytest.raises(TypeError, match=r"in place of its result: `await` it first$"):
        use(made)
    assert made, "as any coroutine"
    assert await made == 2


async def test_a_coroutine_in_place_of_its_result(world: LocalWorker) -> None:
    made: Any = create("main", Model)
    wrong: Any = remote
    hint = r"was not awaited: write `await create\(\.\.\.\)`"
    for attempt in (
        lambda: wrong(made),
        lambda: call(made, Model.double, 1),
        lambda: Group([made]),
        lambda: register("model", made),
    ):
        with pytest.raises(TypeError, match=hint):
            attempt()
    for coroutine in (fetch(made), create(made, Model.double, 1), create("main", made)):
        with pytest.raises(TypeError, match=hint):
            await coroutine
    with pytest.raises(TypeError) as error:
        await call("main", repr, made)
    assert "`await` it first" in notes(error)
    await made


async def test_a_forgotten_remote() -> None:
    group = await create(["main"], Model)
    model: Any = group[0]
    missing = "object has no attribute 'double'"
    for each in (group, group.any(), members("model")):
        with pytest.raises(
            AttributeError, match=rf"{missing}: .* `await remote\(...\).double\(\)`"
        ):
            each.double(1)  # type: ignore[attr-defined]
    for forgotten in (lambda: model.double(1), lambda: remote(model).through(model)):
        with pytest.raises(AttributeError, match=r"write `await remote\(rref\).double\(\)`"):
            await forgotten()
    assert not hasattr(model, "double")
    assert not hasattr(model, "_repr_html_")


async def test_a_forgotten_remote_of_a_supervised_object() -> None:
    found = object.__new__(Supervised)
    with pytest.raises(AttributeError, match=r"write `await remote\(\.\.\.\).double\(\)`"):
        found.double(1)


# ── factories ─────────────────────────────────────────────────────────────────────────────────────


class Net(torch.nn.Module):
    def forward(self, x: int = 1) -> int:
        return x


@pytest.mark.promise("calls.instances")
@pytest.mark.parametrize("made", [Net(), Model(), 3])
async def test_an_object_in_place_of_its_class(made: Any) -> None:
    for make in (create, supervised):
        with pytest.raises(TypeError, match=r"must be callable and make the object.*pass a class"):
            await make("main", made)


async def test_callables_that_make_objects() -> None:
    class Maker:
        def __call__(self, size: int) -> list[int]:
            return [0] * size

    maker = Maker()
    for factory in (maker, maker.__call__, functools.partial(maker)):
        assert await fetch(await create("main", factory, 2)) == [0, 0]


async def test_a_call_whose_function_was_called() -> None:
    value: Any = sum([1])
    with pytest.raises(TypeError, match=r"must be callable, got 1: pass the function and its arg"):
        call("main", value)


# ── generators ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["rows", "pages"])
async def test_a_generator_that_is_awaited(method: str) -> None:
    with pytest.raises(TypeError, match=rf"^Model.{method} is a generator; use `async for`, not"):
        await getattr(remote(RRef(Model())), method)()


@pytest.mark.parametrize("method", ["stops", "stops_async"])
async def test_a_generator_that_raises_its_own_end(method: str) -> None:
    text = rf"^Model.{method} has raised Stop\w+: a generator ends with `return`"
    with pytest.raises(RuntimeError, match=text):
        _ = [each async for each in getattr(remote(RRef(Model())), method)()]


async def test_a_method_that_is_iterated() -> None:
    with pytest.raises(TypeError, match=r"is not a generator, it returned int: use `await`"):
        async for _ in remote(RRef(Model())).double(1):
            pass


# ── where there is no loop, no row and no number ────────────────────────────────────────────────


class StartsTask:
    """An object whose constructor needs an event loop."""

    def __init__(self) -> None:
        self.task = asyncio.get_running_loop().create_future()


async def test_a_constructor_that_needs_the_event_loop() -> None:
    """The error says what to write, which works."""
    with pytest.raises(RuntimeError, match="no running event loop") as raised:
        await create("main", StartsTask)
    assert any("`async def` function that returns it" in each for each in raised.value.__notes__)

    async def make() -> StartsTask:
        return StartsTask()

    await create("main", make)


async def test_a_weight_that_is_no_number() -> None:
    @batched(max_size=2, weight=lambda x: x.sum(), max_weight=3)
    async def total(xs: list[Any]) -> list[Any]:
        return xs

    with pytest.raises(ValueError, match=r"must be a number, got tensor\(2\.\): return float"):
        await total(torch.ones(2))


async def test_what_is_only_iterated() -> None:
    """A map and a batched generator that are awaited, or iterated by a plain `for`."""

    @batched(max_size=2)
    async def generate(items: list[int]) -> Any:
        yield items

    rref = await create("main", Model)
    for iterated in (generate(1), Group([rref]).map(Model.double, [1])):
        with pytest.raises(TypeError, match="cannot be awaited: write `async for`"):
            await iterated
        with pytest.raises(TypeError, match="cannot be iterated with `for`: write `async for`"):
            list(iterated)
    with pytest.raises(TypeError, match=r"has no indices: take `Group\(members\)\[0\]`"):
        members("x")[0]


# ── what was not called, or not with `async` ────────────────────────────────────────────────────


def test_any_that_was_not_called() -> None:
    with pytest.raises(TypeError, match=r"which was not called: write `any\(\)`"):
        remote(Group([RRef(Model())]).any)  # type: ignore[call-overload]


def test_a_plain_with() -> None:
    with pytest.raises(TypeError, match=r"^paused\(\) is asynchronous: write `async with paused"):
        with paused(RRef(Model())):  # type: ignore[attr-defined]
            pass
    with pytest.raises(TypeError, match="write `async with local_world"), local_world(["a"]):  # type: ignore[attr-defined]
        pass


async def test_a_world_that_is_awaited(world: LocalWorker) -> None:
    """One that is not entered, and one that is."""
    for each in (local_world(["a"]), world.world):
        with pytest.raises(TypeError, match=r"write `async with local_world.*`me = await local"):
            await each
    with pytest.raises(TypeError, match=r"local_world\(\) is asynchronous: `await` its `__aexit__"):
        world.world.__exit__(None, None, None)


async def test_a_world_in_a_thread_that_is_entered_by_async_with() -> None:
    manager: Any = in_thread(local_world(0))
    with pytest.raises(TypeError, match=r"write `with in_thread\(...\) as me`"):
        async with manager:
            pass
    with pytest.raises(TypeError, match="call its `__exit__"):
        await manager.__aexit__(None, None, None)


def test_run_and_iterate_of_a_world_without_a_thread(world: LocalWorker) -> None:
    me: Any = world
    text = "'LocalWorker' object has no attribute"
    with pytest.raises(AttributeError, match=rf"^{text} 'run'.* in_thread\(\): write `await ...`"):
        me.run(call("main", abs, -1))
    with pytest.raises(AttributeError, match=rf"^{text} 'iterate'.*: write `async for ...` in"):
        me.iterate(remote(RRef(Model())).pages())
    with pytest.raises(AttributeError, match=rf"^{text} 'walk'$"):
        me.walk()


@pytest.mark.parametrize("name", ["close", "shutdown", "__aexit__"])
def test_a_worker_that_is_to_leave_its_world(world: LocalWorker, name: str) -> None:
    text = r"to leave the world, write `await me\.world\.__aexit__\(None, None, None\)`$"
    with pytest.raises(AttributeError, match=text):
        getattr(world, name)


async def test_a_world_in_place_of_its_worker(world: LocalWorker) -> None:
    thread: Any = in_thread(local_world(0))
    with pytest.raises(
        AttributeError, match=r"`me = in_thread\(...\).__enter__\(\)`, and then `me.run`$"
    ):
        thread.run(call("main", abs, -1))
    text = r"write `async with local_world\(...\) as me`, .* and then `me.peers`$"
    for each in (local_world(0), world.world):
        with pytest.raises(AttributeError, match=text):
            _ = each.peers
        assert not hasattr(each, "_repr_html_")


async def test_a_context_manager_that_is_entered_again(world: LocalWorker) -> None:
    """The cell of a notebook that ran twice."""
    pause = paused(RRef(Model()))
    async with pause:
        pass
    for each, name in (pause, "paused"), (world.world, "local_world"):
        with pytest.raises(
            RuntimeError, match=rf"^this {name}\(\) was entered before: call {name}"
        ):
            await each.__aenter__()


async def test_a_method_that_the_class_got_later() -> None:
    """Of a class that travels by value; other classes have no note."""

    class Local:
        pass

    for made, has_note in (Local(), True), (Model(), False):
        with pytest.raises(AttributeError, match="has no attribute 'later'") as error:
            await remote(RRef(made)).later()  # type: ignore[attr-defined]
        found = "".join(getattr(error.value, "__notes__", []))
        assert ("`create` the object again" in found) is has_note


def test_exclusive_with_parentheses_and_of_a_builtin_class() -> None:
    with pytest.raises(TypeError, match="write `@exclusive`, without parentheses"):
        exclusive()
    with pytest.raises(TypeError, match=r"decorate a class of yours, `class MyDict\(dict\)`"):
        exclusive(dict)


# ── habits of torch RPC ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seconds", [0, 0.0, -1])
async def test_timeouts_of_torch_that_are_none(seconds: float) -> None:
    rref = RRef(Model())
    with pytest.warns(RuntimeWarning, match="Unlike torch RPC, this library takes None"):
        handle: Any = remote(rref, timeout=seconds)
    with pytest.raises(CallTimeout, match="was not sent"):
        await handle.double(1)
    with pytest.warns(RuntimeWarning, match="takes None"):
        await fetch(rref, timeout=seconds)


class Forgetful(Model):
    @batched(max_size=2)
    async def same(self, items: list[int]) -> list[int]:
        return items

    async def forgets(self, other: Any) -> Any:
        return remote(other).double(1)

    async def forgets_its_own(self) -> Any:
        return self.rest()

    async def rest(self) -> None:
        pass

    async def forgets_a_batch(self) -> Any:
        return self.same(1)


@pytest.mark.filterwarnings("ignore:.* was never awaited:RuntimeWarning")
async def test_a_method_that_returns_what_it_has_not_awaited() -> None:
    rref = RRef(Forgetful())
    handle: Any = remote(rref)
    for made, got in (
        (handle.forgets(rref), "RemoteCall, which was not awaited: write `await` it there"),
        (handle.forgets_its_own(), r"coroutine, which .*: write `await rest\(...\)` there"),
        (handle.forgets_a_batch(), "QueuedFuture, which was not awaited"),
    ):
        with pytest.raises(TypeError, match=f"forgets.* returned a {got}"):
            await made


@pytest.mark.filterwarnings("ignore:.* was never awaited:RuntimeWarning")
def test_any_attribute_of_a_call() -> None:
    """Also one that no list of names has; and a number made of it."""
    handle: Any = remote(RRef(Model()))
    with pytest.raises(AttributeError, match=r"'RemoteCall \(await it first\)' .* 'upper'"):
        _ = handle.double(1).upper
    with pytest.raises(TypeError, match="used in place of its result: `await` it first"):
        int(handle.double(1))


def test_a_block_without_time() -> None:
    """A time left of 0.0 was computed."""
    with pytest.warns(RuntimeWarning, match="timeout=0 is over at once") as warned:
        timeout(0)
    assert warned[0].filename == __file__
    timeout(0.0)


@pytest.mark.parametrize("handle_of", [remote, proxy])
def test_a_handle_without_time(handle_of: Callable[..., Any]) -> None:
    """The warning points to the line that has made the handle."""
    with pytest.warns(RuntimeWarning, match="timeout=0 is over at once") as warned:
        handle_of(RRef(Model()), timeout=0)
    assert warned[0].filename == __file__


@pytest.mark.parametrize("keyword", ["timeout", "args", "kwargs"])
async def test_keywords_of_torch(keyword: str) -> None:
    """They go to the method, which may have no parameters at all."""
    for function in (Model, Model.double):
        with pytest.raises(TypeError) as error:
            await create("main", function, **{keyword: ()})  # type: ignore[call-overload]
        hint = "a deadline is no argument" if keyword == "timeout" else "as in a plain call"
        assert hint in notes(error)


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
async def test_calls_of_torch_rrefs(way: str) -> None:
    made = getattr(remote(RRef(Model())), way)()
    with pytest.raises(AttributeError, match=rf"no '{way}\(\)' here: .*remote\(rref\).double\("):
        made.double(1)
    made.close()


async def test_the_number_of_a_context_and_the_context() -> None:
    """A context is not sent, and a step takes no number, as those of torch do."""
    params = await autograd.parameter_rrefs(torch.nn.Linear(1, 1))
    made: Any = autograd.DistributedOptimizer
    with pytest.raises(TypeError, match=r"write `await DistributedOptimizer.create\("):
        made(torch.optim.SGD, params, lr=0.1)
    optimizer = await made.create(torch.optim.SGD, params, lr=0.1)
    async with autograd.context() as context:
        with pytest.raises(TypeError, match=r"pass its number, `context.id`"):
            await remote(RRef(Model())).double(context)
        with pytest.raises(TypeError, match=r"takes the context itself, not its number, got \d"):
            await optimizer.step(context.id)


async def test_a_coroutine_for_a_client_of_torch() -> None:
    with pytest.raises(RuntimeError, match="coroutine_for_torch is an `async def`: decorate it"):
        await asyncio.to_thread(rpc.rpc_sync, "main", coroutine_for_torch)


async def coroutine_for_torch() -> int:
    return 1


async def test_a_call_of_torch_in_a_context_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["aiorpc_torch.autograd.context"]  # `autograd.context` is the function
    monkeypatch.setattr(module, "_has_warned", False)
    rref = RRef(Model())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert await asyncio.to_thread(rref.rpc_sync().double, 1) == 2  # type: ignore[attr-defined]
        assert not found
        async with autograd.context():
            for _ in range(2):
                double = rref.rpc_sync().double  # type: ignore[attr-defined]
                assert await asyncio.to_thread(double, 1) == 2
            await remote(rref).double(1)
    [message] = [str(each.message) for each in found]
    assert message.startswith("a call by torch's RPC in an autograd context")


async def test_an_optimizer_of_torch_in_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient flows through its calls: no warning."""
    module = sys.modules["aiorpc_torch.autograd.context"]
    monkeypatch.setattr(module, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch 2.13's own
        optim = importlib.import_module("torch.distributed.optim")
    layer = torch.nn.Linear(1, 1)
    params = await autograd.parameter_rrefs(layer)
    kind = torch.optim.ASGD  # torch compiles it to no TorchScript, which would warn
    optimizer = await asyncio.to_thread(optim.DistributedOptimizer, kind, params, lr=0.1)
    before = layer.weight.item()
    async with autograd.context() as context:
        await context.backward(layer(torch.ones(1)))
        await asyncio.to_thread(optimizer.step, context.id)
    assert layer.weight.item() != before


# ── tracebacks ──────────────────────────────────────────────────────────────────────────────────


def lines_of(error: pytest.ExceptionInfo[BaseException]) -> list[str]:
    """Return the lines of the traceback that name a file of the library."""
    text = "".join(traceback.format_exception(error.value))
    return [line for line in text.splitlines() if "/aiorpc_torch/" in line]


async def test_a_wrong_name_shows_the_line_that_has_it() -> None:
    rref: Any = remote(RRef(Model()))
    calls: list[Any] = [rref.nope(), rref.double(), call("nobody", print)]
    for each in calls:
        with pytest.raises(Exception) as error:  # noqa: PT011
            await each
        assert len(lines_of(error)) == 1  # of the await itself


@pytest.mark.parametrize(
    "wrong", [{"rank": 3}, {"transports": ["tcp"]}, {"channels": ["none"]}, {"heartbeat": -1}]
)
async def test_wrong_arguments_of_a_world(wrong: dict[str, Any]) -> None:
    options = {"rank": 0, "world_size": 1, "init_method": "tcp://127.0.0.1:1", **wrong}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        async with worker("w", **options):
            pass
    assert len(lines_of(error)) <= 1


def test_a_second_world_shows_no_lines_of_the_library() -> None:
    """In a cell that runs twice they would hide the remedy."""
    with pytest.raises(RuntimeError, match="leave it first") as error:
        asyncio.run(local_world(0).__aenter__())
    assert len(lines_of(error)) <= 1
    with pytest.raises(RuntimeError, match="leave it first") as error:
        in_thread(local_world(0)).__enter__()
    assert len(lines_of(error)) <= 1


async def test_a_users_own_error_keeps_its_lines() -> None:
    rref: Any = remote(RRef(Model()))
    with pytest.raises(AttributeError) as error:
        await rref.through(3)
    text = "".join(traceback.format_exception(error.value))
    assert "return rref.double(1)" in text
    assert "run_in_method" not in text


async def test_a_method_of_an_object_here() -> None:
    """The members are its first argument."""
    rref, method = RRef(Model()), Model().double
    with pytest.raises(TypeError) as error:
        async for _ in Group([rref]).map(method, [1]):
            pass
    assert "pass the class's, `Model.double`" in notes(error)
    with pytest.raises(TypeError) as error:
        await call(rref, method, 1)
    assert "pass the class's, `Model.double`" in notes(error)


async def test_a_batch_that_fails_shows_no_lines_of_the_library() -> None:
    """But for the await itself."""
    rref: Any = remote(RRef(Model()))
    for each in (rref.broken(1), rref.product(torch.ones(3)), rref.none(1)):
        with pytest.raises(Exception) as error:  # noqa: PT011
            await each
        assert len(lines_of(error)) == 1
