"""What does `@batched` bring over the batching of the PyTorch tutorial?

Many coroutines ask one small policy for an action each, again and again. The other side is the
pattern of "Implementing Batch RPC Processing Using Asynchronous Executions" at its strongest: it
knows how many callers there are, so its batch is always full and never waits in vain.

    python -m benchmarks.batching [--quick] [--repeat N]
"""

import asyncio
import threading
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed import rpc
from torch.distributed.rpc import RRef

import aiorpc_torch as aiorpc
from aiorpc_torch import remote

from ._compare import Row, Runs, arguments, show, take_turns

CALLERS = 64


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

    @aiorpc.batched(max_size=CALLERS)
    async def select(self, states: list[Tensor]) -> list[int]:
        self.batches += 1
        return actions(self.policy, torch.stack(states))

    async def batches_so_far(self) -> int:
        return self.batches


class TutorialAgent:
    def __init__(self) -> None:
        self.policy = new_policy()
        self.states = torch.zeros(CALLERS, 4)
        self.missing = CALLERS
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
        self.missing = CALLERS
        full.set_result(actions(self.policy, self.states))


# Not behind an RRef, as in the tutorial: to send one with each call costs torch about a fifth of
# its calls per second.
tutorial_agent = TutorialAgent()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def select(caller: int, state: Tensor) -> "torch.futures.Future[int]":
    return tutorial_agent.select(caller, state)


class Ours:
    """The coroutines, and the mean size of the batches they were in, for each measurement."""

    def __init__(self, agent: RRef[Agent], states: list[Tensor], steps: int) -> None:
        self.agent, self.states, self.steps = agent, states, steps
        self.sizes: list[float] = []

    async def measure(self) -> float:
        calls = len(self.states) * self.steps
        before: int = await remote(self.agent).batches_so_far()
        start = perf_counter()
        await asyncio.gather(*map(self._live, self.states))
        seconds = perf_counter() - start
        self.sizes.append(calls / (await remote(self.agent).batches_so_far() - before))
        return calls / seconds

    async def _live(self, state: Tensor) -> None:
        for _ in range(self.steps):
            await remote(self.agent).select(state)


def raw(peer: WorkerInfo, states: list[Tensor], steps: int) -> float:
    start = perf_counter()
    for _ in range(steps):
        torch.futures.wait_all(
            [
                rpc.rpc_async(peer, select, args=(caller, state), timeout=0)
                for caller, state in enumerate(states)
            ]
        )
    return len(states) * steps / (perf_counter() - start)


async def main(quick: bool, repeat: int) -> list[Row]:
    states, steps = list(torch.rand(CALLERS, 4)), 10 if quick else 50
    async with aiorpc.local_world(["server"]):
        ours = Ours(await aiorpc.create("server", Agent), states, steps)
        theirs = partial(raw, rpc.get_worker_info("server"), states, steps)
        runs = await take_turns(repeat, ours.measure, theirs)
    return [
        Row(f"{CALLERS} callers of a 4-128-2 MLP", "calls/s", runs, "≥ 12"),
        Row("mean batch", "calls", Runs(ours.sizes[1:], [CALLERS] * repeat), ""),
    ]


if __name__ == "__main__":
    given = arguments("What @batched brings over the PyTorch tutorial's batching.")
    show(asyncio.run(main(given.quick, given.repeat)))
