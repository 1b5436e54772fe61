"""Threads whose states stay, world after world."""

from aiorpc_torch._torch.thread_state import pinned

from .test_consecutive_worlds import STATES, life, no_garbage, settled, stock

__all__ = ["no_garbage"]


async def test_worlds_with_children(no_garbage: None) -> None:
    """A parent keeps no threads, pipes, sockets or folders of its children."""
    await life()
    before, states = stock(), len(pinned)
    for _ in range(4):
        await life()
    assert await settled(before) <= before
    assert len(pinned) <= states + STATES
