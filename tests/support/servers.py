"""Servers of asyncio that leave nothing open when they are closed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable


@contextlib.asynccontextmanager
async def serving(starting: Awaitable[asyncio.Server]) -> AsyncIterator[asyncio.Server]:
    """Serve in the block. The callback is a plain function, whose caller owns the writers.

    A server that is closed refuses a transport to what the loop has accepted just before, and
    asyncio does not close that: so first nothing more is accepted. (tests/unit/test_servers.py)
    """
    server = await starting
    try:
        yield server
    finally:
        for each in server.sockets:
            asyncio.get_running_loop().remove_reader(each)
        for _ in range(2):  # for the transports of what is accepted
            await asyncio.sleep(0)
        server.close()
