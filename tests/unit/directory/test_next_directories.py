"""The next directory: who begins at it, goes on at it or waits for it."""

import pytest

from tests.support.directories import Host, Network, Process, registration, start


def world(size: int = 3) -> tuple[Network, list[Process]]:
    """Return a world that runs, whose directory is beside rank 0."""
    network, processes = start(size)
    network.host.keeper = processes[0]
    return network, processes


def take_over(network: Network, keeper: Process) -> Host:
    """Let a member keep the directory from now on, as far as it is concerned."""
    host = network.claim(keeper, keeper.known())
    keeper.resume()
    return host


@pytest.mark.promise("joining.cut")
def test_a_judge_that_connects_again_is_asked_again() -> None:
    """Its old connection may end later, and its answer was lost with it."""
    network, [first, *_, third] = world()
    third.end()
    back = network.register(registration(2, pid=99))
    old = first.connection
    first.inbox.clear()
    first.resume()
    network.settle()
    network.directory.gone(old)
    network.settle()
    assert back.has_entered


def test_a_new_world_starts_where_no_member_comes() -> None:
    network, processes = world(2)
    for each in processes:
        each.end()
    fresh = [network.new_process(registration(rank, 2)) for rank in range(2)]
    network.claim(fresh[0])
    for each in fresh:
        network.connect(each)
    network.settle()
    assert all(each.has_entered for each in fresh)
    assert [each.number for each in fresh] == [0, 1]


def test_a_rank_0_that_starts_alone_waits_for_members_of_a_running_world() -> None:
    """For its grace: then it starts a new one."""
    network, [only] = world(1)
    joined = network.join("a")
    network.settle()
    only.end()
    for is_late in (False, True):
        back = network.new_process(registration(0, 1))
        host = network.claim(back, grace=1.0)
        network.connect(back)
        assert not back.inbox
        joined.cut()
        if is_late:
            host.expiring.pop(0)()
        joined.resume()
        network.settle()
        assert back.has_entered
        assert (joined.coordinator, joined.is_over) == ("w0", is_late)
        back.end()


@pytest.mark.promise("succession.numbers")
def test_an_entry_goes_on_at_the_next_directory() -> None:
    """Whatever its step, with the numbers that it was given."""
    for steps in range(4):
        network, [first, second, third] = world()
        joining = network.join("a")
        for _ in range(steps):  # one message of each
            for each in network.busy():
                each.deliver()
        first.end()
        for each in (second, third, joining):
            each.cut()
        take_over(network, second)
        third.resume()
        if joining.number >= 0:
            joining.resume()
        else:
            network.connect(joining)
        network.settle()
        assert joining.has_entered, steps
        number = 3 if steps else 4  # it had not heard of the first
        assert (joining.own.rank, joining.number) == (number, number)
        expected = {"w0": 0, "w1": 1, "w2": 2, "a": number}
        assert second.view == third.view == joining.view == expected


@pytest.mark.promise("succession.never_two")
def test_a_directory_that_has_lost_its_place_admits_nobody() -> None:
    """It ends when it writes the next numbers; the process enters at the other one."""
    network, [first, second, third] = world()
    old = network.host
    old.is_slow = True
    joining = network.join("a")
    second.cut()
    take_over(network, second)
    old.write()
    assert old.is_closed
    assert joining.heard == []
    for each in (first, third):
        each.resume()
    network.connect(joining)
    network.settle()
    assert joining.has_entered
    assert first.coordinator == "w1"


@pytest.mark.promise("succession.frozen")
def test_a_frozen_keeper_is_a_worker_like_any_other() -> None:
    """Its process was replaced meanwhile, or was not."""
    for is_replaced in (False, True):
        network, [first, second, third] = world()
        old, first.is_frozen = network.host, True
        second.cut()
        take_over(network, second)
        third.cut()
        third.resume()
        if is_replaced:
            back = network.register(registration(0, pid=99))
        network.settle()
        first.is_frozen = False
        old.thaw()
        old.close()
        first.resume()
        network.settle()
        assert first.is_over is is_replaced
        assert not is_replaced or back.has_entered
