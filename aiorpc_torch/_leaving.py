"""How a worker leaves its world: it says goodbye, waits for the others, and stops torch's RPC.

Every wait here has an end, and who was not waited for is said.
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable
from typing import Any

import anyio

from ._agent import Agent, Member, is_running
from ._outbox import Outbox
from ._queue import close_queues
from ._rendezvous import Meeting
from ._server import Server
from ._states import give_back
from ._threads import daemon, run_blocking
from ._vigil import Vigil
from .errors import RpcError

log = logging.getLogger("aiorpc_torch")

PING = 0.5  # seconds between two goodbyes to a peer that has not said its own
RELEASE = 1.0  # seconds for the owners of objects to hear that they are not held any more
SEAL = 1.0  # seconds for the last answers to come in
PART = 1.0  # seconds in which those who leave close their pipes together
TOGETHER = 5.0  # seconds for that if nobody is missing: they may be slow
STOP = 5.0  # seconds for torch's threads to end
STUCK = 0.5  # the same, if plain `def`s hold some of them, perhaps for ever
AT_ONCE = 0.3  # seconds for goodbyes when an exception ends the world


def describe(exc: BaseException) -> str:
    """What ends a worker's block, as its peers are told: a line, and the traceback."""
    if isinstance(exc, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        return "its block was cancelled"
    summary = traceback.format_exception_only(exc)[-1].strip()
    return "\n".join([f"its block raised {summary}", *traceback.format_exception(exc)])


class Leaving:
    """One worker on its way out.

    Args:
        outbox, server, vigil, agent: what it consists of.
        meeting: where it met its peers; None in a world of one.
        peers: the others.
        patience: seconds to wait for them, None for as long as they live.
        failure: what ends the world, if not everybody's will: then nothing takes long now, and the
            peers are told.
    """

    def __init__(
        self,
        outbox: Outbox,
        server: Server,
        vigil: Vigil,
        agent: Agent,
        meeting: Meeting | None,
        *,
        peers: dict[str, Member],
        patience: float | None,
        failure: str,
    ) -> None:
        self._outbox = outbox
        self._server = server
        self._vigil = vigil
        self._agent = agent
        self._meeting = meeting
        self._peers = peers
        self._patience = AT_ONCE if failure else patience
        self._failure = failure
        self._lost: set[str] = {*vigil.gone}

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
        if peer in self._lost:
            return
        farewell = self._server.peers.farewell(peer)
        await self._tell(peer)
        while not farewell.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING):
                    await farewell.wait()
            # Said again, it is the question whether the peer lives: a dead one breaks the pipe.
            await self._tell(peer)

    async def _tell(self, peer: str) -> None:
        try:
            await self._outbox.link(peer).goodbye(self._failure)
        except RpcError as exc:
            log.debug("no goodbye from %s: %s", peer, exc)
            self._lost.add(peer)
            self._server.peers.farewell(peer).set()

    async def _end(self, waiting: "asyncio.Task[None]") -> None:
        await asyncio.wait((waiting,))
        self._vigil.close()
        together = self._who_leaves_too()
        self._outbox.close()
        await close_queues()
        stuck = await self._server.close(0.5, self._failure.partition("\n")[0])
        if not self._failure:
            await self._part_from(together, STUCK if stuck else SEAL)
        patience = STUCK if stuck else STOP
        if not await self._blocking(patience, self._agent.stop) and is_running():
            log.error("torch's RPC of %s did not stop within %g s", self._outbox.name, patience)
        await self._blocking(STOP, give_back)

    async def _part_from(self, ranks: list[int], patience: float) -> None:
        """Close nothing before those are ready for it, or torch logs a broken pipe at each."""
        together = len(ranks) == len(self._peers)
        if together:
            await self._blocking(RELEASE, self._agent.release)
        await self._blocking(patience, self._agent.seal)
        if (meeting := self._meeting) is not None and ranks:
            seconds = TOGETHER if together else PART
            await self._blocking(2 * seconds, lambda: meeting.part(ranks, seconds))

    def _who_leaves_too(self) -> list[int]:
        """The ranks of those with whom this worker parts; the others are named in the log."""
        said = self._server.peers.goodbyes
        together = [peer for peer in self._peers if said.get(peer) == "" and peer not in self._lost]
        rest = [f"{peer} ({self._why_not(peer)})" for peer in self._peers if peer not in together]
        if rest and not self._failure:
            log.warning("%s did not wait for %s", self._outbox.name, ", ".join(rest))
        return [self._peers[peer].rank for peer in together]

    def _why_not(self, peer: str) -> str:
        if self._server.peers.goodbyes.get(peer):
            return "failed"
        return "lost" if peer in self._lost else "has not left"

    async def _blocking(self, seconds: float, step: Callable[[], Any]) -> bool:
        """Whether that step, in a thread, came to its end in time."""
        try:
            async with asyncio.timeout(seconds):
                await run_blocking(daemon("aiorpc-stop"), step)
        except TimeoutError:
            return False
        except Exception as exc:
            log.debug("leaving: %r", exc)
        return True
