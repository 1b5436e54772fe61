"""Graphs that cross workers, by plan: what the workers of tests/integration/test_autograd.py run.

A plan is a tuple of steps, each of which makes the next tensor of the last. Run in one process it
gives the gradients that are right.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd, rpc

from aiorpc_torch import Round, RRef, batched, call, create, fetch, remote
from aiorpc_torch._torch.compat import current_context_id as open_context
from aiorpc_torch.testing import Gate

Plan = tuple[Any, ...]
SIZE = 3
NAMES = ("main", "b", "c")


def new_weight(name: str) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(NAMES.index(name))
        return torch.randn(SIZE, SIZE).requires_grad_()


class Stage:
    """A weight on one worker, and ways to run a plan beside it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = new_weight(name)
        self.unused = torch.zeros(SIZE, requires_grad=True)
        self.stages: dict[str, Any] = {}
        self.sizes: list[int] = []
        self.seen: list[int] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def parameters(self) -> list[Tensor]:
        return [self.weight, self.unused]

    async def meet(self) -> None:
        for name in NAMES[1:]:
            self.stages[name] = await call(name, stage_here, name)

    # ── plans ───────────────────────────────────────────────────────────────────────────────────

    async def on_loop(self, plan: Plan, x: Tensor) -> Tensor:
        return await follow(self, plan, x)

    def in_thread(self, plan: Plan, x: Tensor) -> Tensor:
        return asyncio.run(follow(self, plan, x))

    @batched(max_size=4)
    async def batch(self, plans: list[Plan], xs: list[Tensor]) -> list[Tensor]:
        self.sizes.append(len(xs))
        return [*await asyncio.gather(*map(self.on_loop, plans, xs))]

    @batched(max_size=4)
    def batch_in_thread(self, plans: list[Plan], xs: list[Tensor]) -> Tensor:
        self.sizes.append(len(xs))
        self.seen.append(open_context())
        return torch.stack([*map(self.in_thread, plans, xs)])

    def by_torch(self, to: str, plan: Plan, x: Tensor) -> Tensor:
        """As plain torch calls: it must be a part of the result."""
        return rpc.rpc_sync(to, run_alone, args=(to, plan, x))

    def by_torch_in_vain(self, to: str, plan: Plan, x: Tensor) -> Tensor:
        rpc.rpc_sync(to, run_alone, args=(to, plan, x))
        return x * 2

    # ── what contributes nothing ────────────────────────────────────────────────────────────────

    async def number(self, x: Tensor) -> int:
        return 3

    async def fail(self, x: Tensor) -> Tensor:
        raise LookupError("no such thing")

    async def never(self, x: Tensor) -> Tensor:
        await asyncio.Event().wait()
        return x

    def pass_gate(self, x: Tensor) -> Tensor:
        """In a thread: it is not cancelled."""
        asyncio.run(_pass_gate())
        return x @ self.weight

    async def give_up(self, x: Tensor) -> Tensor:
        """Call on, and do not wait for the answer."""
        seen = await call("main", entered, 0)
        task = asyncio.create_task(call(self.stages["c"], Stage.pass_gate, x))
        await call("main", entered, seen + 1)
        task.cancel()
        return x * 2

    def give_up_in_thread(self, x: Tensor) -> Tensor:
        """The same, from a loop that is closed when the answer comes."""
        return asyncio.run(self.give_up(x))

    async def leave_behind(self, x: Tensor) -> Tensor:
        """Let a task of its own call on later."""
        self.tasks.append(asyncio.create_task(self._later(x)))
        return x * 2

    async def _later(self, x: Tensor) -> Tensor:
        await call("main", pass_gate)
        return await call(self.stages["c"], Stage.on_loop, (("weigh",),), x)

    async def left_behind(self) -> bool:
        """Whether what was left behind has a graph."""
        return (await self.tasks.pop()).grad_fn is not None

    async def root(self, x: Tensor) -> Tensor:
        """Its gradient is infinite at 0."""
        return x.sqrt() * self.weight.sum()

    # ── others ──────────────────────────────────────────────────────────────────────────────────

    async def items(self, x: Tensor) -> AsyncIterator[Tensor]:
        for _ in range(3):
            x = x @ self.weight
            yield x

    @batched(Round(size=2))
    async def together(self, xs: list[Tensor]) -> Tensor:
        return torch.stack(xs).sum(0) * self.weight.sum()

    async def slow_backward(self, x: Tensor) -> Tensor:
        return Slow.apply(x)  # type: ignore[no-any-return]

    async def fails_backward(self, x: Tensor) -> Tensor:
        return Fails.apply(x)  # type: ignore[no-any-return]

    async def weights(self) -> list[Tensor]:
        return [each.detach() for each in self.parameters()]

    async def let_go(self) -> None:
        Slow.gate.set()

    async def hold(self) -> None:
        Slow.gate.clear()

    def wait_for_backward(self) -> None:
        assert Slow.entered.wait(30.0)

    async def gradients(self, context: int) -> list[Tensor | None]:
        found = autograd.get_gradients(context)
        return [found.get(self.weight), found.get(self.unused)]

    async def torchs_context(self) -> int:
        return open_context()

    def torchs_context_in_thread(self) -> int:
        return open_context()

    async def batch_sizes(self) -> tuple[list[int], list[int]]:
        return self.sizes, self.seen


