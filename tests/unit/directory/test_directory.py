"""The directory of a world, without sockets: its start, its changes and its end."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._directory.directory import Directory
from aiorpc_torch._directory.directory_messages import (
    Add,
    Announce,
    Ask,
    AskMissing,
    Complete,
    Confirm,
    Ended,
    Entering,
    Exit,
    Exited,
    Failed,
    FromWorker,
    GiveUp,
    Greet,
    Here,
    Know,
    Known,
    Leave,
    Left,
    Member,
    Members,
    Missing,
    Publish,
    Register,
    Registered,
    Resume,
    Retire,
    ToWorker,
    Verdict,
)
from aiorpc_torch._directory.directory_stream import encode
from aiorpc_torch._directory.registration import MAX_PROCESSES, Registration
from tests.support.directories import Network, Process, registration, start

# ── start ───────────────────────────────────────────────────────────────────────────────────────


def test_every_worker_learns_of_all() -> None:
    """The registrations in rank order, then the addresses; nothing is sent before all are here."""
    network = Network()
    processes = [network.register(registration(rank)) for rank in (2, 0)]
    assert not any(each.inbox for each in processes)
    processes.append(network.register(registration(1)))
    network.settle()
    for each in processes:
        registered, members, complete = each.heard
        assert isinstance(registered, Registered)
        assert [one.name for one in registered.registrations] == ["w0", "w1", "w2"]
        assert isinstance(members, Members)
        assert [(one.name, one.rank, one.worker_id, one.address) for one in members.members] == [
            ("w0", 0, 0, "at w0"),
            ("w1", 1, 1, "at w1"),
            ("w2", 2, 2, "at w2"),
        ]
        assert complete == Complete()


def test_workers_within_reach_confirm_nothing() -> None:
    """The world runs once all have an address."""
    network = Network()
    processes = [network.register(registration(rank, 2)) for rank in (0, 1)]
    for each in processes:
        each.inbox.clear()
        each.say(Publish("here", {}, True))
    assert [[type(one) for one in each.inbox] for each in processes] == [[Members]] * 2


@pytest.mark.promise("worlds.missing")
def test_missing_ranks_are_named_to_all() -> None:
    """The first worker that times out names the missing ranks to the others too."""
    network = Network()
    patient, hasty = (network.register(registration(rank, 4)) for rank in (0, 2))
    hasty.say(AskMissing())
    assert hasty.inbox.pop() == Missing([1, 3], "register")
    hasty.say(GiveUp("within 5 s"))
    text = "2 of 4 workers did not register within 5 s: rank 1, 3"
    assert hasty.inbox == [Failed(text, [1, 3])]
    assert patient.inbox == [Failed(f"{hasty.own} has given up: {text}", [1, 3])]
    assert network.register(registration(1, 4)).inbox == [Ended()], "of the next attempt"


def test_many_missing_ranks() -> None:
    """The first ones are named to those that ask, and all of them to those that give up."""
    network = Network()
    ended, first = (network.register(registration(rank, 50)) for rank in (1, 0))
    ended.end()
    first.say(AskMissing())
    text = f"{ended.own} had registered, and ended"
    assert first.inbox.pop() == Missing([*range(1, 21)], "register", text, 29)
    for rank in range(1, 30):
        network.register(registration(rank, 50)).end()
    first.say(AskMissing())
    missing = first.inbox.pop()
    assert isinstance(missing, Missing)
    assert missing.ended.count("process") == 20
    assert missing.ended.endswith(" and 9 more had registered, and ended")
    first.say(GiveUp("within 5 s"))
    [failed] = first.inbox
    assert isinstance(failed, Failed)
    assert failed.missing == [*range(1, 50)]
    assert failed.text.count("process") == 29


def test_a_worker_that_ends_before_all_have_registered_is_named() -> None:
    """Until another process takes its rank."""
    network = Network()
    first, second = (network.register(registration(rank)) for rank in (0, 1))
    second.end()
    first.say(AskMissing())
    text = f"{second.own} had registered, and ended"
    assert first.inbox.pop() == Missing([1, 2], "register", text)
    network.register(registration(1))
    first.say(AskMissing())
    assert first.inbox.pop() == Missing([2], "register")
    network.processes.pop().end()
    first.say(GiveUp("within 5 s"))
    expected = f"2 of 3 workers did not register within 5 s: rank 1, 2 ({text})"
    assert first.inbox == [Failed(expected, [1, 2])]


def test_a_worker_that_does_not_start_is_named() -> None:
    """It has registered, and has no address; or it ends at this step."""
    for end in (False, True):
        network = Network()
        first, second = (network.register(registration(rank, 2)) for rank in (0, 1))
        first.deliver()
        if end:
            second.end()
            text = f"{second.own} has ended while the world started"
        else:
            first.say(GiveUp("within 1 s"))
            text = "1 of 2 workers did not start within 1 s: rank 1"
        assert first.inbox == [Failed(text, [1])]


def test_a_worker_that_does_not_reach_another() -> None:
    """All learn of it."""
    network = Network()
    first, second = (network.register(registration(rank, 2)) for rank in (0, 1))
    first.deliver()
    second.deliver()
    second.say(Confirm([0], "no way to w0"))
    assert second.last == Failed("no way to w0", [0])
    assert first.last == Failed(f"{second.own}: no way to w0", [0])


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "world size": ({"world_size": 4}, ["with world_size=4", "with world_size=3"]),
    "name": ({"name": "w0"}, ["two workers have the name 'w0'"]),
    "version": ({"version": "2.0"}, ["runs aiorpc_torch", "2.0", "1.0", "run the same version"]),
}


@pytest.mark.promise("worlds.conflict")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("is_first", [True, False])
def test_every_worker_gets_the_conflict(wrong: str, is_first: bool) -> None:
    """The error names both processes, in either order; also to one that is late, once."""
    changes, texts = WRONG[wrong]
    both = [registration(1, **changes), registration(0)]
    network = Network()
    processes = [network.register(each) for each in (both if is_first else both[::-1])]
    processes.append(network.register(registration(2)))
    for each in processes:
        [failed] = each.inbox
        assert isinstance(failed, Failed)
        assert failed.missing is None
        assert all(text in failed.text for text in [*texts, "(rank 0,", "(rank 1,"]), failed
    for rank in range(3):
        assert network.register(registration(rank)).inbox == [Ended()]


@pytest.mark.promise("worlds.conflict")
def test_two_with_one_rank() -> None:
    """All learn of both, unless the first has died: then the second has its rank."""
    network = Network()
    first = network.register(registration(1, pid=77))
    first.end()
    first = network.register(registration(1, pid=78))
    second = network.register(registration(1, name="other", pid=79))
    for each in (first, second):
        [failed] = each.inbox
        assert isinstance(failed, Failed)
        assert failed.text.startswith("two workers have rank 1: 'w1' (rank 1, process 78 on ")
        assert "and 'other' (rank 1, process 79 on " in failed.text


@pytest.mark.parametrize(
    "speak",
    [
        lambda directory: directory.receive(7, AskMissing()),
        lambda directory: directory.receive(0, Register(registration(2))),
        lambda directory: directory.receive(7, Register(registration(3))),
        lambda directory: directory.receive(7, Register(registration(0, MAX_PROCESSES + 1))),
        lambda directory: directory.receive(0, Publish("here", {}, True)),
        lambda directory: directory.receive(0, Confirm([], "")),
        lambda directory: directory.receive(1, Verdict("w0", 0, False)),
    ],
)
def test_what_a_connection_must_not_send(speak: Callable[[Directory], None]) -> None:
    """Raises ValueError, upon which the connection is closed."""
    network = Network()
    for rank in (0, 1):
        network.register(registration(rank))
    with pytest.raises(ValueError, match=r"."):
        speak(network.directory)


# ── changes ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("joining.join")
def test_workers_join_under_the_next_ranks() -> None:
    """Those that join at once learn of each other; each is announced when all have added it."""
    network, first = start(2)
    joining = [network.join(name) for name in ("a", "b")]
    first[0].heard.clear()
    network.settle()
    every = {"w0": 0, "w1": 1, "a": 2, "b": 3}
    assert [each.view for each in (*first, *joining)] == [every] * 4
    assert [each.own.rank for each in joining] == [2, 3]
    assert [type(each) for each in first[0].heard] == [Add, Add, Announce, Announce]


def test_a_worker_that_joins_waits_for_the_world() -> None:
    network = Network()
    early, late = network.join("a"), network.join("b")
    late.say(GiveUp("within 5 s"))
    [failed] = late.inbox
    assert isinstance(failed, Failed)
    assert failed.text.startswith("'b' joins a running world, and none is complete within 5 s.")
    for rank in (0, 1):
        network.register(registration(rank, 2))
    network.settle()
    assert early.has_entered


def test_many_workers_that_wait_and_are_refused() -> None:
    """Each learns of it once, however many they are; the others enter."""
    network = Network()
    refused = [network.join(f"r{count}", version="0.9") for count in range(1_000)]
    joining = network.join("a")
    for rank in (0, 1):
        network.register(registration(rank, 2))
    network.settle()
    assert all([type(one) for one in each.heard] == [Failed] for each in refused)
    assert joining.has_entered


@pytest.mark.promise("joining.names")
def test_names_that_are_refused_and_free() -> None:
    """A living worker's is refused. That of one that has left or died is free."""
    network, _ = start(2)
    first = network.join("a")
    network.settle()
    for wrong, text in (
        (network.join("w0"), "cannot join: that name is of rank 0"),
        (network.join("a"), "two workers have the name 'a': the first one is alive"),
        (network.join("b", version="0.9"), "every worker must run the same version"),
    ):
        network.settle()
        assert isinstance(wrong.last, Failed)
        assert text in wrong.last.text
    first.depart()
    second = network.join("a")
    network.settle()
    assert second.view == {"w0": 0, "w1": 1, "a": 3}
    second.end()
    third = network.join("a")
    network.settle()
    assert third.view == {"w0": 0, "w1": 1, "a": 4}


