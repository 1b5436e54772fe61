"""What does `@batched` bring over the batching of the PyTorch tutorial?

Many coroutines ask one small policy for an action each, again and again. The other side is the
pattern of "Implementing Batch RPC Processing Using Asynchronous Executions" in its strongest form.
It knows the number of callers, so its batch is always full and never waits for more.

    python -m benchmarks.batching [--quick] [--repeat N] [--plot PATH]
"""

import argparse
import asyncio
import threading
from statistics import quantiles
from time import perf_counter

import torch
from torch import Tensor, nn
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed import rpc
from torch.distributed.rpc import RRef

import aiorpc_torch as aiorpc
from aiorpc_torch import remote

from ._compare import Row, Runs, arguments, show, take_turns
from ._plot import Panel, draw, pair

CALLERS = 64  # of the rows; the figure has other numbers
MOST = 256


def actions(policy: nn.Module, states: Tensor) -> list[int]:
    with torch.inference_mode():
        found: list[int] = policy(states).argmax(1).tolist()
    return found


def new_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))


class Agent:
    def __init__(self) -> None:
        self.policy = new_policy()
        self.batches = 0

    @aiorpc.batched(max_size=MOST)
    async def select(self, states: list[Tensor]) -> list[int]:
        self.batches += 1
        return actions(self.policy, torch.stack(states))

    async def batches_so_far(self) -> int:
        return self.batches


class TutorialAgent:
    def __init__(self, callers: int) -> None:
        self.policy = new_policy()
        self.callers = self.missing = callers
        self.states = torch.zeros(callers, 4)
        self.answer: torch.futures.Future[list[int]] = torch.futures.Future()
        self.lock = threading.Lock()

    def select(self, caller: int, state: Tensor) -> "torch.futures.Future[int]":
        self.states[caller].copy_(state)
        mine: torch.futures.Future[int] = self.answer.then(lambda answer: answer.value()[caller])
        with self.lock:
            self.missing -= 1
            if self.missing == 0:
                self._leave()
        return mine

    def _leave(self) -> None:
        full, self.answer = self.answer, torch.futures.Future()
        self.missing = self.callers
        full.set_result(actions(self.policy, self.states))


# Not behind an RRef, as in the tutorial: an RRef in each call costs torch about a fifth of
# its calls per second.
tutorial_agent = TutorialAgent(CALLERS)


def expect_callers(callers: int) -> None:
    global tutorial_agent
    tutorial_agent = TutorialAgent(callers)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def select(caller: int, state: Tensor) -> "torch.futures.Future[int]":
    return tutorial_agent.select(caller, state)


class Side:
    """A way of asking, with its measurements of all repetitions and of the warm-up.

    `rates` are in calls/s, `slowest` is the p99 of the time of a call in ms.
    """

    def __init__(self, callers: int, steps: int) -> None:
        self.states, self.steps = list(torch.rand(callers, 4)), steps
        self.slowest: list[float] = []
        self.times: list[float] = []

    def rate(self, seconds: float) -> float:
        self.slowest.append(quantiles(self.times, n=100)[98] * 1e3)
        self.times = []
        return len(self.states) * self.steps / seconds


class Ours(Side):
    """The coroutines, and the mean size of their batches."""

    def __init__(self, agent: RRef[Agent], callers: int, steps: int) -> None:
        super().__init__(callers, steps)
        self.agent = agent
        self.sizes: list[float] = []

    async def measure(self) -> float:
        before: int = await remote(self.agent).batches_so_far()
        start = perf_counter()
        await asyncio.gather(*map(self._live, self.states))
        seconds = perf_counter() - start
        batches = await remote(self.agent).batches_so_far() - before
        self.sizes.append(len(self.states) * self.steps / batches)
        return self.rate(seconds)

    async def _live(self, state: Tensor) -> None:
        for _ in range(self.steps):
            start = perf_counter()
            await remote(self.agent).select(state)
            self.times.append(perf_counter() - start)


class Raw(Side):
    """The tutorial's pattern: all call, and call again when all are answered."""

    def __init__(self, peer: WorkerInfo, callers: int, steps: int) -> None:
        super().__init__(callers, steps)
        self.peer = peer

    def measure(self) -> float:
        rpc.rpc_sync(self.peer, expect_callers, args=(len(self.states),))
        start = perf_counter()
        for _ in range(self.steps):
            torch.futures.wait_all([self._call(*each) for each in enumerate(self.states)])
        seconds = perf_counter() - start
        self._time()
        return self.rate(seconds)

    def _call(self, caller: int, state: Tensor) -> "torch.futures.Future[int]":
        answer: torch.futures.Future[int]
        answer = rpc.rpc_async(self.peer, select, args=(caller, state), timeout=0)
        return answer

    def _time(self) -> None:
        """Time the calls of a part of the steps, separately since a callback slows each call."""
        for _ in range(max(2, self.steps // 4)):
            torch.futures.wait_all([self._timed(*each) for each in enumerate(self.states)])

    def _timed(self, caller: int, state: Tensor) -> "torch.futures.Future[None]":
        start, times = perf_counter(), self.times
        return self._call(caller, state).then(lambda _: times.append(perf_counter() - start))


async def compare(
    agent: RRef[Agent], repeat: int, callers: int, calls: int
) -> tuple[Runs, Runs, Ours]:
    """Measure calls/s, and the p99 of their times in ms."""
    ours = Ours(agent, callers, max(2, calls // callers))
    raw = Raw(rpc.get_worker_info("server"), callers, max(2, calls // callers))
    runs = await take_turns(repeat, ours.measure, raw.measure)
    return runs, Runs(ours.slowest[1:], raw.slowest[1:]), ours


async def main(given: argparse.Namespace) -> tuple[list[Row], list[Panel]]:
    repeat, calls = given.repeat, 640 if given.quick else 3_200
    async with aiorpc.local_world(["server"]):
        agent = await aiorpc.create("server", Agent)
        rates, slowest, ours = await compare(agent, repeat, CALLERS, calls)
        callers = [1, 16, 64] if given.quick else [1, 2, 4, 8, 16, 32, 64, 128, 256]
        drawn = await panels(agent, repeat, callers, calls // 2) if given.plot else []
    return [
        Row(f"{CALLERS} callers of a 4-128-2 MLP", "calls/s", rates, "≥ 12"),
        Row("p99 of the time of a call", "ms", slowest),
        Row("mean batch", "calls", Runs(ours.sizes[1:], [CALLERS] * repeat)),
    ], drawn


async def panels(agent: RRef[Agent], repeat: int, callers: list[int], calls: int) -> list[Panel]:
    found = [await compare(agent, repeat, each, calls) for each in callers]
    name = "the tutorial's pattern, raw torch"
    rates = pair(callers, [rates for rates, _, _ in found], name)
    slowest = pair(callers, [slowest for _, slowest, _ in found], name)
    return [
        Panel("Throughput of a 4-128-2 MLP", "callers", "calls/s", rates),
        Panel("Time of a call", "callers", "p99, ms", slowest, log="xy"),
    ]


if __name__ == "__main__":
    given = arguments("What @batched brings over the PyTorch tutorial's batching.")
    rows, drawn = asyncio.run(main(given))
    show(rows)
    draw(drawn, given.plot)
