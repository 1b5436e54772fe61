"""Contexts of distributed autograd that follow tasks, over worlds of three workers."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings, strategies as st
from torch import Tensor
from torch.distributed import autograd as torchs

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, RpcError, WorkerLeft, WorkerLost, call, create, remote
from aiorpc_torch.autograd import Context, DistributedOptimizer, context, parameter_rrefs
from aiorpc_torch.testing import Gate, frozen, kill, world
from aiorpc_torch.types import LocalWorker
from tests.support import autograd_graphs
from tests.support.autograd_graphs import (
    NAMES,
    SIZE,
    Alone,
    Plan,
    Stage,
    new_weight,
    vector,
    weights_in_dropped_batches,
)

TIMEOUT = 10.0  # seconds in which a backward is to end
SHORT = 1.0  # seconds after which one is given up that does not


class Stages:
    """One stage on each of three workers, and what the tests ask of them."""

    def __init__(self, me: LocalWorker, here: Stage, rrefs: dict[str, Any]) -> None:
        self.me = me
        self.here = here
        self.rrefs = rrefs

    def __getitem__(self, name: str) -> Any:
        return remote(self.rrefs[name])

    async def gradients(self, ctx: Context, x: Tensor) -> list[Tensor | None]:
        """Of x, and of each worker's weight."""
        own = await ctx.gradients()
        there = [await self[name].gradients(ctx.id) for name in ("b", "c")]
        return [own.get(x), own.get(self.here.weight), *(each[0] for each in there)]

    async def trained(self, plan: Plan, x: Tensor) -> list[Tensor | None]:
        """Open a context, follow the plan and go back."""
        async with context() as ctx:
            root = (await autograd_graphs.follow(self.here, plan, x)).sum()
            await ctx.backward([root], timeout=TIMEOUT)
            return await self.gradients(ctx, x)

    async def released(self) -> None:
        """No context is left on any worker."""
        async with asyncio.timeout(TIMEOUT):
            names, count = autograd_graphs.NAMES, autograd_graphs.contexts_here
            while any([await call(name, count) for name in names]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # torch tells nobody


@contextlib.asynccontextmanager
async def stages(**options: Any) -> AsyncIterator[Stages]:
    async with world(["b", "c"], transports=["uv"], **options) as me:
        rrefs: dict[str, Any] = {
            name: await create(name, autograd_graphs.make_stage, name)
            for name in autograd_graphs.NAMES
        }
        found = Stages(me, rrefs["main"].local_value(), rrefs)
        found.here.stages = rrefs
        for name in ("b", "c"):
            await found[name].meet()
        autograd_graphs.gates.append(Gate())
        yield found
        await found.released()
        assert autograd_graphs.open_context() == -1, "nothing is left open in this thread"


def same(found: list[Tensor | None], expected: list[Tensor | None], plan: Plan = ()) -> None:
    """The gradients are right, and there are none where there should be none."""
    may_be_zeros = weights_in_dropped_batches(plan)
    for index, name in enumerate(NAMES, 1):
        if name in may_be_zeros and expected[index] is None and found[index] is not None:
            expected = [*expected[:index], torch.zeros(SIZE, SIZE), *expected[index + 1 :]]
    assert [each is None for each in found] == [each is None for each in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


# ── gradients ───────────────────────────────────────────────────────────────────────────────────

WORKERS = st.sampled_from(autograd_graphs.NAMES)
LOCAL = st.sampled_from([("weigh",), ("bend",)])
LEAF = st.lists(LOCAL, max_size=2).map(tuple)


def _step(plan: st.SearchStrategy[Plan]) -> st.SearchStrategy[Plan]:
    in_threads = st.sampled_from(["in_thread", "batch_in_thread"])
    # In a thread only what calls nobody: a hundred of them would use all threads up.
    makes = st.sampled_from(["call", "drop"])
    return st.one_of(
        LOCAL,
        st.tuples(st.just("fork"), plan, plan),
        st.tuples(makes, WORKERS, in_threads, LEAF),
        st.tuples(makes, WORKERS, st.just("on_loop"), plan),
        st.tuples(makes, WORKERS, st.just("batch"), LEAF),
        st.tuples(st.sampled_from(["number", "fail"]), WORKERS),
    )


PLANS: st.SearchStrategy[Plan] = st.recursive(
    LEAF, lambda plan: st.lists(_step(plan), min_size=1, max_size=3).map(tuple), max_leaves=4
)


STACKED: Plan = (
    (
        "fork",
        (("call", "b", "batch_in_thread", (("bend",),)),),
        (("drop", "b", "batch_in_thread", (("weigh",),)),),
    ),
)


@pytest.mark.slow
@pytest.mark.promise("autograd.gradients", "autograd.many")
@settings(
    max_examples=3,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.generate],
)
@example(plans=[STACKED] * 100)
@given(plans=st.lists(PLANS, min_size=100, max_size=100))
def test_a_hundred_contexts_at_once(plans: list[Plan]) -> None:
    """Whatever calls whom: the gradients of each are those of one process."""

    async def main() -> None:
        alone = Alone()
        async with stages() as every:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(every.trained(plan, vector(seed)))
                    for seed, plan in enumerate(plans)
                ]
        found = [task.result() for task in tasks]
        for seed, (plan, each) in enumerate(zip(plans, found, strict=True)):
            same(each, alone.gradients(plan, vector(seed)), plan)

    asyncio.run(main())


