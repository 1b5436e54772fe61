"""Entries into a running world: a process rejoins in place of one that died, or joins as a new one.

A replacement process takes the name and rank of a worker whose process died. It first asks all
peers, which check that the old process is dead. Otherwise some peers might use the old process and
some the new one. Then it announces itself, and each peer updates its tables: torch's agent, the
connection pool, the server and the failure detector. Other workers' calls go on.

A worker that joins has a new rank. It asks all peers whether its name is free. Then each peer adds
it, and only when all have done so it is announced: whoever learns of it may send its RRefs to any
other worker, which knows it already.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .._protocol import endpoints
from .._protocol.members import Members
from .._torch.agent import PeerInfo, is_running
from .._torch.transport import send, wrap_future
from .._wire.exceptions import RemoteFailure
from .._wire.plain import dump, reader

log = logging.getLogger("aiorpc_torch")

PING_TIMEOUT = 3.0  # seconds for the old process to prove that it is alive
REPLY_TIMEOUT = 2 * PING_TIMEOUT  # seconds for a peer to answer a replacement


Step = Literal["ask", "replace", "add", "announce"]
"""A step of an entry. "ask" is the first; "replace" follows in a rejoin, the others in a join."""

_read_message = reader(tuple[str, PeerInfo])


async def request_entry(me: PeerInfo, members: Sequence[PeerInfo]) -> bool:
    """Ask every peer whether no other process has the name of `me`; return whether any agreed.

    Raises:
        ValueError: if a peer reaches the other process.
    """
    answers = (await _send_to_all("ask", me, members)).values()
    if refusals := [answer for answer in answers if isinstance(answer, str) and answer]:
        raise ValueError(refusals[0])
    return "" in answers


async def announce_rejoin(me: PeerInfo, members: Sequence[PeerInfo]) -> None:
    """Tell every peer that `me` has replaced a dead process."""
    for answer in (await _send_to_all("replace", me, members)).values():
        if answer != "":
            log.info("%s rejoins: %s", me.name, answer)


async def announce_join(
    me: PeerInfo, members: Callable[[], Iterable[PeerInfo]], probe: Callable[[str], None]
) -> None:
    """Let every peer add `me`, then announce it. Peers that do not answer are probed.

    Raises:
        ValueError: if a peer refuses.
    """
    steps: tuple[Step, ...] = ("add", "announce")
    for step in steps:
        for peer, answer in (await _send_to_all(step, me, [*members()])).items():
            if isinstance(answer, str) and answer:
                raise ValueError(answer)
            if answer != "":
                log.info("%s joins: %s", me.name, answer)
                probe(peer)


async def _send_to_all(
    step: Step, me: PeerInfo, members: Iterable[PeerInfo]
) -> dict[str, str | BaseException]:
    data = dump((step, me))
    peers = [each for each in members if each.name != me.name]
    answers = await asyncio.gather(*(_send(each, data) for each in peers), return_exceptions=True)
    return dict(zip([each.name for each in peers], answers, strict=True))


async def _send(peer: PeerInfo, data: bytes) -> str:
    async with asyncio.timeout(REPLY_TIMEOUT):
        answer = await wrap_future(send(peer.info, endpoints.rejoin, data))
    return str(answer.raise_() if isinstance(answer, RemoteFailure) else answer)


@dataclass(eq=False)
class EntryHandler:
    """A handler of processes that enter: of their questions, then of their announcements."""

    members: Members
    add: Callable[[PeerInfo], None]
    """Adds a member, or the newer process of one."""
    announce: Callable[[PeerInfo], None]
    """Tells of a member that was added."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def handle(self, data: bytes, reply: Any) -> None:
        """Answer a message on the loop: complete the torch future `reply` with "" or a refusal."""
        task = asyncio.create_task(self._answer(data, reply), name="aiorpc-rejoin")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, reply: Any) -> None:
        try:
            answer = await self._take(*_read_message(data))
        except Exception as exc:
            log.warning("a worker could not enter: %r", exc)
            answer = f"{self.members.name} could not let it enter: {exc!r}"
        if is_running():  # see `Agent.release`
            reply.set_result(answer)

    async def _take(self, step: Step, member: PeerInfo) -> str:
        """Take one step of an entry; return "", or why the process may not enter."""
        known = self.members.workers.get(member.name)
        if step == "ask":
            is_taken = known is not None and await self._is_alive(known)
        else:
            is_taken = known is not None and known.number > member.number
        if is_taken:
            return f"two workers are called {member.name!r}: the first one is alive"
        if step != "ask" and (known is None or known.number != member.number):
            self.add(member)
        if step in ("replace", "announce"):
            self.announce(member)
        return ""

    def close(self) -> None:
        """Give up the workers that wait for an answer, after torch has stopped."""
        for task in self._tasks:
            task.cancel()

    async def _is_alive(self, peer: PeerInfo) -> bool:
        if peer.name == self.members.name:
            return True
        if peer.name in self.members.leave_messages:  # it ends now
            return False
        try:
            async with asyncio.timeout(PING_TIMEOUT):
                await wrap_future(send(peer.info, endpoints.ping, b""))
        except Exception:
            return False
        return True
