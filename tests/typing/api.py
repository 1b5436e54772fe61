"""The typed API as a user writes it: checked by mypy and pyright, never run."""

from collections.abc import AsyncIterator, Awaitable
from typing import assert_type

import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    Group,
    RRef,
    call,
    create,
    fetch,
    in_thread,
    local_world,
    proxy,
    remote,
    run_local,
    wrap_future,
)


class Net:
    """A model."""

    def __init__(self, width: int, *, lr: float = 0.1) -> None: ...

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    async def evaluate(self, name: str) -> list[float]:
        return [float(len(name))]

    async def generate(self, count: int) -> AsyncIterator[str]:
        for number in range(count):
            yield str(number)


async def make_net(width: int) -> Net:
    return Net(width)


def norm(net: Net) -> float:
    return 1.0


async def methods(rref: RRef[Net], x: Tensor) -> None:
    """Parameters and results of methods are seen through `call`."""
    assert_type(await call(rref, Net.forward, x), Tensor)
    assert_type(await call(rref, Net.forward, x, scale=2.0), Tensor)
    assert_type(await call(rref, Net.evaluate, "a"), list[float])
    assert_type(await call(rref, norm), float)
    await call(rref, Net.forward, "x")  # type: ignore[call-overload]  # pyright: ignore
    await call(rref, Net.forward)  # type: ignore[call-overload]  # pyright: ignore


async def functions() -> None:
    """So are those of functions, on workers by name or rank."""
    assert_type(await call("ps", make_net, 3), Net)
    assert_type(await call(0, len, [1, 2]), int)
    await call("ps", make_net, "3")  # type: ignore[call-overload]  # pyright: ignore


async def objects() -> None:
    """`create` keeps the class and its constructor's parameters."""
    net = await create("ps", Net, 8, lr=0.5)
    assert_type(net, RRef[Net])
    assert_type(await create(1, make_net, 8), RRef[Net])
    assert_type(await fetch(net), Net)
    await create("ps", Net, "8")  # type: ignore[call-overload]  # pyright: ignore
    await remote(net).forward(torch.ones(1))
    await remote(net, timeout=0.5).evaluate("a")


async def results_that_stay(rref: RRef[Net], x: Tensor) -> None:
    """`create` with an RRef has the method's parameters, and an RRef of its result."""
    assert_type(await create(rref, Net.forward, x, scale=2.0), RRef[Tensor])
    assert_type(await create(rref, Net.evaluate, "a"), RRef[list[float]])
    assert_type(await create(rref, norm), RRef[float])
    await create(rref, Net.forward, "x")  # type: ignore[call-overload]  # pyright: ignore


async def handles(rref: RRef[Net], x: Tensor) -> None:
    """What `remote` returns is taken where an RRef is, with the class of the object."""
    net = remote(rref, timeout=0.5, retries=2)
    assert_type(net, aiorpc.types.RemoteProxy[Net])
    assert_type(await call(net, Net.forward, x), Tensor)
    assert_type(await create(net, Net.forward, x), RRef[Tensor])
    assert_type(await fetch(net), Net)
    assert_type(proxy(net), Net)
    assert_type(Group([net]), Group[Net])
    await net(x)
    remote(net, retries=1)
    remote(rref, retries="2")  # type: ignore[call-overload]  # pyright: ignore


def in_a_thread(rref: RRef[Net], x: Tensor) -> None:
    """`run` has the type of what is awaited or called, `iterate` that of the items."""
    with in_thread(local_world(["ps"])) as me:
        assert_type(me, aiorpc.types.WorkerThread[aiorpc.types.LocalWorker])
        assert_type(me.run(create("ps", Net, 8)), RRef[Net])
        assert_type(me.run(make_net, 8), Net)
        assert_type(me.run(norm, Net(8)), float)
        for token in me.iterate(proxy(rref).generate(3)):
            assert_type(token, str)
        me.run(3)  # type: ignore[call-overload]  # pyright: ignore
    in_thread("ps")  # type: ignore[arg-type]  # pyright: ignore


async def proxies(rref: RRef[Net]) -> None:
    """`proxy` has the type of the object: its coroutines and its async generators."""
    net = proxy(rref)
    assert_type(net, Net)
    assert_type(await net.evaluate("a"), list[float])
    assert_type(await proxy(rref, timeout=0.5).evaluate("a"), list[float])
    async for token in proxy(rref).generate(3):
        assert_type(token, str)
    await proxy(rref).evaluate(3)  # type: ignore[arg-type]  # pyright: ignore
    await proxy(rref).nothing()  # type: ignore[attr-defined]  # pyright: ignore
    proxy("ps")  # type: ignore[arg-type]  # pyright: ignore
    proxy(rref, timeout="1")  # type: ignore[arg-type]  # pyright: ignore


async def timeouts(rref: RRef[Net]) -> None:
    """`timeout=` is a number of seconds where keywords are the library's own."""
    assert_type(await fetch(rref, timeout=1.5), Net)
    await remote(rref, timeout=3).evaluate("a")
    await fetch(rref, timeout="1")  # type: ignore[arg-type]  # pyright: ignore


def taken_for_torch(rref: RRef[Net]) -> None:
    """What `rpc.remote` takes beside its first argument is an error to type checkers too."""
    remote("ps", Net)  # type: ignore[call-overload]  # pyright: ignore
    remote(rref, Net)  # type: ignore[call-overload]  # pyright: ignore
    remote(rref, args=(3,))  # type: ignore[call-overload]  # pyright: ignore


async def futures(future: "torch.futures.Future[int]") -> None:
    """A wrapped future has the future's type."""
    assert_type(await wrap_future(future), int)


@aiorpc.async_execution
async def served(a: int, b: int = 0) -> str:
    return str(a + b)


async def main(me: aiorpc.types.Worker, label: str) -> int:
    assert_type(await served(1, b=2), str)
    async with local_world(["ps"], name="x") as worker:
        assert_type(worker, aiorpc.types.LocalWorker)
        await worker.start("w0")
        await worker.stop("w0")
        assert_type(anext(worker.changes()), Awaitable[aiorpc.types.Change])
        assert_type(worker.peers, tuple[str, ...])
    return len(label)


assert_type(run_local(main, ["a", "b"], args=("label",)), int)
