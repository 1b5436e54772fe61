"""Steps of training through a module on another worker: ours, and torch's blocking ones.

A step: open a context, one forward there, backward, a step of its optimizer, close.
"""

import asyncio
import gc
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import autograd as torchs, rpc
from torch.distributed.autograd import backward  # type: ignore[attr-defined]
from torch.distributed.optim import DistributedOptimizer as TorchOptimizer
from torch.distributed.rpc import RRef

from aiorpc_torch import create, local_world, remote
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

from ._compare import freeze, settle
from ._peers_process import process
from ._peers_raw import join, serve


class Net(torch.nn.Sequential):
    """A network of `layers` linear layers of that width."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__(*(torch.nn.Linear(width, width) for _ in range(layers)))

    async def on_loop(self, x: Tensor) -> Tensor:
        return self.forward(x)  # type: ignore[no-any-return, no-untyped-call]


def forward(rref: RRef[Net], x: Tensor) -> Tensor:
    return rref.local_value()(x)  # type: ignore[no-any-return]


class Kind(NamedTuple):
    """A kind of training step: its network, its batch and the method that is called."""

    what: str
    method: str  # of `Net`, for our side
    width: int
    layers: int
    rows: int
    needs: bool  # the input requires a gradient
    share: int = 1  # one of `share` steps is made

    def input(self) -> Tensor:
        return torch.rand(self.rows, self.width, requires_grad=self.needs)


SMALL = Kind("a small step", "forward", 16, 1, 8, False)
KINDS = (
    SMALL,
    SMALL._replace(what="through async def", method="on_loop"),
    SMALL._replace(what="the input requires a gradient", needs=True),
    Kind("a step of three layers of 512", "forward", 512, 3, 64, False, share=5),
)


async def our_steps(net: RRef[Net], kind: Kind, opt: DistributedOptimizer, steps: int) -> float:
    times, x, method = [], kind.input(), getattr(remote(net), kind.method)
    for _ in range(steps):
        start = perf_counter()
        async with context() as ctx:
            y = await method(x)
            await ctx.backward([y.sum()])
            await opt.step(ctx)
        times.append(perf_counter() - start)
    return median(times) * 1e6


def raw_steps(net: RRef[Net], kind: Kind, opt: Any, steps: int) -> float:
    times, x = [], kind.input()
    for _ in range(steps):
        start = perf_counter()
        with torchs.context() as number:
            y = rpc.rpc_sync("server", forward, args=(net, x))
            backward(number, [y.sum()])
            opt.step(number)
        times.append(perf_counter() - start)
    return median(times) * 1e6


def torchs_optimizer(params: list[RRef[Tensor]]) -> Any:
    return TorchOptimizer(torch.optim.SGD, params, lr=0.001)  # type: ignore[no-untyped-call]


# ── each side in processes of its own ───────────────────────────────────────────────────────────


async def ours_alone(steps: int) -> list[float]:
    """Return the µs of each kind of step, in a world without plain torch."""
    found = []
    async with local_world(["server"]):
        for kind in KINDS:
            net = await create("server", Net, kind.width, kind.layers)
            params = await parameter_rrefs(net)
            opt = await DistributedOptimizer.create(torch.optim.SGD, params, lr=0.001)
            await our_steps(net, kind, opt, 10)
            settle()
            found.append(await our_steps(net, kind, opt, steps // kind.share))
    return found


async def raw_alone(where: str, steps: int) -> list[float]:
    """Return the same for torch's blocking API, in processes without this library."""
    with process(_raw_client, where, steps) as client:
        found: list[float] = await asyncio.to_thread(client.recv)
    return found


def _raw_client(parent: Connection, where: str, steps: int) -> None:
    found = []
    with process(serve, where):
        join("client", 0, where)
        for kind in KINDS:
            net = rpc.remote("server", Net, args=(kind.width, kind.layers))
            params = rpc.rpc_sync("server", _parameters, args=(net,))
            opt = torchs_optimizer(params)
            raw_steps(net, kind, opt, 10)
            freeze()
            found.append(raw_steps(net, kind, opt, steps // kind.share))
        parent.send(found)
        del net, params, opt
        gc.unfreeze()
        gc.collect()  # shutdown would wait for ever for RRefs that are held
        rpc.shutdown()


def _parameters(net: RRef[Net]) -> list[RRef[Tensor]]:
    return [RRef(each) for each in net.local_value().parameters()]
