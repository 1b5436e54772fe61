"""How workers meet: who is missing, who is wrong, who comes back. Real stores, threads, no RPC."""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import TCPStore

from aiorpc_torch import WorldTimeout
from aiorpc_torch._world import rendezvous
from aiorpc_torch._world.registration import Seat, numbers
from aiorpc_torch._world.rendezvous import Location, Meeting


def seat(rank: int, size: int = 3, **changes: Any) -> Seat:
    """A worker that is as it should be, but for those changes."""
    return replace(Seat(f"w{rank}", rank, size, "1.0"), **changes)


class Hall:
    """Where workers, each in a thread, meet at one store."""

    def __init__(self, init_method: str) -> None:
        self.init_method = init_method
        self.pool = ThreadPoolExecutor(16, thread_name_prefix="worker")
        self.meetings: list[Meeting] = []

    def meeting(self, who: Seat, timeout: float = 20.0) -> Meeting:
        self.meetings.append(Meeting(self.init_method, who, timeout))
        return self.meetings[-1]

    def comes(self, who: Seat, timeout: float = 20.0) -> "Future[list[Seat]]":
        return self.pool.submit(self.meeting(who, timeout).sign_in)

    def close(self) -> None:
        for meeting in self.meetings:
            meeting.leave()
        self.pool.shutdown()


@pytest.fixture(params=["file", "tcp"])
def hall(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hall]:
    """At a file, and at a TCP store as torchrun's agent keeps it."""
    with contextlib.ExitStack() as stack:
        if request.param == "file":
            where = f"file://{tmp_path}/store"
        else:
            server = serve()
            where = f"tcp://127.0.0.1:{server.port}"
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr("aiorpc_torch._world.store.Store._address", as_client)
        here = Hall(where)
        stack.callback(here.close)
        yield here


def serve(port: int = 0) -> TCPStore:
    """A store at IPv4's loopback alone.

    torch's own socket is one of IPv6, and its server looks up the name of each address that
    connects, all others waiting: for five seconds or more if DNS is asked, and silent.
    """
    with socket.socket() as bare:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bare.bind(("127.0.0.1", port))
        port = bare.getsockname()[1]
        fd = bare.detach()
    return TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=fd)


def as_client(self: Any, host: str, port: int) -> tuple[str, int, bool]:
    return host, port, False


def places(meeting: Meeting) -> list[Location]:
    """As that worker finds the others; its own is as it was published."""
    nowhere = replace(meeting.seat, rank=-1)
    meeting.wait_for_places()
    meeting.seat, own = nowhere, meeting.seat
    try:
        return [where for _, where in meeting.members(Location(-1, ""))]
    finally:
        meeting.seat = own


def failure(future: "Future[Any]") -> BaseException:
    exc = future.exception(20.0)
    assert exc is not None
    return exc


def names(future: "Future[list[Seat]]") -> list[str]:
    return [each.name for each in future.result(20.0)]


# ── they come ───────────────────────────────────────────────────────────────────────────────────


def test_everybody_learns_of_everybody(hall: Hall) -> None:
    """In rank order, whoever came first; then where each is."""
    meetings = [hall.meeting(seat(rank)) for rank in (2, 0, 1)]
    coming = [hall.pool.submit(each.sign_in) for each in meetings]
    assert [names(each) for each in coming] == [["w0", "w1", "w2"]] * 3
    for each in meetings:
        number = each.number(coming[0].result())
        each.publish(Location(number, f"at {each.seat.name}"))
    for each in meetings:
        assert places(each) == [(0, "at w0"), (1, "at w1"), (2, "at w2")]


def test_missing_ranks_are_named_to_all(hall: Hall) -> None:
    """Whose time is up says who is missing, and those with more time hear of it."""
    patient, hasty = hall.comes(seat(0, 4)), hall.comes(seat(2, 4), timeout=0.05)
    told = failure(hasty)
    assert isinstance(told, WorldTimeout)
    assert str(told) == "2 of 4 workers did not come within 0.05 s: rank 1, 3" or (
        str(told) == "3 of 4 workers did not come within 0.05 s: rank 0, 1, 3"
    )
    heard = failure(patient)
    assert isinstance(heard, WorldTimeout)
    assert "'w2' (rank 2, process" in str(heard)
    assert "has given up: " in str(heard)
    assert heard.missing == told.missing


