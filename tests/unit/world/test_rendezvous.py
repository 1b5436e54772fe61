"""The rendezvous: missing ranks, conflicts, rejoins. Real stores, threads, no RPC."""

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
from hypothesis import given, strategies as st
from torch._C._distributed_c10d import TCPStore

from aiorpc_torch import WorldTimeout
from aiorpc_torch._world import rendezvous
from aiorpc_torch._world.registration import Registration, assign_worker_ids
from aiorpc_torch._world.rendezvous import Rendezvous, WorkerAddress

# Keys of the store, which are part of the wire format.
REGISTRATION, KEEPALIVE = "registration/{}", "keepalive/{}"


def registration(rank: int, size: int = 3, **changes: Any) -> Registration:
    """Return a valid registration, with those changes."""
    return replace(Registration(f"w{rank}", rank, size, "1.0"), **changes)


class Group:
    """Workers, each in a thread, that register at one store."""

    def __init__(self, init_method: str) -> None:
        self.init_method = init_method
        self.pool = ThreadPoolExecutor(16, thread_name_prefix="worker")
        self.participants: list[Rendezvous] = []

    def participant(self, who: Registration, timeout: float = 20.0) -> Rendezvous:
        self.participants.append(Rendezvous(self.init_method, who, timeout))
        return self.participants[-1]

    def register(self, who: Registration, timeout: float = 20.0) -> "Future[list[Registration]]":
        return self.pool.submit(self.participant(who, timeout).register)

    def close(self) -> None:
        for participant in self.participants:
            participant.cancel()
        self.pool.shutdown()