WEIGH: Plan = (("weigh",), ("bend",))
NESTED: Plan = (("weigh",), ("call", "c", "on_loop", (*WEIGH, ("call", "main", "on_loop", WEIGH))))


@pytest.mark.promise("autograd.gradients")
async def test_every_way_of_calling() -> None:
    """A coroutine, a `def` in a thread, a batch, `create` and `fetch`: each calls on, and back."""
    alone = Alone()
    async with stages() as every:
        for how in ("on_loop", "in_thread", "batch", "batch_in_thread", "kept"):
            plan: Plan = (*WEIGH, ("call", "b", how, NESTED), ("bend",))
            same(await every.trained(plan, vector()), alone.gradients(plan, vector()))


async def test_plain_torch_in_a_thread() -> None:
    """What a `def` method calls by torch's own RPC is in its caller's context."""
    alone = Alone()
    async with stages() as every:
        x = vector()
        async with context() as ctx:
            y = await every["b"].by_torch("c", WEIGH, x)
            await ctx.backward(y.sum(), timeout=TIMEOUT)
            found = await every.gradients(ctx, x)
            assert await every["b"].torchs_context_in_thread() == ctx.id
            assert await every["b"].torchs_context() == -1
        same(found, alone.gradients((("call", "c", "on_loop", WEIGH),), x))
        assert await every["b"].torchs_context_in_thread() == -1


async def test_views_of_one_storage() -> None:
    """Two arguments that share their memory are two arguments."""
    async with stages():
        x = torch.arange(6.0, requires_grad=True)
        async with context() as ctx:
            y = await call("b", torch.mul, x, x.view(6))
            z = await call("b", torch.add, x[:3], x[1:4])
            await ctx.backward(y.sum() + z.sum(), timeout=TIMEOUT)
            assert (await ctx.gradients())[x].tolist() == [1, 4, 6, 7, 8, 10]


@pytest.mark.promise("autograd.parameters")
async def test_parameters_are_copies() -> None:
    """As torch sends them, with a warning; a view of one has its gradient."""
    async with stages() as every:
        x = torch.nn.Parameter(vector().detach())
        async with context() as ctx:
            with pytest.warns(UserWarning, match="is or holds a Parameter, to which no gradient"):
                copy = await every["b"].on_loop(WEIGH, x)
            y = await every["b"].on_loop(WEIGH, x.as_subclass(torch.Tensor))
            await ctx.backward(copy.sum(), retain_graph=True, timeout=TIMEOUT)
            assert x not in await ctx.gradients()
            await ctx.backward(y.sum(), timeout=TIMEOUT)
            assert x in await ctx.gradients()


# ── whose a call is ─────────────────────────────────────────────────────────────────────────────


def recorded(ctx: Context) -> int:
    """How many calls torch has recorded here, as sent."""
    return len(torchs._retrieve_context(ctx.id)._send_functions())  # type: ignore[attr-defined]