def test_missing_at_the_second_step(hall: Hall) -> None:
    """One that came and then does not start is named too."""
    meetings = [hall.meeting(seat(rank, 2), timeout=1.0) for rank in (0, 1)]
    for each in [hall.pool.submit(each.sign_in) for each in meetings]:
        each.result(20.0)
    meetings[0].publish(Location(0, "here"))
    with pytest.raises(WorldTimeout, match=r"1 of 2 workers did not start within 1 s: rank 1$"):
        meetings[0].wait_for_places()


def test_another_try_after_all_had_signed_in(hall: Hall) -> None:
    """Whoever came and then failed, for itself or because of others, may come again."""
    meetings = [hall.meeting(seat(rank, 2), timeout=1.0) for rank in (0, 1)]
    for each in [hall.pool.submit(each.sign_in) for each in meetings]:
        each.result(20.0)
    meetings[0].publish(Location(0, "here"))
    with pytest.raises(WorldTimeout, match="did not start"):
        meetings[0].wait_for_places()
    again = meet(hall, [seat(rank, 2) for rank in (0, 1)])
    assert [each.seat.comeback for each in again] == [0, 0]
    # And a third time, since one of them does not reach the other.
    agreeing = hall.pool.submit(again[0].agree, [], "")
    with pytest.raises(WorldTimeout, match="no way") as raised:
        again[1].agree([0], "no way to w0")
    heard = failure(agreeing)
    assert isinstance(heard, WorldTimeout)
    assert heard.missing == raised.value.missing == (0,)
    assert "'w1' (rank 1" in str(heard)
    assert "no way to w0" in str(heard)
    third = meet(hall, [seat(rank, 2) for rank in (0, 1)])
    assert [each.seat.comeback for each in third] == [0, 0]
    for each in [hall.pool.submit(each.agree, [], "") for each in third]:
        each.result(20.0)


def test_leaving_ends_the_wait_and_tells(hall: Hall) -> None:
    """A start that is interrupted ends for all."""
    meeting = hall.meeting(seat(0))
    waiting = hall.pool.submit(meeting.sign_in)
    other = hall.comes(seat(1))
    await_seat(hall, 0)
    await_seat(hall, 1)
    meeting.leave()
    assert "before it was stopped" in str(failure(waiting))
    assert "'w0' (rank 0" in str(failure(other))


def test_who_waits_says_so(hall: Hall, monkeypatch: Any, caplog: Any) -> None:
    """After a while in the log, where it is seen without being asked for."""
    monkeypatch.setattr(rendezvous, "_NEWS", 0.0)
    with caplog.at_level(logging.INFO, "aiorpc_torch"):
        assert isinstance(failure(hall.comes(seat(1), timeout=0.7)), WorldTimeout)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("INFO", f"{seat(1)}: rank 1 is here") in said
    assert ("WARNING", f"{seat(1)} waits for rank 0, 2 to come") in said


# ── one is wrong ────────────────────────────────────────────────────────────────────────────────

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "world size": ({"world_size": 4}, ["with world_size=4", "with world_size=3"]),
    "name": ({"name": "w0"}, ["two workers are called 'w0'"]),
    "version": ({"version": "2.0"}, ["runs aiorpc_torch", "2.0", "1.0", "one world takes one"]),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("first", [True, False])
def test_everybody_hears_who_is_wrong(hall: Hall, wrong: str, first: bool) -> None:
    """The error names both processes, whoever comes first."""
    changes, texts = WRONG[wrong]
    seats = [seat(1, **changes), seat(0)]
    coming = [hall.comes(each) for each in (seats if first else seats[::-1])]
    for each in coming:
        error = failure(each)
        assert type(error) is ValueError
        assert all(text in str(error) for text in [*texts, "(rank 0,", "(rank 1,"]), error


def test_two_with_one_rank(hall: Hall) -> None:
    """The second sees that the first lives, and both are named to all."""
    first = hall.comes(seat(1, pid=77))
    await_seat(hall, 1)
    second, third = hall.comes(seat(1, name="other", pid=78)), hall.comes(seat(0))
    for each in (second, first, third):
        error = str(failure(each))
        assert error.startswith("two workers have rank 1: 'w1' (rank 1, process 77 on ")
        assert "and 'other' (rank 1, process 78 on " in error


def await_seat(hall: Hall, rank: int) -> None:
    """Until somebody has taken that seat, and shown that it lives."""
    probe = hall.meeting(seat(0))._store
    probe.open(threading.Event(), 20.0)
    while not probe.has(f"seat/{rank}") or not probe.add(f"beat/{rank}", 0):
        threading.Event().wait(0.005)