async def _pass_gate() -> None:
    await call("main", pass_gate)


gates: list[Gate] = []


async def pass_gate() -> None:
    await gates[-1].passed()


async def entered(count: int) -> int:
    return await gates[-1].entered(count)


def stage_here(name: str) -> Any:
    return RRef(_stages[name])


class Slow(torch.autograd.Function):
    gate, entered = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Slow.entered.set()
        assert Slow.gate.wait(30.0)
        return gradient


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise LookupError("no way back")


def run_alone(name: str, plan: Plan, x: Tensor) -> Tensor:
    """A plan of local steps, as plain torch calls it."""
    return asyncio.run(follow(_stages[name], plan, x))


_stages: dict[str, Stage] = {}


def make_stage(name: str) -> Stage:
    _stages[name] = Stage(name)
    return _stages[name]


async def follow(stage: Stage, plan: Plan, x: Tensor) -> Tensor:
    """Take the steps of a plan."""
    for step in plan:
        x = await take(stage, step, x)
    return x


async def take(stage: Stage, step: Plan, x: Tensor) -> Tensor:
    match step:
        case ("weigh",):
            return x @ stage.weight
        case ("bend",):
            return x.tanh()
        case ("fork", first, second):
            one, two = await asyncio.gather(follow(stage, first, x), follow(stage, second, x))
            return one + two
        case ("call", to, how, plan):
            return await at(stage, to, how, plan, x)
        case ("drop", to, how, plan):
            await at(stage, to, how, plan, x)
            return x
        case ("number", to):
            return x * await ask(stage, to, "number", x)
        case ("fail", to):
            try:
                return await ask(stage, to, "fail", x)  # type: ignore[no-any-return]
            except LookupError:
                return x * 2
        case _:
            raise ValueError(step)


async def at(stage: Stage, to: str, how: str, plan: Plan, x: Tensor) -> Tensor:
    if how == "kept":  # there, and fetched when it is there
        rref = await create(to, keep, to, plan, x)
        return await fetch(rref)  # type: ignore[no-any-return]
    return await ask(stage, to, how, plan, x)  # type: ignore[no-any-return]


async def ask(stage: Stage, to: str, how: str, *args: Any) -> Any:
    """Call that method; by name at the tests' own process, whose RRefs stay in its first world."""
    if to != "main":
        return await getattr(remote(stage.stages[to]), how)(*args)
    return await call(to, here_in_thread if how == "in_thread" else here, how, *args)


async def here(how: str, *args: Any) -> Any:
    return await getattr(_stages["main"], how)(*args)


def here_in_thread(how: str, *args: Any) -> Any:
    return getattr(_stages["main"], how)(*args)


async def keep(name: str, plan: Plan, x: Tensor) -> Tensor:
    return await follow(_stages[name], plan, x)


# ── in one process ──────────────────────────────────────────────────────────────────────────────


class Alone:
    """The weights of all workers in one process."""

    def __init__(self) -> None:
        self.weights = {name: new_weight(name) for name in NAMES}

    def run(self, here: str, plan: Plan, x: Tensor) -> Tensor:
        for step in plan:
            x = self._take(here, step, x)
        return x

    def _take(self, here: str, step: Plan, x: Tensor) -> Tensor:
        match step:
            case ("weigh",):
                return x @ self.weights[here]
            case ("bend",):
                return x.tanh()
            case ("fork", first, second):
                return self.run(here, first, x) + self.run(here, second, x)
            case ("call", to, _, plan):
                return self.run(to, plan, x)
            case ("drop", *_):
                return x
            case ("number", _):
                return x * 3
            case ("fail", _):
                return x * 2
            case _:
                raise ValueError(step)

    def gradients(self, plan: Plan, x: Tensor) -> list[Tensor | None]:
        """Of x, and of each worker's weight."""
        leaves = [x.detach().clone().requires_grad_(), *self.weights.values()]
        root = self.run("main", plan, leaves[0]).sum()
        return [*torch.autograd.grad(root, leaves, allow_unused=True)]


def weights_in_dropped_batches(plan: Plan, is_dropped: bool = False) -> set[str]:
    """Return the workers whose weights may have zeros for a gradient, where they have none alone.

    `batch_in_thread` stacks the results of its callers. If one of two callers drops its own, the
    backward of the stack has zeros for it, as it would have in one process.
    """
    found: set[str] = set()
    for step in plan:
        match step:
            case ("fork", *branches):
                inner = [(branch, is_dropped) for branch in branches]
            case ("call" | "drop" as kind, to, how, called):
                inner = [(called, is_dropped or kind == "drop")]
                if how == "batch_in_thread" and inner[0][1] and ("weigh",) in called:
                    found.add(to)
            case _:
                inner = []
        for each, dropped in inner:
            found |= weights_in_dropped_batches(each, dropped)
    return found


async def contexts_here() -> int:
    """How many contexts torch knows in this process."""
    return autograd._get_debug_info()["num_autograd_contexts"]  # type: ignore[attr-defined, no-any-return]


def vector(seed: int = 0) -> Tensor:
    return torch.linspace(-1, 1, SIZE).roll(seed).add(seed / 100).requires_grad_()
