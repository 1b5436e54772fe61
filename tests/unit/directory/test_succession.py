"""Directories that take each other's place: whatever dies, freezes or is cut off at any step."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._directory.directory_messages import (
    Add,
    Ask,
    Ended,
    Entering,
    Failed,
    Leave,
    Members,
    Moved,
    Recall,
    Resume,
    Retire,
)
from tests.support.directories import Host, Network, Process, registration

from .test_next_directories import take_over, world


@pytest.mark.promise("succession.replacement")
def test_a_survivor_that_lies_does_not_keep_the_next_from_being_asked() -> None:
    """The world that the second one tells goes on."""
    for lie in ("key", "numbers"):
        network, [first, second, third] = world()
        for each in (second, third):
            each.cut()
        first.end()
        back = network.new_process(registration(0, pid=99))
        network.claim(back)
        network.connect(back)
        if lie == "key":
            second.key = "another"
        second.resume()
        third.resume()
        if lie == "numbers":
            second.knowledge.entries = -1
        with pytest.raises(ValueError, match="world"):
            second.deliver()
        second.cut()
        network.settle()
        assert Recall() in third.heard
        for step in [*network.expiring]:
            step()
        network.settle()
        assert back.has_entered, lie


@pytest.mark.promise("joining.names")
def test_a_member_leaves_before_the_answer_whether_it_is_alive() -> None:
    """Its name is free, as for one that comes a moment later."""
    network, [first, _, third] = world()
    back = network.register(registration(2, pid=99))
    assert Ask("w2", third.number) in first.inbox
    third.retire()
    third.say(Leave(True))
    network.settle()
    assert back.has_entered


@pytest.mark.promise("joining.cut")
def test_the_first_member_that_connects_again_is_asked_for_a_name() -> None:
    """While none is connected none is asked, and the holder of the name may be alive."""
    network, processes = world()
    for each in processes:
        each.cut()
    back = network.register(registration(2, pid=99))
    processes[0].resume()
    network.settle()
    assert isinstance(back.last, Failed)
    assert "the first one is alive" in back.last.text


@pytest.mark.promise("succession.numbers")
def test_a_member_tells_of_a_process_that_has_entered_while_its_name_is_claimed() -> None:
    """The answer of one that has not heard of that is of the process before."""
    network, [first, second, third, fourth] = world(4)
    third.end()
    fourth.is_frozen = True
    back = network.register(registration(2, 4, pid=99))
    network.settle()
    assert second.view["w2"] == back.number
    first.end()
    fourth.is_frozen = False
    take_over(network, fourth)
    for step in [*network.expiring]:
        step()
    other = network.register(registration(2, 4, pid=98))
    assert Ask("w2", third.number) in fourth.inbox
    second.resume()
    second.deliver()
    network.settle()
    assert isinstance(other.last, Failed)
    assert "the first one is alive" in other.last.text
    back.resume()
    network.settle()
    assert back.has_entered


@pytest.mark.promise("succession.takeover")
@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_member_tells_of_another_one_while_a_process_enters(
    is_published: bool, is_announced: bool
) -> None:
    """Both know each other in the end, and nobody is told of itself."""
    network, [first, second, third] = world()
    third.is_frozen = True
    back = network.join("a")
    network.settle()
    assert second.view["a"] == back.number
    if is_announced:  # though one does not answer
        for step in [*network.expiring]:
            step()
        network.settle()
    assert back.has_entered == is_announced
    first.end()
    third.is_frozen = False
    take_over(network, third)
    for step in [*network.expiring]:
        step()
    third.inbox.clear()
    joined = network.join("b")
    second.resume()
    if is_published:
        joined.deliver()
    assert second.inbox[0] == Recall()
    second.deliver()
    back.resume()
    network.settle()
    assert joined.has_entered
    assert back.has_entered
    members = (second, third, back, joined)
    assert all({*each.view.values()} >= {other.number for other in members} for each in members)
    assert not any(isinstance(each, Add) and each.member.name == "b" for each in joined.heard)


def test_an_entry_that_no_directory_has_begun() -> None:
    """It moves no ranks of those that enter later."""
    network, [_, second, _] = world()
    host = take_over(network, second)
    network.settle()
    for rank, size in ((1 << 40, 3), (1 << 40, 1 << 40), (-1, 3)):
        own = registration(rank, size, name="evil", joined=True, entry=1)
        stranger = network.new_process(own)
        stranger.host, stranger.connection = host, host.next_connection(stranger)
        stranger.say(Resume(own, 3, "key", 1, True, second.knowledge.world))
        assert stranger.inbox == [Ended()]
    for step in [*network.expiring]:
        step()
    joined = network.join("a")
    network.settle()
    assert joined.own.rank == 3


@pytest.mark.promise("succession.takeover")
def test_a_member_takes_the_directory_over() -> None:
    """The others are told who keeps it, and not again who is there. Ranks and ids go on."""
    network, [first, second, third] = world()
    joined = network.join("a")
    network.settle()
    first.end()
    for each in (second, third, joined):
        each.cut()
    take_over(network, second)
    waiting = network.join("b")
    assert not waiting.inbox, "the others are not here yet"
    third.resume()
    joined.resume()
    network.settle()
    assert [each.coordinator for each in (second, third, joined, waiting)] == ["w1"] * 4
    assert Moved("w1") in third.heard
    assert sum(isinstance(each, Members) for each in third.heard) == 1, "of the start"
    assert (waiting.own.rank, waiting.number) == (4, 4)
    assert second.view == third.view == joined.view == waiting.view
    assert first.number in second.gone


@pytest.mark.promise("succession.takeover")
@pytest.mark.parametrize("is_open", [False, True])
def test_a_member_leaves_before_all_are_at_the_next_directory(is_open: bool) -> None:
    """Those that connect after it hear of it, though its connection may end even later."""
    network, [first, second, third, fourth] = world(4)
    first.end()
    for each in (second, third, fourth):
        each.cut()
    take_over(network, second)
    third.resume()
    network.settle()
    third.say(Retire())
    third.say(Leave(True))
    if not is_open:
        third.end()
    fourth.resume()
    network.settle()
    assert fourth.coordinator == "w1"
    assert third.number in fourth.left
    joined = network.join("w2")
    network.settle()
    assert joined.has_entered


@pytest.mark.promise("succession.replacement")
def test_a_replacement_process_of_rank_0_takes_it_up() -> None:
    """It starts as that of a new world, and learns of the running one from the first member."""
    network, [first, second, third] = world()
    first.end()
    second.cut()
    third.cut()
    back = network.new_process(registration(0, pid=99))
    host = network.claim(back)
    network.connect(back)
    other = network.register(registration(1, pid=98))
    assert not back.inbox, "a new world needs all ranks"
    third.resume()
    network.settle()
    assert not back.has_entered, "the second may be alive"
    second.resume()
    network.settle()
    assert back.has_entered
    assert host.directory.is_needed
    assert (back.own.rank, back.number, back.own.restarts) == (0, 3, 1)
    assert isinstance(other.last, Failed)
    assert "the first one is alive" in other.last.text
    assert [each.coordinator for each in (back, second, third)] == ["w0"] * 3


@pytest.mark.promise("joining.names", "succession.replacement")
@pytest.mark.parametrize("has_left", [False, True])
def test_a_process_that_joins_gets_no_name_of_rank_0(has_left: bool) -> None:
    """Though it waits already as rank 0's replacement process comes, which would be refused."""
    network, [first, second, third] = world()
    if has_left:
        first.depart()
        network.settle()
    for each in (second, third):
        each.cut()
    first.end()
    back = network.new_process(registration(0, pid=99))
    network.claim(back)
    wrong = network.join("w0", version="1.0")
    network.connect(back)
    for each in (second, third):
        each.resume()
    network.settle()
    assert isinstance(wrong.last, Failed)
    assert "cannot join: that name is of rank 0" in wrong.last.text
    assert back.has_entered


