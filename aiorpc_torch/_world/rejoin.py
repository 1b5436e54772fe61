"""A worker that comes back: its peers are told, and take it in the place of the process that died.

All are asked first, lest some believe the newcomer and some its predecessor. Then only tables
change, here and there: torch's of who is where, the outbox's, the server's and the vigil's. Nobody
else is disturbed.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .._client.pool import Outbox
from .._protocol import endpoints
from .._protocol.exceptions import Failure
from .._protocol.handshake import Party
from .._server.server import Server
from .._torch.agent import Agent, Member
from .._torch.transport import send, wrap_future
from .failure_detector import Vigil

log = logging.getLogger("aiorpc_torch")

LIVES = 3.0  # seconds in which a process that is replaced would say that it lives
MEET = 2 * LIVES  # seconds for a peer to answer a newcomer

Answers = list[str | BaseException]


async def ask(me: Member, members: Sequence[Member]) -> bool:
    """Ask every peer whether `me` may take the place of one that died; whether anybody answers.

    Raises:
        ValueError: if a peer sees that one alive.
    """
    answers = await _tell(me, members, ask=True)
    if refusals := [answer for answer in answers if isinstance(answer, str) and answer]:
        raise ValueError(refusals[0])
    return "" in answers


async def announce(me: Member, members: Sequence[Member]) -> None:
    """Tell every peer that it has."""
    for answer in await _tell(me, members, ask=False):
        if answer != "":
            log.info("%s comes back: %s", me.name, answer)


async def _tell(me: Member, members: Sequence[Member], *, ask: bool) -> Answers:
    words = json.dumps({"ask": ask, "member": asdict(me)}).encode()
    peers = [each for each in members if each.name != me.name]
    told = (_tell_one(each, words) for each in peers)
    return await asyncio.gather(*told, return_exceptions=True)


async def _tell_one(peer: Member, words: bytes) -> str:
    async with asyncio.timeout(MEET):
        answer = await wrap_future(send(peer.info, endpoints.rejoin, words))
    return str(answer.get() if isinstance(answer, Failure) else answer)


class Welcome:
    """How a worker takes a peer back: first it is asked, then it is told."""

    def __init__(
        self,
        agent: Agent,
        outbox: Outbox,
        server: Server,
        vigil: Vigil,
        peers: dict[str, Member],
    ) -> None:
        self._agent = agent
        self._outbox = outbox
        self._server = server
        self._vigil = vigil
        self._peers = peers
        self._tasks: set[asyncio.Task[None]] = set()

    def met(self, words: bytes, reply: Any) -> None:
        """On the loop. `reply` is a torch future for "", or for why not."""
        task = asyncio.create_task(self._meet(words, reply), name="aiorpc-meet")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _meet(self, words: bytes, reply: Any) -> None:
        try:
            said = json.loads(words)
            member = Member(**said["member"])
            reply.set_result(await (self._judge if said["ask"] else self._take_back)(member))
        except Exception as exc:
            log.warning("a worker could not be taken back: %r", exc)
            reply.set_result(f"{self._outbox.name} could not take it back: {exc!r}")

    async def _judge(self, member: Member) -> str:
        if await self._lives(self._peers[member.name]):
            return f"two workers are called {member.name!r}: the first one lives"
        return ""

    async def _take_back(self, member: Member) -> str:
        old = self._peers[member.name]
        if old.number == member.number:
            return ""
        past = self._agent.replace(member)
        self._peers[member.name] = member
        self._outbox.replace(member, past)
        self._server.replace(Party(member.name, member.number))
        self._vigil.replace(member)
        return ""

    async def _lives(self, peer: Member) -> bool:
        try:
            async with asyncio.timeout(LIVES):
                await wrap_future(send(peer.info, endpoints.ping, b""))
        except Exception:
            return False
        return True
