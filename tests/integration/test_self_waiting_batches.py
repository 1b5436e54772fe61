"""Batch functions that wait for their own batch through other processes."""

from aiorpc_torch import call
from aiorpc_torch.testing import world
from tests.support import actors

OTHERS = ["relay", "relay_in_thread", "stream", "stream_in_thread", "create"]


# ── between processes ───────────────────────────────────────────────────────────────────────────


async def test_between_processes() -> None:
    """Through c and back, by calls, threads, streams and other queues; and what c leaves behind."""
    names = [*OTHERS, "ask", "ask_in_thread"]
    async with world(["b", "c"], transports=["uv"]):
        told, free, left = await call("b", actors.walk_between, "c", names)
    assert len(told) == 3 * len(names)
    assert all("RuntimeError" in each and "awaits itself" in each for each in told), told
    assert free == ["end"] * 2 * len(names)
    assert left == ["left", "end"]