@pytest.mark.promise("joining.hosts")
@pytest.mark.parametrize("is_hidden", ["member", "joiner", "neither"])
def test_a_process_of_another_host(is_hidden: str) -> None:
    """It is refused if it, or a living member, listens on the loopback interface only."""
    network = Network()
    where = "127.0.1.1" if is_hidden == "member" else "10.0.0.1"
    own = registration(0, 1, namespace="here")
    first = network.register(own)
    first.address = f"uv://{where}:7"
    network.settle()
    for name, space in (("near", "here"), ("far", "there")):
        joining = network.join(name, namespace=space)
        is_loopback = is_hidden == "joiner" and name == "far"
        joining.address = "uv://127.0.0.1:7" if is_loopback else "uv://10.0.0.2:7"
        network.settle()
        assert joining.has_entered == (name == "near" or is_hidden == "neither")
    if is_hidden != "neither":
        assert isinstance(joining.last, Failed)
        assert re.search(r"'(w0|far)' listens at 127\.0\.[01]\.1 only", joining.last.text)
    assert ("far" in first.view) == (is_hidden == "neither")


@pytest.mark.promise("joining.names", "joining.death")
def test_two_that_join_under_one_name() -> None:
    """The second waits until the first has entered, has given up, or has died meanwhile."""
    network, _ = start(1)
    first, second, third = (network.join("a") for _ in range(3))
    assert isinstance(first.last, Entering)
    assert not second.inbox
    first.say(GiveUp("before it was stopped"))
    assert isinstance(second.last, Entering)
    second.end()
    assert isinstance(third.last, Entering)
    fourth = network.join("a")
    network.settle()
    assert third.has_entered
    assert isinstance(fourth.last, Failed)


