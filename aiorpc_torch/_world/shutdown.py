"""A worker's shutdown: it waits for its peers, closes its connections and stops torch.

Every wait here has a timeout. The log names the peers that were not waited for.
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from .._aio.tasks import run_to_end
from .._aio.threads import run_in_thread
from .._batching.queue import close_queues
from .._node.node import Node
from .._torch.agent import Agent, is_running
from .._torch.thread_state import free_dead_thread_states
from .directory_client import DirectoryClient

log = logging.getLogger("aiorpc_torch")

# All in seconds.
RELEASE_TIMEOUT = 1.0  # for owners to learn that their objects are released
DRAIN_TIMEOUT = 1.0  # for the last answers to arrive
LOST_TIMEOUT = 0.3  # the same, without a directory
BARRIER_TIMEOUT = 1.0  # for the leaving workers to be ready to close their pipes
FULL_BARRIER_TIMEOUT = 5.0  # the same if every peer is leaving: some may be slow
CALLS_TIMEOUT = 10.0  # for the calls that run on such a worker, if no limit is given
STOP_TIMEOUT = 5.0  # for torch's threads to end
OBJECTS_TIMEOUT = 10.0  # for the ends of created objects, if the wait for peers has no limit


def describe_failure(exc: BaseException) -> str:
    """Return for the peers what ends a worker's block: one line, and the traceback."""
    if isinstance(exc, asyncio.CancelledError):
        return "its block was cancelled"
    if isinstance(exc, KeyboardInterrupt | SystemExit):
        return f"its block was ended by {summary_of(exc)}"
    with contextlib.suppress(Exception):  # a SyntaxError with odd attributes, say
        return "\n".join([f"its block raised {summary_of(exc)}", *traceback.format_exception(exc)])
    return f"its block raised {type(exc).__qualname__}, which cannot be shown"


def summary_of(exc: BaseException) -> str:
    """Return an exception's class and the first line of its text; of a group the first's, too."""
    shown = traceback.TracebackException(type(exc), exc, None)
    shown.__notes__ = None  # they would come after it  # type: ignore[assignment]
    first = exc.exceptions[0] if isinstance(exc, BaseExceptionGroup) else None
    shown.exceptions = None
    text = [*shown.format_exception_only()][-1].strip().partition("\n")[0]
    return text if first is None else f"{text}: {summary_of(first)}"