@pytest.mark.promise("autograd.tasks")
async def test_contexts_follow_tasks() -> None:
    """Children are in it, siblings in their own, and everybody else in none."""
    async with stages() as every:
        opened, done = asyncio.Event(), asyncio.Event()

        async def elsewhere() -> None:
            await opened.wait()
            y = await every["b"].on_loop(WEIGH, vector())
            assert y.grad_fn is None
            async with context() as ctx:
                assert (await every["b"].on_loop(WEIGH, vector())).grad_fn is not None
                assert recorded(ctx) == 1
            done.set()

        other = asyncio.create_task(elsewhere())
        async with context() as ctx:
            opened.set()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(every["b"].on_loop(WEIGH, vector())) for _ in range(3)]
            assert all(task.result().grad_fn is not None for task in tasks)
            await asyncio.gather(*(every["c"].on_loop(WEIGH, vector()) for _ in range(2)))
            await done.wait()
            assert recorded(ctx) == 5
            assert autograd_graphs.open_context() == -1
        await other
        assert (await every["b"].on_loop(WEIGH, vector())).grad_fn is None


@pytest.mark.promise("autograd.many")
async def test_a_context_in_another() -> None:
    """The inner one has the calls of its block, the outer one those before and after."""
    async with stages() as every:
        async with context() as outer:
            await every["b"].number(vector())
            async with context() as inner:
                await every["b"].number(vector())
                assert (recorded(outer), recorded(inner)) == (1, 1)
            await every["b"].number(vector())
            assert recorded(outer) == 2


@pytest.mark.promise("autograd.tasks")
async def test_a_task_that_outlives_its_context() -> None:
    """What it calls afterwards is recorded nowhere: at the opener's, and where a call was."""
    async with stages() as every:
        gate, left = autograd_graphs.gates[-1], asyncio.Event()

        async def late() -> Tensor:
            await left.wait()
            return await every["b"].on_loop(WEIGH, vector())  # type: ignore[no-any-return]

        async with context() as ctx:
            task = asyncio.create_task(late())
            y = await every["b"].leave_behind(vector())
            await ctx.backward(y.sum(), timeout=TIMEOUT)
            await gate.open()
            assert not await every["b"].left_behind()
        left.set()
        assert (await task).grad_fn is None


@pytest.mark.promise("autograd.no_grad")
async def test_no_grad_is_for_calls_too() -> None:
    """What is called under no_grad() is not recorded."""
    async with stages() as every:
        x = vector()
        async with context() as ctx:
            with torch.no_grad():
                y = await every["b"].on_loop(WEIGH, x)
            assert recorded(ctx) == 0
            assert y.grad_fn is None
            z = await every["b"].on_loop(WEIGH, x)
            await ctx.backward(z.sum(), timeout=TIMEOUT)
            assert recorded(ctx) == 1


# ── batches, rounds and streams ─────────────────────────────────────────────────────────────────


@pytest.mark.promise("autograd.batches")
async def test_batches_are_of_one_context() -> None:
    """Those of one context share a batch, also with its nested calls; two contexts never do."""
    alone = Alone()
    plan: Plan = (("weigh",), ("call", "c", "on_loop", WEIGH))
    async with stages() as every:

        async def one(seed: int) -> list[Tensor | None]:
            x = vector(seed)
            async with context() as ctx:
                calls = (every["b"].batch_in_thread(plan, x) for _ in range(3))
                ys = await asyncio.gather(*calls)
                await ctx.backward(ys[0].sum() + ys[2].sum(), timeout=TIMEOUT)
                return await every.gradients(ctx, x)

        found = await asyncio.gather(*map(one, range(8)))
        for seed, each in enumerate(found):
            half = alone.gradients((("call", "b", "batch", plan),), vector(seed))
            same(each, [g and 2 * g if g is None else 2 * g for g in half])
        sizes, contexts = await every["b"].batch_sizes()
        assert sum(sizes) == 24
        assert max(sizes) <= 3
        assert -1 not in contexts


@pytest.mark.promise("autograd.batches")
async def test_rounds_are_of_no_context() -> None:
    """Contributions of several contexts make a round, without a graph; gradients are refused."""
    async with stages() as every:

        async def one() -> Tensor:
            async with context():
                with pytest.raises(TypeError, match=r"Stage.together .* detach\(\)"):
                    await every["b"].together(vector())
                return await every["b"].together(vector().detach())  # type: ignore[no-any-return]

        for y in await asyncio.gather(one(), one()):
            torch.testing.assert_close(y, 2 * vector().detach() * new_weight("b").sum().detach())
            assert not y.requires_grad


@pytest.mark.promise("autograd.streams")
async def test_items_of_a_stream_carry_no_graph() -> None:
    """They are values; the call itself keeps no backward waiting."""
    async with stages() as every:
        async with context() as ctx:
            x = vector()
            found = [item async for item in every["b"].items(x)]
            assert [item.requires_grad for item in found] == [False] * 3
            async for _ in every["b"].items(x):
                break
            y = await every["b"].on_loop(WEIGH, x)
            await ctx.backward(y.sum(), timeout=TIMEOUT)