def test_the_seat_of_one_that_died_waiting_is_free(hall: Hall, monkeypatch: Any) -> None:
    """A process that is started again while the others still wait is no second one."""
    monkeypatch.setattr(rendezvous, "_BEAT", 0.01)
    store = hall.meeting(seat(1))._store
    store.open(threading.Event(), 20.0)
    store.set("seat/1", seat(1, pid=77).dump())  # and no sign of life ever
    coming = [hall.comes(seat(rank, pid=78)) for rank in (0, 1)]
    await_seat(hall, 1)  # somebody that lives
    coming.append(hall.comes(seat(2, pid=78)))
    assert [[each.pid for each in found.result(20.0)] for found in coming] == [[78] * 3] * 3


def test_the_next_attempt_is_a_new_one(hall: Hall) -> None:
    """What failed at a store does not fail who comes again; who is late to it hears why, once."""
    assert isinstance(failure(hall.comes(seat(0, 3), timeout=0.02)), WorldTimeout)
    for each in [hall.comes(seat(rank, rank + 2)) for rank in (1, 2)]:
        assert "with world_size=3" in str(failure(each))
    late = failure(hall.comes(seat(0)))
    assert "with world_size=3" in str(late)
    again = [hall.comes(seat(rank)) for rank in range(3)]
    assert [names(each) for each in again] == [["w0", "w1", "w2"]] * 3


# ── worlds in a row, and those who come back ────────────────────────────────────────────────────


def meet(hall: Hall, seats: list[Seat]) -> list[Meeting]:
    """All of these, until they know where each is."""
    meetings = [hall.meeting(each) for each in seats]

    def live(meeting: Meeting) -> None:
        found = meeting.sign_in()
        number = meeting.number(found)
        meeting.publish(Location(number, f"{meeting.seat.name} at {number}"))
        meeting.wait_for_places()

    for each in [hall.pool.submit(live, meeting) for meeting in meetings]:
        each.result(20.0)
    return meetings


def part(hall: Hall, meetings: list[Meeting]) -> None:
    ranks = [each.seat.rank for each in meetings]
    for each in [
        hall.pool.submit(each.part, [rank for rank in ranks if rank != each.seat.rank], 5.0)
        for each in meetings
    ]:
        each.result(20.0)


def test_a_store_serves_one_world_after_another(hall: Hall) -> None:
    """With the same processes and with fresh ones, whose numbers stay distinct."""
    first = meet(hall, [seat(rank, 2) for rank in (0, 1)])
    part(hall, first)
    # Who was rank 1 is rank 0 now, beside a process that was in no world yet.
    second = meet(hall, [seat(0, 3, number=1), seat(1, 3), seat(2, 3)])
    found = places(second[2])
    assert [place.number for place in found] == [1, 5, 2]
    assert [place.address for place in found] == ["w0 at 1", "w1 at 5", "w2 at 2"]


def test_who_comes_back_is_told_of_all(hall: Hall) -> None:
    """With a new number, again and again."""
    meet(hall, [seat(rank) for rank in range(3)])
    for count in (1, 2):
        back = hall.meeting(seat(1, pid=100 + count))
        found = back.sign_in()
        assert [each.comeback for each in found] == [0, count, 0]
        assert back.number(found) == 2 + count
        back.publish(Location(back.number(found), f"back, {count}"))
        assert [place.number for place in places(back)] == [0, 2 + count, 2]


def test_who_is_refused_leaves_its_seat(hall: Hall) -> None:
    """To the one that lives."""
    first = meet(hall, [seat(rank, 2, pid=77) for rank in (0, 1)])
    refused = hall.meeting(seat(1, 2, pid=78))
    refused.sign_in()
    assert [who.pid for who, _ in first[0].members(Location(0, ""))] == [77, 78]
    refused.withdraw()
    assert [who.pid for who, _ in first[0].members(Location(0, ""))] == [77, 77]


def test_who_comes_back_wrong(hall: Hall) -> None:
    """As another than it was, it is refused, and the world is none the worse."""
    meet(hall, [seat(rank) for rank in range(3)])
    with pytest.raises(ValueError, match="two workers are called 'w0'"):
        hall.meeting(seat(1, name="w0")).sign_in()
    found = hall.meeting(seat(1)).sign_in()
    assert [each.name for each in found] == ["w0", "w1", "w2"]