@pytest.fixture(params=["file", "tcp"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    """Meet at a file, and at a TCP store that torchrun's agent hosts."""
    with contextlib.ExitStack() as stack:
        if request.param == "file":
            where = f"file://{tmp_path}/store"
        else:
            server = serve()
            where = f"tcp://127.0.0.1:{server.port}"
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr("aiorpc_torch._world.store.StoreClient._address", as_client)
        here = Group(where)
        stack.callback(here.close)
        yield here


def serve(port: int = 0) -> TCPStore:
    """Return a store that listens on the IPv4 loopback address only.

    torch's own socket is an IPv6 one. Its server looks up the name of each address that connects,
    while all others wait: for five seconds or more if DNS does not answer.
    """
    with socket.socket() as bare:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bare.bind(("127.0.0.1", port))
        port = bare.getsockname()[1]
        fd = bare.detach()
    return TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=fd)


def as_client(self: Any, host: str, port: int) -> tuple[str, int, bool]:
    return host, port, False


def addresses(participant: Rendezvous) -> list[WorkerAddress]:
    """Return every worker's published address as that worker reads it, its own included."""
    participant.wait_for_addresses()
    own, participant._rank = participant._rank, -1
    try:
        return [address for _, address in participant.members(WorkerAddress(-1, ""))]
    finally:
        participant._rank = own


def failure(future: "Future[Any]") -> BaseException:
    exc = future.exception(20.0)
    assert exc is not None
    return exc


def names(future: "Future[list[Registration]]") -> list[str]:
    return [each.name for each in future.result(20.0)]


# ── start ───────────────────────────────────────────────────────────────────────────────────────


def test_every_worker_learns_of_all(group: Group) -> None:
    """Each gets all registrations in rank order, then all addresses."""
    participants = [group.participant(registration(rank)) for rank in (2, 0, 1)]
    coming = [group.pool.submit(each.register) for each in participants]
    assert [names(each) for each in coming] == [["w0", "w1", "w2"]] * 3
    for each in participants:
        number = each.worker_id(coming[0].result())
        each.publish(WorkerAddress(number, f"at {each.registration.name}"))
    for each in participants:
        assert addresses(each) == [(0, "at w0"), (1, "at w1"), (2, "at w2")]


@pytest.mark.promise("worlds.missing")
def test_missing_ranks_are_named_to_all(group: Group) -> None:
    """The first worker that times out names the missing ranks to the others too."""
    patient = group.register(registration(0, 4))
    hasty = group.register(registration(2, 4), timeout=0.05)
    told = failure(hasty)
    assert isinstance(told, WorldTimeout)
    assert str(told) == "2 of 4 workers did not register within 0.05 s: rank 1, 3" or (
        str(told) == "3 of 4 workers did not register within 0.05 s: rank 0, 1, 3"
    )
    heard = failure(patient)
    assert isinstance(heard, WorldTimeout)
    assert "'w2' (rank 2, process" in str(heard)
    assert "has given up: " in str(heard)
    assert heard.missing == told.missing


def test_missing_at_the_second_step(group: Group) -> None:
    """A rank that registered and does not start is named too."""
    participants = [group.participant(registration(rank, 2), timeout=1.0) for rank in (0, 1)]
    for each in [group.pool.submit(each.register) for each in participants]:
        each.result(20.0)
    participants[0].publish(WorkerAddress(0, "here"))
    with pytest.raises(WorldTimeout, match=r"1 of 2 workers did not start within 1 s: rank 1$"):
        participants[0].wait_for_addresses()


def test_another_attempt_after_all_had_registered(group: Group) -> None:
    """Workers that registered and then failed may register again."""
    participants = [group.participant(registration(rank, 2), timeout=1.0) for rank in (0, 1)]
    for each in [group.pool.submit(each.register) for each in participants]:
        each.result(20.0)
    participants[0].publish(WorkerAddress(0, "here"))
    with pytest.raises(WorldTimeout, match="did not start"):
        participants[0].wait_for_addresses()
    again = meet(group, [registration(rank, 2) for rank in (0, 1)])
    assert [each.registration.comeback for each in again] == [0, 0]
    # And a third time, since one of them does not reach the other.
    agreeing = group.pool.submit(again[0].confirm_reachable, [], "")
    with pytest.raises(WorldTimeout, match="no way") as raised:
        again[1].confirm_reachable([0], "no way to w0")
    heard = failure(agreeing)
    assert isinstance(heard, WorldTimeout)
    assert heard.missing == raised.value.missing == (0,)
    assert "'w1' (rank 1" in str(heard)
    assert "no way to w0" in str(heard)
    third = meet(group, [registration(rank, 2) for rank in (0, 1)])
    assert [each.registration.comeback for each in third] == [0, 0]
    for each in [group.pool.submit(each.confirm_reachable, [], "") for each in third]:
        each.result(20.0)


def test_cancel_ends_the_wait_of_all(group: Group) -> None:
    """A cancelled start ends the start of all."""
    participant = group.participant(registration(0))
    waiting = group.pool.submit(participant.register)
    other = group.register(registration(1))
    wait_until_registered(group, 0)
    wait_until_registered(group, 1)
    participant.cancel()
    assert "before it was stopped" in str(failure(waiting))
    assert "'w0' (rank 0" in str(failure(other))


def test_missing_ranks_are_logged(group: Group, monkeypatch: Any, caplog: Any) -> None:
    """A long wait is logged as a warning."""
    monkeypatch.setattr(rendezvous, "_LOG_INTERVAL", 0.0)
    with caplog.at_level(logging.INFO, "aiorpc_torch"):
        first = group.register(registration(0), timeout=5.0)
        wait_until_registered(group, 0)
        assert isinstance(failure(group.register(registration(1), timeout=0.7)), WorldTimeout)
        assert isinstance(failure(first), WorldTimeout)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said.count(("INFO", f"{registration(1)}: {registration(0)} has registered")) == 1
    assert ("WARNING", f"{registration(1)} waits for rank 2 to register") in said


# ── conflicts ───────────────────────────────────────────────────────────────────────────────────

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "world size": ({"world_size": 4}, ["with world_size=4", "with world_size=3"]),
    "name": ({"name": "w0"}, ["two workers are called 'w0'"]),
    "version": ({"version": "2.0"}, ["runs aiorpc_torch", "2.0", "1.0", "run the same version"]),
}


@pytest.mark.promise("worlds.conflict")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("first", [True, False])
def test_every_worker_gets_the_conflict(group: Group, wrong: str, first: bool) -> None:
    """The error names both processes, in either order of registration."""
    changes, texts = WRONG[wrong]
    registrations = [registration(1, **changes), registration(0)]
    coming = [group.register(each) for each in (registrations if first else registrations[::-1])]
    for each in coming:
        error = failure(each)
        assert type(error) is ValueError
        assert all(text in str(error) for text in [*texts, "(rank 0,", "(rank 1,"]), error