def test_members_that_do_not_answer() -> None:
    """A process enters without them after a while, and learns which they are."""
    network, [first, second] = start(2)
    joining = network.join("a")
    joining.deliver()
    start_expires, add_expires = network.expiring
    first.deliver()
    start_expires()
    assert isinstance(joining.last, Members)
    add_expires()
    assert joining.last == Announce("a", 2, ["w1"])
    add_expires()
    assert second.inbox == [*second.inbox[:1], Announce("a", 2, ["w1"])], "once"


@pytest.mark.promise("joining.bound")
def test_a_process_that_is_frozen_while_it_joins() -> None:
    """Its name is free after a while; when it thaws, it learns that, and disturbs none."""
    network, [first, *_] = start()
    frozen, second = network.join("a"), network.join("a")
    [start_expires] = network.expiring
    assert second.inbox == []
    start_expires()
    network.settle()
    assert second.has_entered
    assert (second.own.rank, second.number) == (4, 4)
    assert isinstance(frozen.heard[-1], Failed)
    assert "had no address within 60 s" in frozen.heard[-1].text
    assert first.view == {"w0": 0, "w1": 1, "w2": 2, "a": 4}


@pytest.mark.promise("joining.numbers")
@pytest.mark.parametrize("is_replacement", [False, True])
def test_a_world_that_has_had_all_numbers(is_replacement: bool) -> None:
    """The next process is refused, and the world goes on."""
    network, [first, second, third] = start()
    network.directory._entries.count = MAX_PROCESSES - 4
    last = network.join("last")
    network.settle()
    assert last.number == MAX_PROCESSES - 1
    if is_replacement:
        third.end()
    refused = network.register(registration(2)) if is_replacement else network.join("a")
    network.settle()
    assert isinstance(refused.last, Failed)
    assert "32,768 processes" in refused.last.text
    assert second.view == first.view == {"w0": 0, "w1": 1, "w2": 2, "last": MAX_PROCESSES - 1}
    assert not network.directory._entries._entering


