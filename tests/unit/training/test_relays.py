"""The relays of hosts: one for each, and another once it is reported lost."""

from aiorpc_torch.training.relays import Hosts, own_host


def test_processes_of_one_host_have_one_name() -> None:
    assert own_host() == own_host()


def test_the_publishers_own_host_needs_no_relay() -> None:
    assert Hosts().relay_for(own_host(), "a", None) is None


def test_the_first_follower_of_a_host_is_its_relay_until_it_is_lost() -> None:
    hosts = Hosts()
    assert hosts.relay_for("x", "a", None) == "a"
    assert hosts.relay_for("x", "b", None) == "a"
    assert hosts.relay_for("y", "c", None) == "c"
    assert hosts.relay_for("x", "b", "a") == "b"
    assert hosts.relay_for("x", "d", "a") == "b"  # reported late
    assert hosts.relay_for("x", "d", "b") == "d"