# ── what torch would wait for, for ever ─────────────────────────────────────────────────────────


async def unused(every: Stages, x: Tensor) -> None:
    await every["b"].on_loop(WEIGH, x)


async def only_a_number(every: Stages, x: Tensor) -> None:
    assert await every["b"].number(x) == 3


async def raised(every: Stages, x: Tensor) -> None:
    with pytest.raises(LookupError):
        await every["b"].fail(x)


async def cancelled(every: Stages, x: Tensor) -> None:
    task = asyncio.create_task(every["b"].never(x))
    await every["c"].number(x)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def timed_out(every: Stages, x: Tensor) -> None:
    with pytest.raises(CallTimeout):
        await remote(every.rrefs["b"], timeout=0.05).never(x)


async def dropped_there(every: Stages, x: Tensor) -> None:
    await every["b"].on_loop((("drop", "c", "on_loop", WEIGH),), x)


async def given_up_there(every: Stages, x: Tensor) -> None:
    gate = autograd_graphs.gates[-1]
    await gate.shut()
    seen = await gate.entered(0)
    task = asyncio.create_task(every["b"].give_up(x))
    await gate.entered(seen + 1)
    await gate.open()
    await task


async def in_a_batch(every: Stages, x: Tensor) -> None:
    await every["b"].batch((("drop", "c", "batch_in_thread", WEIGH),), x)


IN_VAIN = [
    unused,
    only_a_number,
    raised,
    cancelled,
    timed_out,
    dropped_there,
    given_up_there,
    in_a_batch,
]


@pytest.mark.promise("autograd.ends")
async def test_calls_that_contribute_nothing() -> None:
    """Backward ends whatever else was called in its context, and nothing gets zeros for it."""
    alone, x = Alone(), vector()
    plan: Plan = (("call", "c", "on_loop", WEIGH),)
    expected = alone.gradients(plan, x)
    assert expected[2] is None
    async with stages() as every:
        for in_vain in IN_VAIN:
            async with context() as ctx:
                await in_vain(every, x)
                root = (await autograd_graphs.follow(every.here, plan, x)).sum()
                await in_vain(every, x)
                await ctx.backward(root, timeout=TIMEOUT)
                same(await every.gradients(ctx, x), expected)


@pytest.mark.promise("autograd.several")
async def test_several_backwards() -> None:
    """Each with roots of its own; their gradients add up."""
    alone, x = Alone(), vector()
    async with stages() as every:
        async with context() as ctx:
            one = await every["b"].on_loop(WEIGH, x)
            two = await every["c"].on_loop(WEIGH, x)
            await ctx.backward(one.sum(), retain_graph=True, timeout=TIMEOUT)
            same(
                await every.gradients(ctx, x),
                alone.gradients((("call", "b", "on_loop", WEIGH),), x),
            )
            await ctx.backward([two.sum()], timeout=TIMEOUT)
            both: Plan = (("call", "b", "", WEIGH),), (("call", "c", "", WEIGH),)
            same(await every.gradients(ctx, x), alone.gradients((("fork", *both),), x))
            with pytest.raises(RuntimeError, match="a second time"):
                await ctx.backward(one.sum(), timeout=TIMEOUT)


async def test_nothing_is_spoilt() -> None:
    """A result that is not used gives its operations no gradient, not even zero times infinity."""
    async with stages() as every:
        x = torch.zeros(autograd_graphs.SIZE, requires_grad=True)
        async with context() as ctx:
            await every["b"].root(x)
            y = await every["b"].on_loop(WEIGH, x)
            await ctx.backward(y.sum(), timeout=TIMEOUT)
            same(
                await every.gradients(ctx, x),
                Alone().gradients((("call", "b", "on_loop", WEIGH),), x),
            )