@pytest.mark.promise("rejoin.machines")
def test_a_replacement_process() -> None:
    """It has the rank and a new number each time. A living process is not replaced."""
    network, first = start(3)
    refused = network.register(registration(1, pid=99))
    network.settle()
    assert isinstance(refused.last, Failed)
    assert "two workers have the name 'w1': the first one is alive" in refused.last.text
    refused.end()
    for count in (1, 2):
        first[1].end()
        first[1] = network.register(registration(1, pid=100 + count))
        network.settle()
        assert (first[1].own.restarts, first[1].has_entered) == (count, True)
        views = [{"w0": 0, "w1": 2 + count, "w2": 2}] * 3
        assert [each.view for each in first] == views


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (registration(1, name="w0"), "two workers have the name 'w0'"),
        (registration(1, name="other"), "that rank is of 'w1'"),
        (registration(1, 4), "world_size must be the same"),
        (registration(3, 4), "with world_size=4"),
        (registration(2, name="a"), "cannot rejoin: 'a' (rank 3"),
    ],
)
def test_a_replacement_process_that_conflicts(wrong: Registration, text: str) -> None:
    """It is refused, and the world goes on."""
    network, first = start()
    first[2].end()
    network.join("a")
    network.settle()
    refused = network.register(wrong)
    network.settle()
    assert isinstance(refused.last, Failed)
    assert text in refused.last.text
    back = network.register(registration(2))
    network.settle()
    assert back.has_entered


def test_the_end_of_a_connection_is_told_unless_its_worker_has_left() -> None:
    """Also to a worker that enters later."""
    network, [first, second, third] = start()
    second.end()
    third.say(Leave(False))
    third.end()
    joining = network.join("a")
    network.settle()
    assert first.gone == joining.gone == {1}


