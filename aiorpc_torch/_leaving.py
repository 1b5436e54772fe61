"""How a worker leaves its world: it says goodbye, waits for the others, and stops torch's RPC.

Every wait here has an end. Facts about torch's shutdown, seen on 2.13 and 2.15 and held by
tests/test_worlds.py, are with `Way`.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Sequence

import anyio
from torch._C._distributed_rpc import _get_current_rpc_agent, _is_current_rpc_agent_set
from torch.distributed import rpc

from ._outbox import Outbox
from ._queue import close_queues
from ._server import Server
from ._threads import daemon, run_blocking
from .errors import RpcError

log = logging.getLogger("aiorpc_torch")

PING = 0.5  # seconds between two goodbyes to a peer that has not said its own
TOGETHER = 5.0  # seconds for torch's shutdown once every peer is known to be at it
# When an exception ends the world: seconds for goodbyes, and for torch's shutdown.
AT_ONCE = 0.3
TOGETHER_AT_ONCE = 0.5


def _together() -> None:
    try:
        rpc.shutdown(graceful=True)
    except RuntimeError as exc:  # a peer died on the way out; torch has shut down all the same
        log.debug("shutdown: %s", exc)


def _by_itself() -> None:
    try:
        _get_current_rpc_agent().join(shutdown=True)
    finally:
        rpc.shutdown(graceful=False)


def _alone() -> None:
    rpc.shutdown(graceful=False)


class Way(enum.Enum):
    """How to shut torch's RPC down; each value does it, blocking.

    Seen on torch 2.13 and 2.15 (tests/test_worlds.py): TOGETHER is quiet, and quick once every
    peer is at it. But it waits for a peer that does not come until that peer exits, whatever its
    timeout, and its barriers are numbered by a counter of the process that nothing resets: one
    that was in an earlier world and a fresh one wait for ever. ALONE waits for nobody, and peers
    that are still up log a broken pipe. BY_ITSELF is the quiet way out of a world of one.
    """

    TOGETHER = enum.member(_together)
    ALONE = enum.member(_alone)
    BY_ITSELF = enum.member(_by_itself)


class Leaving:
    """One worker on its way out.

    Args:
        outbox: to its peers.
        server: that still serves them.
        peers: their names.
        patience: seconds to wait for them, None for as long as they live.
        failed: an exception ends the world: whatever `patience` says, nothing takes long now.
        alone: whether this worker cannot take part in a common shutdown.
    """

    def __init__(
        self,
        outbox: Outbox,
        server: Server,
        peers: Sequence[str],
        *,
        patience: float | None,
        failed: bool,
        alone: bool,
    ) -> None:
        self._outbox = outbox
        self._server = server
        self._peers = peers
        self._patience = AT_ONCE if failed else patience
        self._shutdown = TOGETHER_AT_ONCE if failed else TOGETHER
        self._alone = alone
        self._lost: set[str] = set()

    async def run(self) -> None:
        """Leave, whatever happens meanwhile: a cancellation only ends the waiting."""
        waiting = asyncio.create_task(self._wait_for_peers())
        ending = asyncio.create_task(self._end(waiting))
        interrupted = False
        while not ending.done():
            try:
                # An anyio scope cancels again and again: once is enough.
                with anyio.CancelScope(shield=interrupted):
                    await asyncio.wait((ending,))
            except asyncio.CancelledError:
                interrupted = True
                waiting.cancel()
        ending.result()
        if interrupted:
            raise asyncio.CancelledError

    async def _wait_for_peers(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                await asyncio.gather(*(self._part(peer) for peer in self._peers))

    async def _part(self, peer: str) -> None:
        farewell = self._server.farewell(peer)
        await self._tell(peer)
        while not farewell.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING):
                    await farewell.wait()
            # Said again, it is the question whether the peer lives: a dead one breaks the pipe.
            await self._tell(peer)

    async def _tell(self, peer: str) -> None:
        try:
            await self._outbox.link(peer).goodbye(alone=self._alone)
        except RpcError as exc:
            log.debug("no goodbye from %s: %s", peer, exc)
            self._lost.add(peer)
            self._server.farewell(peer).set()

    async def _end(self, waiting: "asyncio.Task[None]") -> None:
        await asyncio.wait((waiting,))
        way = self._way()
        if way is Way.ALONE and not self._alone:
            await self._warn()
        self._outbox.close()
        await close_queues()
        await self._server.close(patience=0.5)
        await self._stop(way)

    def _way(self) -> Way:
        if not self._peers:
            return Way.BY_ITSELF
        said = self._server.goodbyes
        silent = [peer for peer in self._peers if peer not in said and peer not in self._lost]
        if silent:
            log.info("%s did not wait for %s", self._outbox.name, ", ".join(silent))
        others = all(peer in said and not said[peer] for peer in self._peers)
        return Way.TOGETHER if others and not self._alone and not self._lost else Way.ALONE

    async def _warn(self) -> None:
        """Those who counted on a common shutdown must not wait for this worker."""
        self._alone = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AT_ONCE):
                await asyncio.gather(
                    *(self._tell(peer) for peer in self._peers if peer not in self._lost)
                )

    async def _stop(self, way: Way) -> None:
        for attempt, limit in {way: self._shutdown, Way.ALONE: TOGETHER}.items():
            try:
                async with asyncio.timeout(limit):
                    await run_blocking(daemon("aiorpc-stop"), attempt.value)
            except TimeoutError:
                pass
            except RuntimeError:  # the first attempt may come to its end during the second
                if _is_current_rpc_agent_set():
                    raise
            if not _is_current_rpc_agent_set():
                return
        log.error("torch's RPC of %s did not stop within %g s", self._outbox.name, TOGETHER)