@pytest.mark.promise("succession.never_two")
def test_a_member_of_a_world_that_has_ended() -> None:
    """It is none of the next world, though all numbers agree."""
    network, first = world()
    joined = network.join("a")
    entering = network.join("b")
    network.settle()
    entering.has_entered = False
    for each in first:
        each.end()
    joined.cut()
    entering.cut()
    fresh = [network.new_process(registration(rank)) for rank in range(3)]
    network.claim(fresh[0])
    for each in fresh:
        network.connect(each)
    network.settle()
    joined.resume()
    entering.resume()
    network.settle()
    assert joined.is_over
    assert isinstance(entering.last, Failed)
    assert all(each.view.keys() == {"w0", "w1", "w2"} for each in fresh)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["deliver"] * 6
            + ["join", "back", "end", "end keeper", "retire", "depart", "expire", "freeze", "thaw"]
            + ["cut", "resume", "resume", "claim", "claim", "slow", "write", "write", "candidate"]
        ),
        st.integers(0, 30),
    ),
    max_size=60,
)


def one_of(found: "list[Process]", number: int) -> "Process | None":
    return found[number % len(found)] if found else None


def is_open(network: Network) -> bool:
    keeper = network.host.keeper
    return not network.host.is_closed and (keeper is None or keeper.is_alive)