@pytest.mark.promise("joining.retire")
def test_a_worker_that_retires() -> None:
    """All are told at once, also those that come later; its name is its own until it has left."""
    network, [first, second, third] = start()
    third.retire()
    third.say(Retire())
    joining = network.join("a")
    refused = network.join("w2")
    network.settle()
    assert first.left == second.left == joining.left == {2}
    assert first.heard.count(Left("w2", 2)) == 1
    assert third.left == set()
    assert isinstance(refused.last, Failed)
    first.say(Exit([2]))
    assert first.last == Exited(), "it is not waited for"
    assert first.gone == set()
    third.depart()
    assert first.last == Exited()


@pytest.mark.promise("joining.cut")
def test_a_connection_that_is_opened_again() -> None:
    """Its process learns of all that has happened meanwhile, and then of what happens."""
    network, [first, second, third] = start()
    second.cut()
    third.end()
    network.join("a")
    network.settle()
    adding = network.join("b")
    adding.deliver()
    second.resume()
    second.deliver()
    assert second.view == {"w0": 0, "w1": 1, "w2": 2, "a": 3}
    network.settle()
    assert second.view == first.view
    assert second.gone == {2}
    assert [each for each in second.heard if isinstance(each, Announce)] == [Announce("b", 4, [])]
    assert (first.told, first.gone) == ({1, 2}, {2})


def test_a_member_that_connects_again_while_its_name_is_wanted() -> None:
    """It is alive: the other process is refused before rank 0's worker has judged."""
    network, [first, second, _] = start()
    second.cut()
    wanting = network.register(registration(1, pid=99))
    asked = first.inbox[-1]
    assert asked == Ask("w1", 1)
    second.resume()
    assert isinstance(wanting.last, Failed)
    assert "the first one is alive" in wanting.last.text
    wanting.end()
    network.join("a")
    network.settle()
    assert second.view == first.view == {"w0": 0, "w1": 1, "w2": 2, "a": 3}


@pytest.mark.promise("security.directory")
@pytest.mark.parametrize(
    "wrong", [("w1", 1, "another key"), ("w1", 2, "key 1"), ("w9", 1, "key 1"), ("w1", 1, "")]
)
def test_a_stranger_that_connects_again(wrong: tuple[str, int, str]) -> None:
    """It does not know the key of the process."""
    network, [first, second, _] = start()
    connection = network.host.next_connection(first)
    first.connection = connection
    name, number, key = wrong
    own = registration(1, name=name)
    network.directory.receive(connection, Resume(own, number, key, 0, True, "world 0"))
    assert first.inbox == [Ended()]
    with pytest.raises(ValueError, match="register first"):
        network.directory.receive(connection, Leave(True))
    second.say(Greet())
    assert second.last == Here(), "its own connection is open"


# ── exit ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("worlds.exit")
def test_the_barrier_of_the_exit() -> None:
    """Each waits for those that it names, unless their connections end."""
    network, [first, second, third] = start()
    first.say(Exit([1, 2]))
    second.say(Exit([0]))
    assert (first.last, second.last) == (Complete(), Exited())
    third.say(Leave(False))
    assert network.register(registration(1)).last == Ended(), "of the next world"
    network.directory.gone(len(network.host.owners) - 1)  # of that which was turned away
    assert first.last == Complete()
    third.end()
    assert first.last == Exited()
    network.settle()
    assert first.heard.count(Exited()) == second.heard.count(Exited()) == 1