@pytest.mark.promise("autograd.impossible")
async def test_a_call_without_an_end() -> None:
    """One that was given up and still runs is waited for until the time is over, and named."""
    async with stages() as every:
        gate, x = autograd_graphs.gates[-1], vector()
        for method in ("pass_gate", "give_up", "give_up_in_thread"):
            await gate.shut()
            seen = await gate.entered(0)
            async with context() as ctx:
                task = asyncio.create_task(getattr(every["b"], method)(x))
                await gate.entered(seen + 1)
                task.cancel()
                y = await every["c"].on_loop(WEIGH, x)
                # A call whose loop is closed by then is no less waited for.
                with pytest.raises(CallTimeout, match=f"{method} of worker 'b'"):
                    await ctx.backward(y.sum(), timeout=SHORT)
                await gate.open()
                await ctx.backward(y.sum(), timeout=TIMEOUT)
                assert (await ctx.gradients())[x] is not None


async def test_left_before_a_call_has_ended() -> None:
    """The context is released everywhere as soon as the call is answered."""
    async with stages() as every:
        gate = autograd_graphs.gates[-1]
        async with context():
            task = asyncio.create_task(every["b"].give_up(vector()))
            await gate.entered()
            task.cancel()
        assert await call("b", autograd_graphs.contexts_here) == 1
        await gate.open()
        await every.released()


async def test_left_on_a_loop_that_is_closed_before_a_call_has_ended() -> None:
    """The same, though the answer comes to no loop."""
    async with stages() as every:
        gate = autograd_graphs.gates[-1]

        async def elsewhere(entered: Callable[[], None]) -> None:
            async with context():
                task = asyncio.create_task(every["b"].pass_gate(vector()))
                await asyncio.to_thread(entered)
                task.cancel()

        loop = asyncio.get_running_loop()

        def wait() -> None:
            asyncio.run_coroutine_threadsafe(gate.entered(), loop).result(TIMEOUT)

        await asyncio.to_thread(lambda: asyncio.run(elsewhere(wait)))
        assert await call("b", autograd_graphs.contexts_here) == 1
        await gate.open()
        await every.released()


@pytest.mark.promise("autograd.impossible")
async def test_a_worker_that_is_lost() -> None:
    """Backward names the call that went with it, at once, and others' contexts are well."""
    async with stages() as every:
        x = vector()
        async with context() as ctx:
            task = asyncio.create_task(every["c"].never(x))
            y = await every["b"].on_loop(WEIGH, x)
            kill("c")
            with pytest.raises(WorkerLost):
                await task
            with pytest.raises(RpcError, match=r"never answered: Stage.never|never of worker 'c'"):
                await ctx.backward(y.sum(), timeout=TIMEOUT)
            with pytest.raises(RpcError, match="'c'"):
                await every["b"].on_loop((("call", "c", "on_loop", WEIGH),), x)
        async with context() as ctx:
            await ctx.backward((await every["b"].on_loop(WEIGH, x)).sum(), timeout=TIMEOUT)
            assert x in await ctx.gradients()
        every.released = _nothing  # type: ignore[method-assign]  # c is not there to be asked


async def _nothing() -> None:
    pass


