"""The peers with which a worker connects at the start."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._world.startup import ALL_TO_ALL, peers_to_reach


def reached(size: int) -> dict[int, list[int]]:
    """Return for each rank of a world the ranks with which it connects."""
    members = [PeerInfo(f"w{rank}", rank, rank, "") for rank in range(size)]
    return {rank: [each.rank for each in peers_to_reach(members, rank)] for rank in range(size)}


@pytest.mark.promise("worlds.reach")
@given(st.integers(1, ALL_TO_ALL))
def test_in_a_small_world_each_reaches_each(size: int) -> None:
    for rank, found in reached(size).items():
        assert found == [other for other in range(size) if other != rank]


@pytest.mark.promise("worlds.reach")
@given(st.integers(ALL_TO_ALL + 1, 600))
def test_in_a_large_world_some_reach_each(size: int) -> None:
    """Each worker is reached by log2(N) others, and none by itself; the pairs connect all."""
    found = reached(size)
    count = math.ceil(math.log2(size))
    reaching = {rank: [each for each in found if rank in found[each]] for rank in found}
    for rank in found:
        assert rank not in found[rank]
        assert len({*found[rank]}) == len(found[rank]) == len(reaching[rank]) == count
    known, added = {0}, {0}
    while added:
        added = {other for rank in added for other in [*found[rank], *reaching[rank]]} - known
        known |= added
    assert known == {*range(size)}


@pytest.mark.promise("worlds.reach")
@given(st.integers(1, 64), st.integers(2, 40))
def test_each_worker_is_reached_from_several_hosts(workers: int, hosts: int) -> None:
    """One of another host is among them, so an address that only its own host reaches is found."""
    size = workers * hosts
    if size > ALL_TO_ALL:
        pairs = itertools.chain.from_iterable(
            [(rank // workers, other) for other in found] for rank, found in reached(size).items()
        )
        others: dict[int, set[int]] = {rank: set() for rank in range(size)}
        for host, other in pairs:
            others[other] |= {host} - {other // workers}
        assert min(map(len, others.values())) >= math.floor(math.log2(hosts))


def test_members_whose_ranks_have_gaps() -> None:
    """Places count, not ranks."""
    members = [PeerInfo(f"w{rank}", rank, rank, "") for rank in range(0, 128, 2)]
    found = peers_to_reach(members, 2 * (len(members) - 1))
    assert [each.rank // 2 for each in found] == [0, 1, 3, 7, 15, 31]