@pytest.mark.promise("worlds.exit")
def test_a_world_goes_on_while_a_member_stays() -> None:
    """Others may leave together before it does: processes still enter."""
    network, [first, second, third] = start()
    for each, other in ((second, 2), (third, 1)):
        each.say(Leave(False))
        each.say(Exit([other]))
    assert second.last == third.last == Exited()
    for each in (second, third):
        each.end()
    joined, replacement = network.join("a"), network.register(registration(1))
    network.settle()
    assert joined.has_entered
    assert replacement.has_entered
    first.say(Leave(False))
    first.say(Exit([1, 3]))
    assert first.last != Exited(), "it waits for those that have entered"
    joined.say(Exit([], is_full=True))
    replacement.say(Exit([], is_full=True))
    assert first.last == joined.last == replacement.last == Exited()
    assert network.join("b").last == Ended()


def test_a_stranger_does_not_end_a_world() -> None:
    """Only a member of a world that runs can leave it."""
    network, [first, *_] = start()
    stranger = network.register(registration(-1, -1, name="a", joined=True))
    with pytest.raises(ValueError, match="no member leaves"):
        stranger.say(Exit([]))
    network.settle()
    first.say(Exit([1, 2]))
    assert first.last != Exited()


# ── any order ───────────────────────────────────────────────────────────────────────────────────

EVENTS = ["join", "back", "end", "exit", "retire", "depart", "expire", "stop", "freeze", "cut"]
EVENTS += ["resume"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["deliver"] * 4 + EVENTS),
        st.integers(0, 30),
    ),
    max_size=80,
)


def take(network: Network, step: str, number: int) -> None:
    """Take one step of a history."""
    others = [each for each in network.processes if each.is_alive and each.own.rank != 0]
    chosen = others[number % len(others)] if others else None
    match step:
        case "join":
            network.join("abw1"[number % 4 : number % 4 + 1 + number % 2])
        case "back":
            network.register(registration(1 + number % 2))
        case "deliver":
            if busy := network.busy():
                busy[number % len(busy)].deliver()
        case "end" if chosen is not None:
            chosen.end()
        case "exit" if chosen is not None and chosen.has_entered and not chosen.is_cut:
            chosen.say(Exit([each.own.rank for each in others if number & each.number]))
            chosen.end()
        case "retire" if chosen is not None and chosen.has_entered and not chosen.is_cut:
            chosen.retire()
        case "depart" if chosen is not None and chosen.own.joined and chosen.has_entered:
            chosen.depart()
        case "expire" if network.expiring:
            network.expiring[number % len(network.expiring)]()
        case "freeze" if chosen is not None and isinstance(chosen.last_sent, Entering):
            chosen.is_frozen = True
        case "cut" if chosen is not None and chosen.has_entered and not chosen.is_cut:
            chosen.cut()
        case "resume" if chosen is not None and chosen.is_cut:
            resume(chosen)
        case "stop" if chosen is not None and not chosen.has_entered:
            chosen.say(GiveUp("before it was stopped"))


def resume(process: Process) -> None:
    """Let a process connect again. If it was replaced meanwhile, it is refused."""
    process.resume()
    if process.inbox == [Ended()]:
        process.is_alive = False


@given(STEPS)
def test_all_living_members_end_with_one_view(steps: list[tuple[str, int]]) -> None:
    """In any order of joins, departures, deaths, replacements and messages."""
    network, _ = start()
    for step, number in steps:
        take(network, step, number)
    network.settle()
    for each in network.processes:
        if each.is_cut and each.is_alive:
            resume(each)
    for step_later in [*network.expiring]:
        step_later()
    for each in network.processes:
        each.is_frozen = False
    network.settle()
    departed = {each.number for each in network.processes if each.has_left}
    living = [each for each in network.processes if each.is_alive and each.has_entered]
    views = [{(name, n) for name, n in each.view.items() if n not in departed} for each in living]
    assert all(view == views[0] for view in views), views
    numbers = {each.number for each in living}
    assert numbers <= {number for _, number in views[0]}
    assert len({each.own.name for each in living}) == len({each.own.rank for each in living})
    assert len(living) == len({each.own.name for each in living})
    for each in living:
        assert numbers.isdisjoint(each.gone)
        dead = {n for _, n in views[0]} - numbers - departed
        assert dead <= each.told, "it pings them"
        leaving = departed | {one.number for one in living if one.is_retiring}
        assert leaving.intersection(each.view.values()) - {each.number} <= each.left
        assert each.left <= leaving | {one.number for one in network.processes if one.is_retiring}
    late = network.join("late")
    network.settle()
    assert late.has_entered, "ends of workers close no world in which one stays"
    for each in network.processes:  # none waits without end
        assert each.has_entered or not each.is_alive or isinstance(each.last, Failed | Ended)