HANG = """
import asyncio, aiorpc_torch as aiorpc
from tests.integration import test_autograd as tests
from tests.support.autograd_graphs import vector
from aiorpc_torch.autograd import context

async def main():
    async with tests.stages() as every:
        x = vector()
        async with context() as ctx:
            y = await every["b"].by_torch_in_vain("c", tests.WEIGH, x)
            for error in (aiorpc.CallTimeout, aiorpc.RpcError):
                try:
                    await ctx.backward(y.sum(), timeout=tests.SHORT)
                except error as exc:
                    print(type(exc).__name__, exc)
            await asyncio.gather(*(every.trained(tests.NESTED, vector(n)) for n in range(9)))
    print("left")

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.promise("autograd.timeout")
async def test_a_backward_that_torch_never_ends(tmp_path: Path) -> None:
    """It ends in time and names its calls; the world goes on, and so does the process's end."""
    # A process of its own: the thread in which torch waits is there until the process ends.
    (tmp_path / "hang.py").write_text(HANG)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(tmp_path / "hang.py"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(500.0):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    first, second, third = out.decode().splitlines()
    assert first.startswith("CallTimeout backward() did not finish in time, after by_torch_in_vain")
    assert second.startswith("RpcError autograd context unusable: an earlier backward")
    assert third == "left"
    assert process.returncode == 0


@pytest.mark.promise("autograd.loop")
async def test_a_slow_backward_does_not_block_others() -> None:
    """Neither the loop nor other contexts; cancelled, it is released once it has ended."""
    async with stages() as every:
        await every["b"].hold()
        async with context() as ctx:
            y = await every["b"].slow_backward(vector())
            task = asyncio.create_task(ctx.backward(y.sum(), timeout=TIMEOUT))
            await every.trained((("call", "c", "on_loop", WEIGH),), vector(1))
            await every["b"].number(vector())
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(RpcError, match="context unusable"):
                await ctx.backward(y.sum())
        assert await call("b", autograd_graphs.contexts_here) == 1
        await every["b"].let_go()


async def test_a_worker_that_dies_in_backward() -> None:
    """The error names the worker at once, with a timeout or without."""
    async with stages() as every:
        await every["c"].hold()
        entered = asyncio.create_task(every["c"].wait_for_backward())  # in no context
        async with context() as ctx:
            y = await every["c"].slow_backward(await every["b"].on_loop(WEIGH, vector()))
            task = asyncio.create_task(ctx.backward(y.sum()))
            await entered
            kill("c")
            with pytest.raises(WorkerLost, match="worker 'c' is lost"):
                await task
            with pytest.raises(RpcError, match="context unusable"):
                await ctx.backward(y.sum())
        every.released = _nothing  # type: ignore[method-assign]  # c is not there to be asked


@pytest.mark.promise("autograd.impossible")
@pytest.mark.parametrize("end", ["dies", "leaves"])
async def test_a_worker_that_is_gone_before_backward(end: str) -> None:
    """The error names it, though torch's own does not."""
    async with stages() as every:
        async with context() as ctx:
            y = await every["c"].on_loop(WEIGH, await every["b"].on_loop(WEIGH, vector()))
            change = asyncio.ensure_future(anext(every.me.changes()))
            await asyncio.sleep(0)  # it is told of changes from now on
            if end == "leaves":
                await every.me.stop("c")
            else:
                kill("c")
            assert (await change).kind == ("left" if end == "leaves" else "lost")
            error, text = (WorkerLeft, "has left") if end == "leaves" else (WorkerLost, "is lost")
            with pytest.raises(error, match=f"^worker 'c' {text}"):
                await ctx.backward(y.sum(), timeout=TIMEOUT)
        every.released = _nothing  # type: ignore[method-assign]  # c is not there to be asked


async def test_a_worker_that_freezes_before_backward() -> None:
    """Lost after `heartbeat` seconds, without a timeout; other contexts are well."""
    async with stages(heartbeat=1.0) as every:
        async with context() as ctx:
            y = await every["c"].on_loop(WEIGH, await every["b"].on_loop(WEIGH, vector()))
            with frozen("c"):
                with pytest.raises(WorkerLost, match="worker 'c' is lost: no sign of life"):
                    await ctx.backward(y.sum())
                x = vector()
                async with context() as other:
                    await other.backward((await every["b"].on_loop(WEIGH, x)).sum())
                    assert x in await other.gradients()
        await every.trained((("call", "c", "on_loop", WEIGH),), vector(1))


@pytest.mark.promise("autograd.errors")
async def test_errors_in_backward() -> None:
    """What fails on another worker is raised here, and `aiorpc.timeout` bounds the whole."""
    async with stages() as every:
        async with context() as ctx:
            y = await every["b"].fails_backward(vector())
            with pytest.raises(RuntimeError, match="no way back"):
                await ctx.backward(y.sum(), timeout=TIMEOUT)
            with pytest.raises(RpcError, match=r"backward\(\) raised .*no way back"):
                await ctx.backward(y.sum(), timeout=TIMEOUT)
        await every["b"].hold()
        async with context() as ctx:
            y = await every["b"].slow_backward(vector())
            with pytest.raises(CallTimeout, match="slow_backward of worker 'b'"):
                with aiorpc.timeout(SHORT):
                    await ctx.backward(y.sum())
        await every["b"].let_go()


# ── beginning and end ───────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("autograd.released")
async def test_contexts_are_released() -> None:
    """After an error, after a cancellation, and when opened and left on different threads."""
    async with stages() as every:
        with pytest.raises(LookupError):
            async with context() as failed:
                await every["b"].fail(vector())
        await every.released()

        async def stay() -> None:
            async with context():
                await every["b"].never(vector())

        task = asyncio.create_task(stay())
        await every["b"].number(vector())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await every.released()

        elsewhere = context()
        await asyncio.to_thread(lambda: asyncio.run(elsewhere.__aenter__()))  # type: ignore[arg-type]
        async with context() as ctx:
            assert ctx.id != elsewhere.id
        await elsewhere.__aexit__(None, None, None)
        await every.released()
        with pytest.raises(RuntimeError, match="was left"):
            await failed.gradients()
        with pytest.raises(RuntimeError, match="was left"):
            await failed.backward(vector().sum())


# ── optimizers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.promise("autograd.optimizers")
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.1})],
)
async def test_training(optimizer: Any, options: dict[str, Any]) -> None:
    """The weights of all workers change as one optimizer in one process changes them."""
    plan: Plan = (("call", "b", "on_loop", (*WEIGH, ("call", "c", "on_loop", WEIGH))),)
    alone = Alone()
    single = optimizer(alone.weights.values(), **options)
    async with stages() as every:
        here = await parameter_rrefs(every.here)
        assert [rref.local_value() for rref in here] == every.here.parameters()
        there = [await parameter_rrefs(every.rrefs[name]) for name in ("b", "c")]
        assert [rref.owner_name() for rrefs in there for rref in rrefs] == ["b", "b", "c", "c"]
        both = await DistributedOptimizer.create(
            optimizer, [*here, *there[0], *there[1]], **options
        )
        for seed in range(6):
            if seed == 3:
                await both.set(lr=0.01)
                single.param_groups[0]["lr"] = 0.01
            async with context() as ctx:
                y = await autograd_graphs.follow(every.here, plan, vector(seed))
                await ctx.backward(y.sum(), timeout=TIMEOUT)
                await both.step(ctx)
                assert every.here.weight.grad is None
            single.zero_grad()
            alone.run("main", plan, vector(seed)).sum().backward()
            single.step()
        weights = [await every[name].weights() for name in ("b", "c")]
        for found, expected in zip(weights, [*alone.weights.values()][1:], strict=True):
            torch.testing.assert_close(found[0], expected.detach(), rtol=1e-6, atol=1e-6)
            assert found[1].count_nonzero() == 0, "what has no gradient stays as it is"
        torch.testing.assert_close(every.here.weight, new_weight("main"))


