"""A worker that comes back: its peers are told, and take it in the place of the process that died.

Only tables change, here and there: torch's of who is where, the outbox's, the server's and the
vigil's. Nobody else is disturbed.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from . import _doors
from ._agent import Agent, Member
from ._bridge import send, wrap_future
from ._exceptions import Failure
from ._outbox import Outbox
from ._server import Server
from ._vigil import Vigil

log = logging.getLogger("aiorpc_torch")

MEET = 2.0  # seconds for a peer to say whether it takes a worker back


async def announce(name: str, members: Sequence[Member]) -> bool:
    """Tell every peer that this worker has taken the place of one that died; whether one answers.

    Raises:
        ValueError: if a peer sees that one alive.
    """
    me = next(each for each in members if each.name == name)
    words = json.dumps(asdict(me)).encode()
    answers = await asyncio.gather(
        *(_tell(each, words) for each in members if each is not me), return_exceptions=True
    )
    if refusals := [answer for answer in answers if isinstance(answer, str) and answer]:
        raise ValueError(refusals[0])
    return any(answer == "" for answer in answers)


async def _tell(peer: Member, words: bytes) -> Any:
    async with asyncio.timeout(2 * MEET):
        answer = await wrap_future(send(peer.info, _doors.meet, words))
    return answer.get() if isinstance(answer, Failure) else answer


class Welcome:
    """How a worker takes a peer back: after a look whether its predecessor lives."""

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
            reply.set_result(await self._take_back(Member(**json.loads(words))))
        except Exception as exc:
            log.warning("a worker could not be taken back: %r", exc)
            reply.set_result(f"{self._outbox.name} could not take it back: {exc!r}")

    async def _take_back(self, member: Member) -> str:
        old = self._peers[member.name]
        if old.number == member.number:
            return ""
        if await self._lives(old):
            return f"two workers are called {member.name!r}: the first one lives"
        past = self._agent.replace(member)
        self._peers[member.name] = member
        self._outbox.replace(member, past)
        self._server.replace(member.name, member.first_link)
        self._vigil.replace(member)
        return ""

    async def _lives(self, peer: Member) -> bool:
        try:
            async with asyncio.timeout(MEET / 2):
                await wrap_future(send(peer.info, _doors.ping, b""))
        except Exception:
            return False
        return True
