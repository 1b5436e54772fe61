"""Workers that only serve, until the one who leads is done; if that one dies, they fail too.

A worker whose `main` has returned serves as well, but then a death elsewhere is no failure of its
own: it would end with exit code 0.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiorpc_torch import call

_over = asyncio.Event()  # in the process that leads


@contextmanager
def leading() -> Iterator[None]:
    """For as long as this block lasts the others serve."""
    try:
        yield
    finally:
        _over.set()


async def serve(leader: str) -> None:
    """Serve until the block of that worker ends.

    Raises:
        WorkerLost: if the worker dies before.
    """
    await call(leader, _until_over)


async def _until_over() -> None:
    await _over.wait()