async def test_an_owner_without_calls() -> None:
    """Its parameters stay as they are, as torch knows no context there."""
    async with stages() as every:
        both = [*await parameter_rrefs(every.rrefs["b"]), *await parameter_rrefs(every.rrefs["c"])]
        opt = await DistributedOptimizer.create(torch.optim.SGD, both, lr=0.1)
        async with context() as ctx:
            y = await every["b"].on_loop(WEIGH, vector())
            await ctx.backward(y.sum(), timeout=TIMEOUT)
            await opt.step(ctx)
        assert not torch.equal((await every["b"].weights())[0], new_weight("b"))
        assert torch.equal((await every["c"].weights())[0], new_weight("c"))


async def test_parameters_of_a_process_that_was_replaced() -> None:
    async with world(["a"]) as me, asyncio.timeout(TIMEOUT):
        params = await parameter_rrefs(await create("a", torch.nn.Linear, 1, 1))
        await me.restart("a")
        with pytest.raises(WorkerLost, match="'a' is lost: it was restarted"):
            await DistributedOptimizer.create(torch.optim.SGD, params, lr=0.1)


@pytest.mark.promise("autograd.optimizers")
async def test_optimizers_raise_as_themselves() -> None:
    """What torch.optim's class raises on an owner, with its own arguments, and what is ours."""
    async with stages() as every:
        params = await parameter_rrefs(every.rrefs["b"])
        create = DistributedOptimizer.create
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            await create(torch.optim.SGD, params, lr=-1.0)
        with pytest.raises(TypeError, match="momentumm"):
            await create(torch.optim.SGD, params, momentumm=1)
        with pytest.raises(TypeError, match="RRefs of tensors, got one of a Stage"):
            await create(torch.optim.SGD, [every.rrefs["b"]])
        with pytest.raises(TypeError, match="must be RRefs"):
            await create(torch.optim.SGD, [torch.zeros(1)])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="params must not be empty"):
            await create(torch.optim.SGD, [])
        with pytest.raises(TypeError, match=r"must have parameters\(\), got a dict"):
            await parameter_rrefs(await aiorpc.create("b", dict))
        opt = await create(torch.optim.SGD, params, lr=0.5)
        assert "SGD on b" in repr(opt)
        with pytest.raises(ValueError, match="SGD has no option rate; its options are lr"):
            await opt.set(rate=1)
        async with context() as ctx:
            pass
        with pytest.raises(RuntimeError, match="was left"):
            await opt.step(ctx)
