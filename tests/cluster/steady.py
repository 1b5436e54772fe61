"""A worker that calls all of its peers again and again, until the file `stop` is there.

`python steady.py [URL]` starts one. Its launcher says who it is, and where the others are if there
is no URL. Its lines are `RANK PID ...`:

- `entered RESTARTS`
- `reaches RANK:PID ...` whenever the set of the processes that answered is another
- `saw KIND NAME` for each change of the world
"""

import asyncio
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import aiorpc_torch as aiorpc
from tests.support.slack import SLACK

HEARTBEAT = 2.0
PAUSE = 0.05  # seconds between two rounds of calls
LIFE = 600.0  # seconds: no test takes as long, so the tests have been killed
STOP = Path("stop")


def is_over() -> bool:
    return STOP.exists()


# The first process of each container has the number 1: the time of its start tells them apart.
PROCESS = os.getpid() if os.getpid() > 1 else time.time_ns()


def who() -> int:
    """Return the process that answers."""
    return PROCESS


class Steady:
    """What one worker sees of the others."""

    def __init__(self, me: aiorpc.types.Worker) -> None:
        self.me = me
        self.reached = ""

    def tell(self, *words: object) -> None:
        """Print a line, in one piece also where several processes share a pipe."""
        line = " ".join(map(str, (self.me.rank, PROCESS, *words)))
        os.write(1, f"{line}\n".encode())

    async def watch(self) -> None:
        async for change in self.me.changes():
            self.tell("saw", change.kind, change.name)

    async def reach(self, name: str) -> str:
        """Return the rank of a peer and its process, or nothing if it is not there now."""
        try:
            pid = await aiorpc.call(name, who)
        except aiorpc.WorkerGone:
            return ""
        return f"{name.removeprefix('worker')}:{pid}"

    async def run(self) -> None:
        while not is_over():
            found = await asyncio.gather(*map(self.reach, sorted(self.me.peers)))
            if (reached := " ".join(filter(None, found))) != self.reached:
                self.reached = reached
                self.tell("reaches", reached)
            await asyncio.sleep(PAUSE)


async def main() -> None:
    where = sys.argv[1] if len(sys.argv) > 1 else None
    async with aiorpc.worker(heartbeat=HEARTBEAT, init_method=where) as me:
        steady = Steady(me)
        steady.tell("entered", me.restarts)
        watching = asyncio.create_task(steady.watch())
        async with asyncio.timeout(LIFE):
            await steady.run()
    await watching


# ── what a test reads of it ─────────────────────────────────────────────────────────────────────

BACK = HEARTBEAT + 5.0 + SLACK  # seconds from the death of a process until it is there again

Pids = dict[int, int]
"""Processes by rank."""


def pids(found: Iterable[re.Match[str]]) -> Pids:
    """Return the processes of lines that begin with a rank and a process."""
    return {int(each[1]): int(each[2]) for each in found}


def reaching(rank: int, all_pids: Pids) -> str:
    """Return the line of a worker that all the others have answered."""
    others = " ".join(f"{each}:{pid}" for each, pid in sorted(all_pids.items()) if each != rank)
    return f"{rank} {all_pids[rank]} reaches {others}"


if __name__ == "__main__":
    asyncio.run(main())
