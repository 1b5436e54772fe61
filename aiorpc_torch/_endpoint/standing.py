"""The question of a callee to its caller where the block of a context manager stands."""

from . import entry_points


async def block_of(connection: int, data: bytes) -> bytes:
    """Return where the call stands whose block a call of this process has entered."""
    if (node := entry_points.here) is None:
        raise entry_points.not_in_world(entry_points.NOT_SERVING)
    return await node.block_of(connection, data)


ALWAYS_EXPORTED = (block_of,)
"""What an answer where calls stand calls: every worker answers, whatever it exports."""
