"""An open loop of requests to the model server of the examples, and the rows of its table."""

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import batched
from examples.inference import Client, served

WAYS = {"infer": "batched", "infer_alone": "one by one"}


@dataclass
class Outcome:
    """Outcomes of a client's requests."""

    latencies: list[float] = field(default_factory=list)  # seconds, of answered requests
    late: int = 0
    shed: int = 0


class Left:
    """A count of the batches of one function that have left since its creation."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._before = self._now()

    def _now(self) -> tuple[int, Counter[str]]:
        for name, found in aiorpc.observe.stats().batches.items():
            if name.endswith(f".{self._way}"):
                return found.items, Counter(found.reasons)
        return 0, Counter()

    def read(self) -> tuple[float, Counter[str]]:
        """Return the mean batch size, and the reasons for which batches left."""
        items, reasons = self._now()
        reasons -= self._before[1]
        return (items - self._before[0]) / max(1, reasons.total()), reasons


@dataclass
class Row:
    """Results of one way to ask, under one load."""

    way: str
    asked: float  # a second
    answered: float  # a second
    marks: tuple[float, float, float]  # p50, p95 and p99 of answered requests, milliseconds
    late: int
    shed: int
    batch: float  # mean calls in a batch
    reasons: Counter[str]  # reasons for which batches left

    def cells(self) -> list[str]:
        numbers = (self.asked, self.answered, *self.marks)
        why = ", ".join(f"{reason} {count:,}" for reason, count in self.reasons.most_common())
        texts = [f"{number:,.0f}" if number >= 100 else f"{number:.1f}" for number in numbers]
        return [self.way, *texts, f"{self.late:,}", f"{self.shed:,}", f"{self.batch:.1f}", why]


def row(way: str, outcomes: Sequence[Outcome], asked: float, took: float, left: Left) -> Row:
    """Make the row of all clients together.

    They asked for `asked` seconds, and all answers were there after `took` seconds.
    """
    latencies = [each * 1e3 for outcome in outcomes for each in outcome.latencies]
    late, shed = sum(each.late for each in outcomes), sum(each.shed for each in outcomes)
    marks = quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else [0.0] * 99
    return Row(
        WAYS[way],
        (len(latencies) + late + shed) / asked,
        len(latencies) / took,
        (marks[49], marks[94], marks[98]),
        late,
        shed,
        *left.read(),
    )


def served_both(options: argparse.Namespace) -> type[Any]:
    """Return the class of the examples' model, which also answers one by one."""
    base: type[Any] = served(options)

    class Both(base):  # type: ignore[misc]
        @batched(max_size=1, max_pending=options.max_pending, stack=True, device=options.device)
        def infer_alone(self, images: Tensor) -> Tensor:
            """Answer for one image at a time."""
            found: Tensor = self.answer(images)
            return found

    return Both


class OpenLoop(Client):
    """A client that asks at random times, whether or not earlier requests are answered."""

    async def load(self, way: str, rate: float, seconds: float, deadline: float) -> Outcome:
        """Ask at `rate` a second, as many independent users would (a Poisson process)."""
        outcome, loop = Outcome(), asyncio.get_running_loop()
        chance = random.Random(int(self.images[0].sum()))  # another one for each client
        due = loop.time()
        end = due + seconds
        async with asyncio.TaskGroup() as requests:
            while (due := due + chance.expovariate(rate)) < end:
                await asyncio.sleep(due - loop.time())
                image = chance.choice(self.images)
                requests.create_task(self._request(way, image, due, deadline, outcome))
        return outcome

    async def _request(
        self, way: str, image: Tensor, due: float, deadline: float, outcome: Outcome
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            # Since it was due, not since it was sent, so that a late client hides no latency.
            with aiorpc.timeout(max(0.0, due + deadline - loop.time())):
                await getattr(self.model, way)(image)
        except aiorpc.CallTimeout:
            outcome.late += 1
        except aiorpc.QueueFull:
            outcome.shed += 1
        else:
            outcome.latencies.append(loop.time() - due)