@pytest.mark.promise("worlds.conflict")
def test_two_with_one_rank(group: Group) -> None:
    """The second sees that the first is alive, and all learn of both."""
    first = group.register(registration(1, pid=77))
    wait_until_registered(group, 1)
    second = group.register(registration(1, name="other", pid=78))
    third = group.register(registration(0))
    for each in (second, first, third):
        error = str(failure(each))
        assert error.startswith("two workers have rank 1: 'w1' (rank 1, process 77 on ")
        assert "and 'other' (rank 1, process 78 on " in error


def wait_until_registered(group: Group, rank: int) -> None:
    """Wait until a worker has registered as that rank, and sent a keepalive."""
    probe = group.participant(registration(0))._store
    probe.open(threading.Event(), 20.0)
    while not probe.has(REGISTRATION.format(rank)) or not probe.add(KEEPALIVE.format(rank), 0):
        threading.Event().wait(0.005)


def test_the_rank_of_a_process_that_died_waiting_is_free(group: Group, monkeypatch: Any) -> None:
    """A restarted process takes its rank again while the others still wait."""
    monkeypatch.setattr(rendezvous, "_KEEPALIVE_INTERVAL", 0.01)
    store = group.participant(registration(1))._store
    store.open(threading.Event(), 20.0)
    store.set(REGISTRATION.format(1), registration(1, pid=77).dump())  # without keepalives
    coming = [group.register(registration(rank, pid=78)) for rank in (0, 1)]
    wait_until_registered(group, 1)  # a live process
    coming.append(group.register(registration(2, pid=78)))
    assert [[each.pid for each in found.result(20.0)] for found in coming] == [[78] * 3] * 3


@pytest.mark.promise("worlds.again")
def test_the_next_attempt_is_a_new_one(group: Group) -> None:
    """A failed attempt does not fail the next; a late worker gets the old failure, once."""
    assert isinstance(failure(group.register(registration(0, 3), timeout=0.02)), WorldTimeout)
    for each in [group.register(registration(rank, rank + 2)) for rank in (1, 2)]:
        assert "with world_size=3" in str(failure(each))
    late = failure(group.register(registration(0)))
    assert "with world_size=3" in str(late)
    again = [group.register(registration(rank)) for rank in range(3)]
    assert [names(each) for each in again] == [["w0", "w1", "w2"]] * 3


# ── worlds in a row, and rejoins ────────────────────────────────────────────────────────────────


def meet(group: Group, registrations: list[Registration]) -> list[Rendezvous]:
    """Let all of these register, until each can read all addresses."""
    participants = [group.participant(each) for each in registrations]

    def live(participant: Rendezvous) -> None:
        found = participant.register()
        number = participant.worker_id(found)
        participant.publish(WorkerAddress(number, f"{participant.registration.name} at {number}"))
        participant.wait_for_addresses()

    for each in [group.pool.submit(live, participant) for participant in participants]:
        each.result(20.0)
    return participants


def leave_world(group: Group, participants: list[Rendezvous]) -> None:
    ranks = [each.registration.rank for each in participants]
    for each in [
        group.pool.submit(
            each.exit_barrier, [rank for rank in ranks if rank != each.registration.rank], 5.0
        )
        for each in participants
    ]:
        each.result(20.0)


@pytest.mark.promise("worlds.again")
def test_a_store_serves_one_world_after_another(group: Group) -> None:
    """The same processes and fresh ones meet, with distinct worker ids."""
    first = meet(group, [registration(rank, 2) for rank in (0, 1)])
    leave_world(group, first)
    # The former rank 1 is rank 0 now, beside processes that were in no world yet.
    second = meet(group, [registration(0, 3, worker_id=1), registration(1, 3), registration(2, 3)])
    found = addresses(second[2])
    assert [each.worker_id for each in found] == [1, 5, 2]
    assert [each.address for each in found] == ["w0 at 1", "w1 at 5", "w2 at 2"]


@pytest.mark.promise("rejoin.machines")
def test_a_rejoining_worker_learns_of_all(group: Group) -> None:
    """It gets a new worker id, each time."""
    meet(group, [registration(rank) for rank in range(3)])
    for count in (1, 2):
        back = group.participant(registration(1, pid=100 + count))
        found = back.register()
        assert [each.comeback for each in found] == [0, count, 0]
        assert back.worker_id(found) == 2 + count
        back.publish(WorkerAddress(back.worker_id(found), f"back, {count}"))
        assert [each.worker_id for each in addresses(back)] == [0, 2 + count, 2]