@dataclass(eq=False)
class Shutdown:
    """The shutdown of one worker. After a failure the peers are told, and no wait takes long."""

    node: Node
    agent: Agent
    directory: DirectoryClient
    timeout: float | None
    """Seconds to wait for them, None for no limit."""
    failure: str = ""
    """What ended the worker's block, "" if it ended in order."""
    _leaving: asyncio.Task[None] | None = None

    async def run(self, failure: str) -> None:
        """Shut down to the end; a cancellation only ends the wait for peers."""
        # Peers have heard that it left in order: what ends its block later is its own affair.
        left = self._leaving
        has_left = left is not None and left.done() and not (left.cancelled() or left.exception())
        self.failure = "" if has_left else failure
        waiting = asyncio.create_task(self._wait_for_peers())
        await run_to_end(asyncio.create_task(self._close(waiting)), waiting.cancel)

    # ── waiting for peers ───────────────────────────────────────────────────────────────────────

    async def _wait_for_peers(self) -> None:
        if self.failure:  # peers with a connection see its end
            await self.node.departures.tell(self._not_connected(), self.failure)
        elif self.node.leaves_alone:
            await self.leave_alone()
        else:
            with anyio.move_on_after(self.timeout):
                await self.node.departures.leave()

    async def leave_alone(self) -> None:
        """Take no new calls, and wait for those that run, while the others go on; once."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave_alone(), name="aiorpc-leave")
        await asyncio.shield(self._leaving)

    async def _leave_alone(self) -> None:
        self.node.leaves_alone = True
        self.node.departures.begin_to_leave()
        self.node.server.retire()  # first: who is told takes no call for one that is served
        if not await self.directory.retire():
            await self._tell_others()
        await self.node.server.drain(CALLS_TIMEOUT if self.timeout is None else self.timeout)
        self.node.server.end_calls()

    async def _tell_others(self) -> None:
        """Tell the peers that stay, unless the end of a connection tells them."""
        left = self.node.departures.left() | self.node.members.lost().keys()
        await self.node.departures.tell(self._not_connected() - left, self.failure)

    def _not_connected(self) -> set[str]:
        connected = self.node.pool.connected() | self.node.server.sessions.connected()
        return self.node.members.peers.keys() - connected

    # ── closing ─────────────────────────────────────────────────────────────────────────────────

    async def _close(self, waiting: "asyncio.Task[None]") -> None:
        await asyncio.wait((waiting,))
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.wait((self._leaving,))
        self.directory.leave(departs=self.node.leaves_alone)
        if not (self.failure or self.node.leaves_alone):
            await self.node.departures.refresh()  # the wait was cut: which peers have left?
            await self._tell_others()
        await self.node.departures.close()
        self.node.membership.close()
        self.node.end_changes()
        leaving = self._ranks_leaving_too()
        if not self.failure:  # else the server tells calls that wait for a batch why they fail
            await close_queues()
        await self._close_connections()  # first: no call may run beside the end of an object
        await close_queues()  # of batches that have begun since
        limit = OBJECTS_TIMEOUT if self.timeout is None else self.timeout
        await self.node.server.created.close(limit)
        if not self.failure:
            await self._close_together(leaving)
        if await self._in_thread(STOP_TIMEOUT, self.agent.stop):
            await self.node.server.handle_last_messages()  # while the agent exists
            await self._in_thread(STOP_TIMEOUT, self.agent.release)
        elif is_running():
            name = self.node.members.name
            log.error("torch's RPC of %s did not stop within %g s", name, STOP_TIMEOUT)
        await self._in_thread(STOP_TIMEOUT, free_dead_thread_states)

    async def _close_connections(self) -> None:
        ended = await asyncio.gather(
            self.node.pool.close("failed" if self.failure else "left", self.failure),
            self.node.server.close(0.5, self.failure.partition("\n")[0], self.failure),
            return_exceptions=True,  # torch is stopped in any case
        )
        for exc in ended:
            if isinstance(exc, BaseException):
                log.error("%s: a connection was not closed", self.node.members.name, exc_info=exc)

    async def _close_together(self, ranks: list[int]) -> None:
        """Wait until those ranks are ready: torch logs a broken pipe at each that is not."""
        is_full = len(ranks) == len(self.node.members.peers)
        if is_full:
            await self._in_thread(RELEASE_TIMEOUT, self.agent.release_rrefs)
        # A lost worker does not answer, nor its directory: it may be frozen, or cut off.
        keeper = self.node.members.workers.get(self.node.members.coordinator)
        has_directory = keeper is not None and not keeper.is_lost
        await self._in_thread(DRAIN_TIMEOUT if has_directory else LOST_TIMEOUT, self.agent.drain)
        if ranks and has_directory:
            timeout = FULL_BARRIER_TIMEOUT if is_full else BARRIER_TIMEOUT
            await self.directory.exit_barrier(ranks, timeout, is_full=is_full)

    def _ranks_leaving_too(self) -> list[int]:
        """Return the ranks with which this worker closes; log the names of the others."""
        if self.node.leaves_alone:  # a barrier would say that the world ends
            return []
        members = self.node.members
        lost, told = members.lost(), members.told()
        left = {peer for peer in self.node.departures.left() if not told.get(peer)}
        leaving = [peer for peer in members.peers if peer in left and peer not in lost]
        known_lost, rest = self.node.departures.lost(), list[str]()
        for peer in members.peers:
            if peer not in leaving and peer not in left:
                state = "lost" if peer in known_lost else "has not left"
                rest.append(f"{peer} ({'failed' if told.get(peer) else state})")
        if rest and not self.failure:
            log.warning("%s did not wait for %s", members.name, ", ".join(rest))
        return [members.peers[peer].rank for peer in leaving]

    async def _in_thread(self, seconds: float, step: Callable[[], Any]) -> bool:
        """Run `step` in a thread; return whether it ended in time."""
        with anyio.move_on_after(seconds) as limit:
            try:
                await run_in_thread(step, "aiorpc-stop")
            except Exception as exc:
                log.debug("shutdown: %r", exc)
        return not limit.cancelled_caught
