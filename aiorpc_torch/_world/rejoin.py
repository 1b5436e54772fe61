"""Rejoin: a replacement process takes the name and rank of a worker whose process died.

The replacement first asks all peers, which check that the old process is dead. Otherwise some
peers might use the old process and some the new one. Then it announces itself, and each peer
updates its tables: torch's agent, the connection pool, the server and the failure detector. Other
workers' calls go on.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._protocol import endpoints
from .._protocol.members import Members
from .._torch.agent import PeerInfo, is_running
from .._torch.transport import send, wrap_future
from .._wire.exceptions import RemoteFailure
from .._wire.plain import dump, reader

log = logging.getLogger("aiorpc_torch")

PING_TIMEOUT = 3.0  # seconds for the old process to prove that it is alive
REPLY_TIMEOUT = 2 * PING_TIMEOUT  # seconds for a peer to answer a replacement


_read_message = reader(tuple[bool, PeerInfo])


async def request_rejoin(me: PeerInfo, members: Sequence[PeerInfo]) -> bool:
    """Ask every peer whether `me` may replace a dead process; return whether any peer agreed.

    Raises:
        ValueError: if a peer reaches the old process.
    """
    answers = await _send_to_all(me, members, ask=True)
    if refusals := [answer for answer in answers if isinstance(answer, str) and answer]:
        raise ValueError(refusals[0])
    return "" in answers


async def announce_rejoin(me: PeerInfo, members: Sequence[PeerInfo]) -> None:
    """Tell every peer that `me` has replaced a dead process."""
    for answer in await _send_to_all(me, members, ask=False):
        if answer != "":
            log.info("%s rejoins: %s", me.name, answer)


async def _send_to_all(
    me: PeerInfo, members: Sequence[PeerInfo], *, ask: bool
) -> list[str | BaseException]:
    data = dump((ask, me))
    peers = [each for each in members if each.name != me.name]
    return await asyncio.gather(*(_send(each, data) for each in peers), return_exceptions=True)


async def _send(peer: PeerInfo, data: bytes) -> str:
    async with asyncio.timeout(REPLY_TIMEOUT):
        answer = await wrap_future(send(peer.info, endpoints.rejoin, data))
    return str(answer.raise_() if isinstance(answer, RemoteFailure) else answer)


@dataclass(eq=False)
class RejoinHandler:
    """A handler of replacement processes: of their questions, then of their announcements."""

    members: Members
    replace: Callable[[PeerInfo], None]
    """Replaces a member's process by a newer one."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def handle(self, data: bytes, reply: Any) -> None:
        """Answer a message on the loop: complete the torch future `reply` with "" or a refusal."""
        task = asyncio.create_task(self._answer(data, reply), name="aiorpc-rejoin")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, reply: Any) -> None:
        try:
            is_question, member = _read_message(data)
            known = self.members.peers[member.name]
            answer = ""
            if is_question and await self._is_alive(known):
                answer = f"two workers are called {member.name!r}: the first one is alive"
            elif not is_question and known.number != member.number:
                self.replace(member)
        except Exception as exc:
            log.warning("a worker could not rejoin: %r", exc)
            answer = f"{self.members.name} could not let it rejoin: {exc!r}"
        if is_running():  # see `Agent.release`
            reply.set_result(answer)

    def close(self) -> None:
        """Give up the workers that wait for an answer, after torch has stopped."""
        for task in self._tasks:
            task.cancel()

    async def _is_alive(self, peer: PeerInfo) -> bool:
        try:
            async with asyncio.timeout(PING_TIMEOUT):
                await wrap_future(send(peer.info, endpoints.ping, b""))
        except Exception:
            return False
        return True
