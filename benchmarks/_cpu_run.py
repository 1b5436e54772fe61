"""One run of `benchmarks.cpu` or of `benchmarks.observe`, as a script.

So it can run against the source of another checkout, and what it switches on is gone with it. It
prints microseconds of processor time for a call, caller and callee, lone and 3,000 at once.
"""

import asyncio
import importlib
import json
import os
import sys
import time
from contextvars import ContextVar

os.environ["OMP_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before any thread; children inherit it

import torch  # noqa: E402

import aiorpc_torch as aiorpc  # noqa: E402

AT_ONCE = 3_000

VARIABLE: ContextVar[str] = ContextVar("benchmarks.observe")


class Server:
    """Answers with its argument, and says how much processor time its process has used."""

    async def echo(self, value: torch.Tensor) -> torch.Tensor:
        return value

    async def used(self) -> float:
        return time.process_time()


async def switch_on(mode: str) -> None:
    """Switch on what is measured, in this process; nothing for "off"."""
    if mode == "api imported":
        importlib.import_module("opentelemetry.trace")
    elif mode == "a variable":
        aiorpc.observe.propagate(VARIABLE)
    elif mode == "metrics":
        from aiorpc_torch import observe

        observe.serve_metrics()
    elif mode == "traces":
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))


async def measure(mode: str, lone: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return microseconds a call of caller and callee, by kind."""
    async with aiorpc.local_world(["server"]):
        server = aiorpc.remote(await aiorpc.create("server", Server))
        value = torch.ones(4)
        await aiorpc.call("server", switch_on, mode)
        await switch_on(mode)
        VARIABLE.set("request 7")

        async def alone() -> None:
            for _ in range(lone):
                await server.echo(value)

        async def together() -> None:
            for _ in range(rounds):
                await asyncio.gather(*(server.echo(value) for _ in range(AT_ONCE)))

        found = {}
        for name, work, calls in (
            ("lone", alone, lone),
            ("3,000 at once", together, rounds * AT_ONCE),
        ):
            await work()  # warms up
            before = await server.used(), time.process_time()
            await work()
            own = time.process_time() - before[1]
            theirs = await server.used() - before[0]
            found[name] = (1e6 * own / calls, 1e6 * theirs / calls)
        return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], *map(int, sys.argv[2:])))))
