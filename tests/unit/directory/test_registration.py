"""torch's worker ids of the workers of a start."""

from hypothesis import given, strategies as st

from aiorpc_torch._directory.registration import Registration, assign_worker_ids


def registrations(before: list[int | None]) -> list[Registration]:
    """Return workers in rank order, given the worker ids of their processes."""
    size = len(before)
    return [
        Registration(f"w{rank}", rank, size, "1", worker_id=worker_id)
        for rank, worker_id in enumerate(before)
    ]


def test_in_a_first_world_they_are_the_ranks() -> None:
    assert assign_worker_ids(registrations([None] * 4)) == [0, 1, 2, 3]


def test_a_process_keeps_its_id() -> None:
    """A new process whose rank is taken gets the highest free id."""
    assert assign_worker_ids(registrations([1, None, None, 1])) == [1, 7, 2, 3]
    assert assign_worker_ids(registrations([3, None, 2, None])) == [3, 1, 2, 7]


@given(st.lists(st.none() | st.integers(0, 30), min_size=1, max_size=20))
def test_each_worker_has_an_id_of_its_own(before: list[int | None]) -> None:
    """The lowest rank of each id keeps it; a rank that no process has is its worker's id."""
    found = assign_worker_ids(registrations(before))
    assert len({*found}) == len(found)
    for rank, worker_id in enumerate(before):
        is_first = worker_id is not None and before.index(worker_id) == rank
        if is_first:
            assert found[rank] == worker_id
        elif rank not in before:
            assert found[rank] == rank
        else:
            assert found[rank] not in before
