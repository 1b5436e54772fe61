"""How a worker joins its world: it meets the others, starts torch's RPC and learns where they are.

Every wait here has an end.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

from .._aio.threads import daemon, run_blocking
from .._protocol import endpoints
from .._torch.agent import Agent, Member, keeps_number
from .._torch.devices import Reach
from .._torch.transport import send, wrap_future
from ..errors import WorldTimeout
from . import network
from .config import Place
from .device_maps import settle
from .registration import Seat
from .rejoin import ask
from .rendezvous import Location, Meeting

log = logging.getLogger("aiorpc_torch")

GRACE = 0.5  # seconds beyond its time after which a thread that a store holds is left to it
LEAVE = 1.0  # seconds for a start that is given up to come to its end
REACH = 10.0  # seconds in which every peer is reached, at most


async def join(
    place: Place, meeting: Meeting | None, use: Callable[[Reach], None]
) -> tuple[Agent, list[Member]]:
    """Start torch's RPC among the others, who are listed in rank order.

    Before it starts, `use` is told on which devices tensors may come and go.

    Raises:
        WorldTimeout, ValueError: as `worker`.
    """
    if meeting is None:
        alone = [place.seat()]
        number = keeps_number() or 0
        start = functools.partial(_start, place, number, place.interfaces, alone, use)
        agent = await run_blocking(daemon("aiorpc-join"), start)
        me = Member(place.name, 0, number, agent.address, settle(alone)[0], alone[0].namespace)
        return agent, [me]
    agents: list[Agent] = []
    joining = _join_in_thread(lambda: _meet_all(place, meeting, agents, use))
    try:
        members = await _in_time(joining, meeting)
        if meeting.seat.comeback:
            members = await _come_back(place, meeting, agents[0], members)
        elif not place.is_local:
            missing = await _unreached(place, meeting, members)
            text = _not_reached(place, meeting, missing)
            joining = _join_in_thread(lambda: _agree(meeting, members, missing, text))
            members = await _in_time(joining, meeting)
    except BaseException:
        meeting.leave()
        await asyncio.wait((joining,), timeout=min(LEAVE, meeting.remaining()))
        joining.cancel()
        if agents:
            await run_blocking(daemon("aiorpc-stop"), agents[0].stop)
        raise
    return agents[0], members


def _join_in_thread(step: Callable[[], list[Member]]) -> "asyncio.Future[list[Member]]":
    return asyncio.ensure_future(run_blocking(daemon("aiorpc-join"), step))


async def _in_time(joining: "asyncio.Future[list[Member]]", meeting: Meeting) -> list[Member]:
    await asyncio.wait((joining,), timeout=meeting.remaining() + GRACE)
    if not joining.done():  # a question to the store is answered, or not, in torch's own time
        raise WorldTimeout(f"the store at {meeting.host} no longer answers", [0])
    return joining.result()


def _meet_all(
    place: Place, meeting: Meeting, agents: list[Agent], use: Callable[[Reach], None]
) -> list[Member]:
    """Blocks. Leaves the agent in `agents`, also if it raises later."""
    seats = meeting.sign_in()
    number = meeting.number(seats)
    agents.append(_start(place, number, _through(place, meeting), seats, use))
    here = Location(number, agents[0].address)
    if not meeting.seat.comeback:
        meeting.publish(here)
        meeting.wait_for_places()
    members = _members(meeting, here)
    for member in members:
        agents[0].meet(member)
    return members


def _members(meeting: Meeting, here: Location) -> list[Member]:
    found = meeting.members(here)
    every = settle([seat for seat, _ in found])
    return [
        Member(seat.name, seat.rank, *where, maps, seat.namespace)
        for (seat, where), maps in zip(found, every, strict=True)
    ]


def _agree(
    meeting: Meeting, members: list[Member], missing: list[Member], text: str
) -> list[Member]:
    meeting.agree([peer.rank for peer in missing], text)
    return members


async def _unreached(place: Place, meeting: Meeting, members: Sequence[Member]) -> list[Member]:
    """Connect with every peer: who is not reached now would be missed at the first call.

    And only now: a listener of torch's ends with the first connection that is none of torch's, a
    port scanner's say, and who has no connection by then gets none (seen on 2.13 and 2.15).
    """
    peers = [peer for peer in members if peer.name != place.name]
    if nowhere := [peer for peer in peers if not network.has_way(peer.address)]:
        return nowhere
    pings = [wrap_future(send(peer.info, endpoints.ping, b"")) for peer in peers]
    await asyncio.wait(pings, timeout=min(REACH, meeting.remaining() + GRACE))
    missing = [
        peer for peer, ping in zip(peers, pings, strict=True) if not ping.done() or ping.exception()
    ]
    for ping in pings:
        ping.cancel()
    return missing


def _not_reached(place: Place, meeting: Meeting, missing: Sequence[Member]) -> str:
    where = ", ".join(f"{peer.name!r} at {peer.address}" for peer in missing)
    advice = _advice(_through(place, meeting))
    return f"every worker came, but {place.name!r} does not reach {where}. {advice}"


def _through(place: Place, meeting: Meeting) -> network.Choice:
    return place.interfaces or network.found(meeting.host)


def _advice(through: network.Choice) -> str:
    return (
        f"This worker spoke through {network.in_words(through)}. Give each worker() "
        "the interface= (or AIORPC_INTERFACE) at which the others reach it."
    )


async def _come_back(
    place: Place, meeting: Meeting, agent: Agent, members: list[Member]
) -> list[Member]:
    """Take the place of one that died, if all agree."""
    in_thread = daemon("aiorpc-join")
    try:
        answered = await ask(members[place.rank], members)
    except ValueError:
        await run_blocking(in_thread, meeting.withdraw)
        raise
    if not answered:
        await run_blocking(in_thread, meeting.bury)
        raise WorldTimeout(
            f"{place.name!r} came back into a world of which nobody answers. If it has ended, or "
            f"the file at {place.init_method} is of an earlier run, enter again",
            [each.rank for each in members if each.name != place.name],
        )
    here = Location(members[place.rank].number, agent.address)
    await run_blocking(in_thread, lambda: meeting.publish(here))
    # Two who come back at once: each has published before it looks, so one sees the other.
    found = await run_blocking(in_thread, lambda: _members(meeting, here))
    for member, before in zip(found, members, strict=True):
        if member.number != before.number:
            agent.replace(member)
    return found


def _start(
    place: Place,
    number: int,
    through: network.Choice,
    seats: Sequence[Seat],
    use: Callable[[Reach], None],
) -> Agent:
    maps = dict(zip([seat.name for seat in seats], settle(seats), strict=True))
    use(Reach.of(place.name, maps))
    log.info("%s speaks through %s", place.name, network.in_words(through))
    with network.bound(through):
        return Agent(
            place.name,
            number,
            threads=place.threads,
            transports=place.transports,
            device_maps=maps[place.name],
            novices=all(seat.number is None for seat in seats),
        )