def test_a_world_that_has_ended_is_not_come_back_into(hall: Hall) -> None:
    """Whoever comes while it is left, or after nobody answered, waits for the next."""
    for end in (lambda all_: part(hall, all_), lambda all_: all_[0].bury()):
        end(meet(hall, [seat(rank, 2) for rank in (0, 1)]))
        assert isinstance(failure(hall.comes(seat(0, 2), timeout=0.02)), WorldTimeout)
        # That attempt is over too.


def test_what_is_no_store() -> None:
    """It listens there, and says nothing: said in the time, and by the one kind of error."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        threading.Thread(target=hang_up, args=(stranger,), daemon=True).start()
        port = stranger.getsockname()[1]
        with pytest.raises(WorldTimeout, match=f"127.0.0.1:{port} does not answer") as told:
            Meeting(f"tcp://127.0.0.1:{port}", seat(1, 2), 0.1).sign_in()
        stranger.shutdown(socket.SHUT_RDWR)
    assert told.value.missing == (0,)


def hang_up(stranger: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            stranger.accept()[0].close()


class Closing(Hall):
    """At a TCP store that closes, after which there may be another at its address."""

    def __init__(self) -> None:
        self.store: TCPStore | None = serve()
        self.port = self.store.port
        super().__init__(f"tcp://127.0.0.1:{self.port}")

    def until(self, name: str, page: int = 0) -> None:
        """Wait until that is written, on that page."""
        probe = self.meeting(seat(0))._store
        probe.open(threading.Event(), 20.0)
        for _ in range(page):
            probe.turn()
        while not probe.has(name):
            threading.Event().wait(0.005)

    def end(self) -> None:
        """The store closes."""
        self.store = None

    def begin_again(self) -> None:
        """It closes, and the next is opened."""
        self.end()
        self.store = serve(self.port)


@pytest.fixture
def closing(monkeypatch: Any) -> Iterator[Closing]:
    monkeypatch.setattr("aiorpc_torch._world.store.Store._address", as_client)
    here = Closing()
    yield here
    here.close()


def test_the_store_of_the_last_world_closes(closing: Closing) -> None:
    """Who is quicker than rank 0 meets at a store that is about to go, and goes on at the next."""
    part(closing, meet(closing, [seat(rank, 2) for rank in (0, 1)]))
    quick = closing.comes(seat(1, 2))
    closing.until("seat/1", page=1)
    closing.begin_again()
    assert names(closing.comes(seat(0, 2))) == ["w0", "w1"]
    assert names(quick) == ["w0", "w1"]


def test_a_store_closes_before_anything_is_seen_of_it(closing: Closing, monkeypatch: Any) -> None:
    """It was the last world's: who has only just connected to it goes on at the next."""
    look = Meeting._has_failed

    def close_first(self: Meeting) -> bool:
        monkeypatch.setattr(Meeting, "_has_failed", look)
        closing.begin_again()
        return look(self)

    monkeypatch.setattr(Meeting, "_has_failed", close_first)
    quick = closing.comes(seat(1, 2))
    assert names(closing.comes(seat(0, 2))) == ["w0", "w1"]
    assert names(quick) == ["w0", "w1"]


def test_a_store_closes_where_this_worker_has_sat_down(closing: Closing) -> None:
    """Rank 0 has died: that is said at once."""
    waiting = closing.comes(seat(1, 2))
    closing.until("beat/1")
    closing.end()
    assert "rank 0, which keeps it, has given up or died" in str(failure(waiting))


def test_parting_has_an_end(hall: Hall) -> None:
    """With one that does not part."""
    meetings = meet(hall, [seat(rank, 2) for rank in (0, 1)])
    meetings[0].part([1], 0.02)


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=8))
def test_numbers(kept: list[int | None]) -> None:
    """Distinct; a process keeps its own unless one of a lower rank has it; the rest have few."""
    seats = [seat(rank, len(kept), number=number) for rank, number in enumerate(kept)]
    found = numbers(seats)
    assert len(set(found)) == len(found)
    for rank, number in enumerate(kept):
        if number is not None and number not in kept[:rank]:
            assert found[rank] == number
        else:
            assert found[rank] < 2 * len(kept)
    if all(number is None for number in kept):
        assert found == [*range(len(kept))]


def test_a_seat_is_written_and_read() -> None:
    """Device maps and all."""
    one = seat(1, device_maps={"w0": {"cuda:0": "cuda:1"}}, number=7, comeback=2)
    assert Seat.load(one.dump()) == one
    assert json.loads(one.dump())["name"] == "w1"
