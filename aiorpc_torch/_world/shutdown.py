"""How a worker leaves its world: it waits for the others, closes its connections and stops torch.

Every wait here has an end, and who was not waited for is said.
"""

import asyncio
import contextlib
import functools
import logging
import time
import traceback
from collections.abc import Callable
from typing import Any

import anyio

from .._aio.threads import daemon, run_blocking
from .._batching.queue import close_queues
from .._client.pool import Outbox
from .._protocol import endpoints
from .._protocol.messages import dump
from .._server.server import Server
from .._torch.agent import Agent, Member, is_running
from .._torch.thread_state import give_back
from .._torch.transport import send, wrap_future
from ..errors import WorldTimeout
from .failure_detector import Vigil
from .rendezvous import Meeting

log = logging.getLogger("aiorpc_torch")

_LOOK, _LOOKS = 0.005, 0.05  # seconds between two looks at who has left: the first, the longest
ASK = 1.0  # seconds after which those who have not left are asked whether they live
RELEASE = 1.0  # seconds for the owners of objects to hear that they are not held any more
SEAL = 1.0  # seconds for the last answers to come in
PART = 1.0  # seconds in which those who leave close their pipes together
TOGETHER = 5.0  # seconds for that if nobody is missing: they may be slow
STOP = 5.0  # seconds for torch's threads to end
AT_ONCE = 0.3  # seconds to tell the peers when an exception ends the world


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
        self._me = outbox.me
        self._meeting = meeting
        self._peers = peers
        self._patience = AT_ONCE if failure else patience
        self._failure = failure
        self._left: set[str] = set()  # peers whose blocks have ended in order

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
                if self._failure:
                    await self._tell_of_failure()
                elif self._meeting is not None:
                    await self._wait_at(self._meeting)

    async def _wait_at(self, meeting: Meeting) -> None:
        """Wait at the store until every live peer's block has ended."""
        await run_blocking(daemon("aiorpc-leave"), meeting.leave_block)
        look, ask = _LOOK, time.monotonic() + ASK
        while missing := self._missing():
            ranks = [self._peers[peer].rank for peer in missing]
            try:
                found = await run_blocking(
                    daemon("aiorpc-leave"), functools.partial(meeting.have_left, ranks)
                )
            except WorldTimeout:  # rank 0 has left with its store, or died
                self._left |= {peer for peer in missing if self._peers[peer].rank == 0}
                await self._wait_without_store()
                return
            self._left |= {peer for peer in missing if self._peers[peer].rank in found}
            if time.monotonic() > ask:
                ask = time.monotonic() + ASK
                for peer in self._missing():
                    self._vigil.ask(peer)
            await asyncio.sleep(look)
            look = min(look * 1.5, _LOOKS)

    async def _wait_without_store(self) -> None:
        """Wait until the peers are gone: nobody can say any more that its block has ended."""
        while missing := [*self._missing()]:
            for peer in missing:
                self._vigil.ask(peer)
            await asyncio.sleep(ASK / 2)

    def _missing(self) -> list[str]:
        """Return the peers that have not left, and are not known to be gone."""
        gone = self._vigil.gone.keys() | self._server.peers.goodbyes.keys() | self._left
        return [peer for peer in self._peers if peer not in gone]

    async def _tell_of_failure(self) -> None:
        """Tell the peers that have no connection with this worker; the others see it end."""
        connected = self._outbox.connected() | self._server.connected()
        told = [peer for peer in self._peers.values() if peer.name not in connected]
        await asyncio.gather(*map(self._tell, told), return_exceptions=True)

    async def _tell(self, peer: Member) -> None:
        data = dump((self._me.name, self._me.number, self._failure))
        await wrap_future(send(peer.info, endpoints.farewell, data))

    async def _end(self, waiting: "asyncio.Task[None]") -> None:
        await asyncio.wait((waiting,))
        self._vigil.close()
        together = self._who_leaves_too()
        if not self._failure:  # else calls that wait for a batch learn the failure, from the server
            await close_queues()
        what = "failed" if self._failure else "left"
        ended = await asyncio.gather(
            self._outbox.close(what, self._failure),
            self._server.close(0.5, self._failure.partition("\n")[0], self._failure),
            return_exceptions=True,  # torch is stopped, whatever happens
        )
        for exc in ended:
            if isinstance(exc, BaseException):
                log.error("%s: a connection was not closed", self._outbox.name, exc_info=exc)
        if self._failure:
            await close_queues()
        else:
            await self._part_from(together)
        if not await self._blocking(STOP, self._agent.stop) and is_running():
            log.error("torch's RPC of %s did not stop within %g s", self._outbox.name, STOP)
        await self._blocking(STOP, give_back)

    async def _part_from(self, ranks: list[int]) -> None:
        """Close nothing before those are ready for it, or torch logs a broken pipe at each."""
        together = len(ranks) == len(self._peers)
        if together:
            await self._blocking(RELEASE, self._agent.release)
        await self._blocking(SEAL, self._agent.seal)
        if (meeting := self._meeting) is not None and ranks:
            seconds = TOGETHER if together else PART
            await self._blocking(2 * seconds, lambda: meeting.part(ranks, seconds))

    def _who_leaves_too(self) -> list[int]:
        """The ranks of those with whom this worker parts; the others are named in the log."""
        gone = self._vigil.gone
        said = self._server.peers.goodbyes
        left = self._left | {peer for peer, failure in said.items() if not failure}
        together = [peer for peer in self._peers if peer in left and peer not in gone]
        rest = [f"{peer} ({self._why_not(peer)})" for peer in self._peers if peer not in together]
        if rest and not self._failure:
            log.warning("%s did not wait for %s", self._outbox.name, ", ".join(rest))
        return [self._peers[peer].rank for peer in together]

    def _why_not(self, peer: str) -> str:
        if self._server.peers.goodbyes.get(peer):
            return "failed"
        return "lost" if peer in self._vigil.gone else "has not left"

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