@given(st.permutations(range(4)), STEPS)
def test_a_start_ends_for_all(order: list[int], steps: list[tuple[str, int]]) -> None:
    """All enter, or all fail: whoever dies or gives up meanwhile."""
    network = Network()
    for rank in order:
        network.register(registration(rank, 4))
    for step, number in steps:
        if step in ("deliver", "end", "stop"):
            take(network, step, number)
    network.settle()
    living = [each for each in network.processes if each.is_alive]
    entered = {each.has_entered for each in living}
    assert len(entered) <= 1 or any(isinstance(each.last, Failed) for each in living)
    for each in living:
        assert each.has_entered or isinstance(each.last, Failed | Ended), each.heard


NAMES = st.sampled_from(["w0", "w1", "a", ""])
NUMBERS = st.integers(-2, 4) | st.integers(-(2**63), 2**63 - 1)
RANKS = st.lists(NUMBERS, max_size=3)
REGISTRATIONS = st.builds(
    Registration,
    NAMES.filter(bool),
    NUMBERS,
    NUMBERS,
    st.just("1.0"),
    worker_id=st.none() | NUMBERS,
    joined=st.booleans(),
    entry=NUMBERS,
    restarts=NUMBERS,
    namespace=st.sampled_from(["", "here", "there"]),
)
ADDRESSES = st.sampled_from(["here", "uv://127.0.0.1:1", "uv://10.0.0.1:1", "uv://["])
MESSAGES = st.one_of(
    st.builds(Register, REGISTRATIONS, NAMES),
    st.builds(Resume, REGISTRATIONS, NUMBERS, NAMES, NUMBERS, st.booleans(), NAMES),
    st.builds(
        Known,
        *(NUMBERS, NUMBERS, NUMBERS),
        st.lists(
            st.builds(Member, REGISTRATIONS, NUMBERS, ADDRESSES, st.just({}), NAMES), max_size=3
        ),
        *(st.lists(NAMES, max_size=2), st.lists(NAMES, max_size=2), NAMES),
    ),
    st.builds(Greet),
    st.builds(Publish, ADDRESSES, st.just({}), st.booleans()),
    st.builds(Confirm, RANKS, NAMES),
    st.builds(GiveUp, NAMES),
    st.builds(AskMissing),
    st.builds(Know, NUMBERS),
    st.builds(Verdict, NAMES, NUMBERS, st.booleans()),
    st.builds(Retire),
    st.builds(Leave, st.booleans()),
    st.builds(Exit, RANKS),
)


class Anything:
    """Connections that take whatever the directory sends."""

    def send(self, connections: Iterable[int], message: ToWorker) -> None:
        """Encode it, as the server does."""
        encode(message)

    def close_connection(self, connection: int) -> None:
        pass

    def call_later(self, seconds: float, step: Callable[[], None]) -> None:
        pass

    def record(self, step: Callable[[], None]) -> None:
        step()


@given(st.lists(st.tuples(st.integers(0, 4), MESSAGES | st.none()), max_size=30))
def test_any_messages(messages: list[tuple[int, FromWorker | None]]) -> None:
    """Raise ValueError at most, after which the server closes that connection; None is its end."""
    directory = Directory(Anything())
    for connection, message in messages:
        try:
            if message is None:
                directory.gone(connection)
            else:
                directory.receive(connection, message)
        except ValueError:
            directory.gone(connection)