def test_a_refused_rejoin_restores_the_registration(group: Group) -> None:
    """The registration is the live process's again."""
    first = meet(group, [registration(rank, 2, pid=77) for rank in (0, 1)])
    refused = group.participant(registration(1, 2, pid=78))
    refused.register()
    assert [each.pid for each, _ in first[0].members(WorkerAddress(0, ""))] == [77, 78]
    refused.withdraw()
    assert [each.pid for each, _ in first[0].members(WorkerAddress(0, ""))] == [77, 77]


def test_a_rejoin_that_conflicts(group: Group) -> None:
    """It is rejected, and the world goes on."""
    meet(group, [registration(rank) for rank in range(3)])
    with pytest.raises(ValueError, match="two workers are called 'w0'"):
        group.participant(registration(1, name="w0")).register()
    found = group.participant(registration(1)).register()
    assert [each.name for each in found] == ["w0", "w1", "w2"]


def test_a_rank_beyond_the_world(group: Group) -> None:
    """A world does not grow: its members go on, and their registrations stay."""
    coming = [group.register(registration(rank, 2)) for rank in range(2)]
    assert [names(each) for each in coming] == [["w0", "w1"]] * 2
    for rank in (2, 1):
        exc = failure(group.register(registration(rank, 3, pid=999)))
        assert isinstance(exc, ValueError)
        assert "world_size must be the same in every worker" in str(exc)
        assert "with world_size=3" in str(exc)
    again = group.register(registration(1, 2))
    assert [each.comeback for each in again.result(20.0)] == [0, 1]


# ── joining ─────────────────────────────────────────────────────────────────────────────────────


def joiner(group: Group, name: str, timeout: float = 20.0, **changes: Any) -> Rendezvous:
    return group.participant(registration(-1, -1, name=name, joined=True, **changes), timeout)


def enter(group: Group, name: str) -> Rendezvous:
    """Return a worker that has joined."""
    found = joiner(group, name)
    registered = found.register()
    found.publish(WorkerAddress(found.worker_id(registered), f"at {name}"))
    return found


def running(group: Group, size: int = 2) -> list[Rendezvous]:
    """Return the first workers of a world, which have started."""
    found = meet(group, [registration(rank, size) for rank in range(size)])
    for rank, each in enumerate(found):
        each.publish(WorkerAddress(rank, f"at w{rank}"))
    return found


def members_of(participant: Rendezvous) -> list[tuple[str, int, int]]:
    """Return name, rank and torch's id of each member, as a worker that has entered reads them."""
    own = WorkerAddress(participant.worker_id([]), "own")
    return [(each.name, each.rank, at.worker_id) for each, at in participant.members(own)]


@pytest.mark.promise("joining.join")
def test_workers_join_under_the_next_ranks(group: Group) -> None:
    """Each learns of all before it; those that joined at once learn of each other."""
    running(group)
    joining = [joiner(group, name) for name in ("a", "b")]
    for each in joining:
        found = each.register()
        assert [one.name for one in found] == ["w0", "w1", each.registration.name]
    for each in joining:
        each.publish(WorkerAddress(each.worker_id([]), "here"))
    every = [("w0", 0, 0), ("w1", 1, 1), ("a", 2, 2), ("b", 3, 3)]
    assert [members_of(each) for each in joining] == [every, every]
    assert members_of(enter(group, "c")) == [*every, ("c", 4, 4)]


def test_a_worker_that_joins_waits_for_the_world(group: Group) -> None:
    """Until all have started; what it must not be called is refused."""
    early = group.pool.submit(lambda: enter(group, "a"))
    late = joiner(group, "b", timeout=0.05)
    with pytest.raises(WorldTimeout, match=r"'b' joins a running world, and none is complete"):
        late.register()
    running(group)
    assert members_of(early.result(20.0)) == [("w0", 0, 0), ("w1", 1, 1), ("a", 2, 2)]
    with pytest.raises(ValueError, match="two workers are called 'w0'"):
        joiner(group, "w0").register()
    with pytest.raises(ValueError, match="every worker must run the same version"):
        joiner(group, "b", version="0.9").register()


