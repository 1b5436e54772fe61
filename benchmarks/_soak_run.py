"""Clients that call at random, and a watchdog that checks that their calls end."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from aiorpc_torch import call

from ._process import Census, census
from ._soak_calls import KINDS, Caller
from ._soak_display import Display

WORKERS = ["main", "a", "b"]
BURST = 0.1  # share of a client's iterations that make several calls at once
PATIENCE = 60.0  # seconds without any ended call, after which the soak counts as stuck


class Stuck(AssertionError):
    """No call has ended for `PATIENCE` seconds."""


@dataclass
class Soak:
    """A soak: calls, their ends, and a sample of every process after each `every` calls."""

    display: Display
    every: int
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    flying: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[int, list[Census]]] = field(default_factory=list)
    begun: int = 0
    settled: int = 0

    async def run(self, until: int, clients: list[Caller]) -> None:
        """Have the clients call until `until` calls have ended in all."""
        calling = asyncio.gather(*(self._client(client, until) for client in clients))
        watching = asyncio.create_task(self._watch())
        done, _ = await asyncio.wait((calling, watching), return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        for ended in done:
            ended.result()
        self.display.show(self.settled)

    async def _client(self, client: Caller, until: int) -> None:
        while self.begun < until:
            many = client.random.randint(2, 16) if client.random.random() < BURST else 1
            many = min(many, until - self.begun)
            self.begun += many
            await asyncio.gather(*(self._one(client) for _ in range(many)))

    async def _one(self, client: Caller) -> None:
        (kind,) = client.random.choices([*KINDS], [*KINDS.values()])
        name = kind.__name__
        self.flying[name] += 1
        try:
            outcome = await kind(client)
        except (Exception, asyncio.CancelledError) as exc:
            self.problems.append(f"{name}: {exc!r}")
            outcome = "wrong"
        self.flying[name] -= 1
        self.settled += 1
        self.outcomes[name, outcome] += 1

    async def _watch(self) -> None:
        moved, last = time.monotonic(), self.settled
        while True:
            await asyncio.sleep(0.1)
            if self.settled != last:
                moved, last = time.monotonic(), self.settled
            elif time.monotonic() - moved > PATIENCE:
                raise Stuck(f"no call has ended for {PATIENCE:.0f} s; in flight: {+self.flying}")
            self.display.show(self.settled)
            if self.settled >= self.every * (len(self.samples) + 1):
                await self.look()

    async def look(self) -> None:
        """Sample every process."""
        found = [await call(worker, census) for worker in WORKERS]
        self.samples.append((self.settled, found))
        self.display.sample(self.settled, found)
