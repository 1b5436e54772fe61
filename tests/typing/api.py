"""The typed API as a user writes it: checked by mypy and pyright, never run."""

from typing import assert_type

import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, call, create, fetch, local_world, remote, run_local, wrap_future


class Net:
    """A model."""

    def __init__(self, width: int, *, lr: float = 0.1) -> None: ...

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    async def evaluate(self, name: str) -> list[float]:
        return [float(len(name))]


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


async def futures(future: "torch.futures.Future[int]") -> None:
    """A wrapped future has the future's type."""
    assert_type(await wrap_future(future), int)


@aiorpc.async_execution
async def served(a: int, b: int = 0) -> str:
    return str(a + b)


async def main(me: aiorpc.Worker, label: str) -> int:
    assert_type(await served(1, b=2), str)
    async with local_world(["ps"], name="x") as worker:
        assert_type(worker, aiorpc.Worker)
        assert_type(worker.peers, tuple[str, ...])
    return len(label)


assert_type(run_local(main, ["a", "b"], args=("label",)), int)