def come(network: Network, process: Process) -> None:
    """Let a process that has no connection get one, if there is a directory."""
    if is_open(network) and not network.host.is_frozen:
        if process.number >= 0 or process.has_entered:
            process.resume()
        else:
            network.connect(process)


def take(network: Network, step: str, number: int) -> None:
    """Take one step of a history."""
    running = [each for each in network.processes if each.is_alive and not each.is_frozen]
    members = [each for each in running if each.has_entered and not each.is_over]
    chosen, member = one_of(running, number), one_of(members, number)
    cut_off = [each for each in running if each.is_cut and not each.is_over]
    match step:
        case "join":
            come(
                network,
                network.new_process(registration(-1, -1, name="abw"[number % 3], joined=True)),
            )
        case "back":
            come(network, network.new_process(registration(1 + number % 2)))
        case "candidate" if not is_open(network):
            process = network.new_process(registration(0, pid=200 + number))
            network.claim(process)
            network.connect(process)
        case "deliver":
            if busy := network.busy():
                busy[number % len(busy)].deliver()
        case "end" if chosen is not None:
            chosen.end()
        case "end keeper" if network.host.keeper is not None:
            network.host.keeper.end()
        case "retire" if member is not None and not member.is_cut:
            member.retire()
        case "depart" if member is not None and member.own.joined and not member.is_cut:
            member.depart()
        case "expire":
            hosts = [each for each in network.hosts if each.expiring and not each.is_frozen]
            if hosts:
                host = hosts[number % len(hosts)]
                host.do(host.expiring.pop(number % len(host.expiring)))
        case "freeze" if chosen is not None:
            chosen.is_frozen = True
        case "thaw":
            thaw(network)
        case "cut" if member is not None:
            member.cut()
        case "resume" if (process := one_of(cut_off, number)) is not None:
            come(network, process)
        case "claim":
            keepers = [each for each in cut_off if each in members and not each.is_retiring]
            if (keeper := one_of(keepers, number)) is not None:
                take_over(network, keeper)
        case "slow":
            network.host.is_slow = True
        case "write":
            write(network, number)


def write(network: Network, number: int) -> None:
    hosts = [each for each in network.hosts if each.writing and not each.is_frozen]
    if hosts:
        host = hosts[number % len(hosts)]
        if host.is_closed:
            host.writing.clear()
        else:
            host.write()


def thaw(network: Network) -> None:
    for each in network.processes:
        each.is_frozen = False
    for host in network.hosts:
        host.thaw()


def heal(network: Network) -> None:
    """Let all that can go on go on, as it would in some seconds."""
    thaw(network)
    for _ in range(8):
        for host in network.hosts:
            host.is_slow = False
            while host.writing:
                write_all(host)
            if host is not network.host:
                host.close()  # it does not renew its claim
        living = [each for each in network.processes if each.is_alive and not each.is_over]
        if not is_open(network):
            members = [each for each in living if each.has_entered and not each.is_retiring]
            if not members:
                return
            take_over(network, min(members, key=lambda each: each.own.rank))
        for each in living:
            if each.is_cut:
                come(network, each)
        network.settle()
        for step in [*network.host.expiring]:
            network.host.expiring.remove(step)
            step()
        network.settle()
        for each in living:
            if each.heard and isinstance(each.heard[-1], Ended) and not each.has_entered:
                each.cut()  # it tries again


def write_all(host: Host) -> None:
    if host.is_closed:
        host.writing.clear()
    else:
        host.write()


@pytest.mark.promise("succession.never_two")
@given(STEPS)
def test_all_end_with_one_view_and_one_directory(steps: list[tuple[str, int]]) -> None:
    """Names, ranks and worker ids are given once."""
    network, _ = world()
    for step, number in steps:
        take(network, step, number)
    heal(network)
    entered = [each for each in network.processes if each.has_entered]
    assert len({each.number for each in entered}) == len(entered)
    joined = [each for each in entered if each.own.joined]
    assert len({each.own.rank for each in joined}) == len(joined)
    living = [each for each in entered if each.is_alive and not each.is_over]
    assert len({each.own.name for each in living}) == len(living)
    if all(each.is_retiring for each in living):
        return  # none will take the directory over
    keeper = network.host.keeper
    assert keeper is not None
    departed = {each.number for each in network.processes if each.has_left}
    views = [{(name, n) for name, n in each.view.items() if n not in departed} for each in living]
    numbers = {each.number for each in living}
    for each, view in zip(living, views, strict=True):
        assert numbers <= {n for _, n in view}, (each, view, numbers)
        assert each.coordinator == keeper.own.name
    for each in network.processes:  # none waits without end
        assert each.has_entered or not each.is_alive or isinstance(each.last, Failed | Entering), (
            each
        )