@pytest.mark.promise("joining.names")
def test_a_name_is_free_again(group: Group) -> None:
    """After its worker has left; its last owner is asked for if it has not."""
    running(group)
    first = enter(group, "a")
    second = joiner(group, "a")
    second.register()
    known = second.predecessor()
    assert known is not None
    assert (known[0].rank, known[1]) == (2, WorkerAddress(2, "at a"))
    second.withdraw()  # refused
    first.depart()
    third = joiner(group, "a")
    third.register()
    assert third.predecessor() is None
    third.publish(WorkerAddress(third.worker_id([]), "here"))
    assert members_of(third) == [("w0", 0, 0), ("w1", 1, 1), ("a", 4, 4)]


@pytest.mark.promise("joining.names", "joining.death")
def test_two_that_join_under_one_name(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits until the first has entered, has given up, or has died meanwhile."""
    running(group)
    slow = joiner(group, "a")
    slow.register()
    second = joiner(group, "a")
    registering = group.pool.submit(second.register)
    slow.withdraw()
    registering.result(20.0)
    monkeypatch.setattr(rendezvous, "_CLAIM_TIMEOUT", 0.05)  # `second` counts as dead
    third = enter(group, "a")
    assert third.registration.rank == 4
    with pytest.raises(ValueError, match="another worker joins as 'a'"):
        second.publish(WorkerAddress(9, "late"))
    stopped = joiner(group, "b")
    stopped.register()
    monkeypatch.setattr(rendezvous, "_CLAIM_TIMEOUT", 60.0)
    waiting = joiner(group, "b")
    waiting.cancel()
    with pytest.raises(WorldTimeout, match="was stopped"):
        waiting.register()


def test_a_replacement_process_learns_of_workers_that_joined(group: Group) -> None:
    """It has a worker id of its own. If one has joined under its name, it cannot rejoin."""
    running(group)
    enter(group, "a")
    back = group.participant(registration(1, 2))
    found = back.register()
    assert [each.name for each in found] == ["w0", "w1", "a"]
    assert (back.worker_id(found), back.registration.comeback) == (3, 1)
    back.publish(WorkerAddress(3, "back"))
    assert members_of(back) == [("w0", 0, 0), ("w1", 1, 3), ("a", 2, 2)]
    enter(group, "w1")
    with pytest.raises(ValueError, match="cannot rejoin: 'w1'"):
        group.participant(registration(1, 2)).register()


def test_an_ended_world_is_not_joined(group: Group) -> None:
    """A worker that joins then waits for the next; one that has left is not awaited."""
    first = running(group)
    left = enter(group, "a")
    left.depart()
    leaving = [
        group.pool.submit(each.exit_barrier, [1 - rank, 2], 20.0) for rank, each in enumerate(first)
    ]
    for each in leaving:
        each.result(10.0)
    for each in first:
        each.mark_world_dead()
    with pytest.raises(WorldTimeout, match="none is complete"):
        joiner(group, "b", timeout=0.05).register()
    running(group)
    assert members_of(enter(group, "b")) == [("w0", 0, 0), ("w1", 1, 1), ("b", 2, 2)]


def test_an_ended_world_is_not_rejoined(group: Group) -> None:
    """A worker that registers while the others exit, or when all are dead, waits for the next."""
    for end in (lambda all_: leave_world(group, all_), lambda all_: all_[0].mark_world_dead()):
        end(meet(group, [registration(rank, 2) for rank in (0, 1)]))
        assert isinstance(failure(group.register(registration(0, 2), timeout=0.02)), WorldTimeout)
        # This attempt has failed too.


def test_a_store_that_is_late() -> None:
    """A worker waits until it listens, at most for its time, and no longer if it is cancelled."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}"
    with pytest.raises(WorldTimeout, match=f"no store at 127.0.0.1:{port} within 0.2 s .*refused"):
        Rendezvous(url, registration(1, 2), 0.2).register()
    cancelled = Rendezvous(url, registration(1, 2), 600.0)
    cancelled.cancel()
    with pytest.raises(WorldTimeout, match="no store"):
        cancelled.register()
    group = Group(url)
    second = group.register(registration(1, 2))
    assert group.register(registration(0, 2)).result() == second.result()
    group.close()


def test_a_listener_that_is_no_store() -> None:
    """It raises WorldTimeout in time."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        threading.Thread(target=hang_up, args=(stranger,), daemon=True).start()
        port = stranger.getsockname()[1]
        with pytest.raises(WorldTimeout, match=f"127.0.0.1:{port} does not answer") as told:
            Rendezvous(f"tcp://127.0.0.1:{port}", registration(1, 2), 0.1).register()
        stranger.shutdown(socket.SHUT_RDWR)
    assert told.value.missing == (0,)


def hang_up(stranger: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            stranger.accept()[0].close()


class ClosingStore(Group):
    """Workers at a TCP store that closes; another may open at its address."""

    def __init__(self) -> None:
        self.store: TCPStore | None = serve()
        self.port = self.store.port
        super().__init__(f"tcp://127.0.0.1:{self.port}")

    def until(self, name: str, epoch: int = 0) -> None:
        """Wait until that key exists in that epoch."""
        probe = self.participant(registration(0))._store
        probe.open(threading.Event(), 20.0)
        for _ in range(epoch):
            probe.next_epoch()
        while not probe.has(name):
            threading.Event().wait(0.005)

    def end(self) -> None:
        """Close the store."""
        self.store = None

    def begin_again(self) -> None:
        """Close the store and open the next."""
        self.end()
        self.store = serve(self.port)


@pytest.fixture
def closing(monkeypatch: Any) -> Iterator[ClosingStore]:
    monkeypatch.setattr("aiorpc_torch._world.store.StoreClient._address", as_client)
    here = ClosingStore()
    yield here
    here.close()


def test_the_store_of_the_last_world_closes(closing: ClosingStore) -> None:
    """A worker quicker than rank 0 registers at the closing store, then at the next."""
    leave_world(closing, meet(closing, [registration(rank, 2) for rank in (0, 1)]))
    quick = closing.register(registration(1, 2))
    closing.until(REGISTRATION.format(1), epoch=1)
    closing.begin_again()
    assert names(closing.register(registration(0, 2))) == ["w0", "w1"]
    assert names(quick) == ["w0", "w1"]


def test_a_store_closes_before_it_is_read(closing: ClosingStore, monkeypatch: Any) -> None:
    """It was the last world's: a worker that has just connected goes on at the next."""
    unpatched = Rendezvous._epoch_failed

    def close_first(self: Rendezvous) -> bool:
        monkeypatch.setattr(Rendezvous, "_epoch_failed", unpatched)
        closing.begin_again()
        return unpatched(self)

    monkeypatch.setattr(Rendezvous, "_epoch_failed", close_first)
    quick = closing.register(registration(1, 2))
    assert names(closing.register(registration(0, 2))) == ["w0", "w1"]
    assert names(quick) == ["w0", "w1"]


def test_a_store_closes_after_this_worker_registered(closing: ClosingStore) -> None:
    """Rank 0 has died: the error is raised at once."""
    waiting = closing.register(registration(1, 2))
    closing.until(KEEPALIVE.format(1))
    closing.end()
    assert "rank 0, which hosts it, has given up or died" in str(failure(waiting))


@pytest.mark.promise("worlds.exit")
def test_the_exit_barrier_times_out(group: Group) -> None:
    """One worker does not reach it."""
    participants = meet(group, [registration(rank, 2) for rank in (0, 1)])
    participants[0].exit_barrier([1], 0.02)


# ── worker ids ──────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=8))
def test_worker_ids(kept: list[int | None]) -> None:
    """They are distinct. A process keeps its id unless a lower rank has it; new ids are small."""
    registrations = [
        registration(rank, len(kept), worker_id=number) for rank, number in enumerate(kept)
    ]
    found = assign_worker_ids(registrations)
    assert len(set(found)) == len(found)
    for rank, number in enumerate(kept):
        if number is not None and number not in kept[:rank]:
            assert found[rank] == number
        else:
            assert found[rank] < 2 * len(kept)
    if all(number is None for number in kept):
        assert found == [*range(len(kept))]


def test_a_registration_is_written_and_read() -> None:
    """All fields survive, device maps too."""
    one = registration(1, device_maps={"w0": {"cuda:0": "cuda:1"}}, worker_id=7, comeback=2)
    assert Registration.load(one.dump()) == one
    assert json.loads(one.dump())["name"] == "w1"
