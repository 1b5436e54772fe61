"""Histograms that threads record in without locks."""

import threading

import pytest

from aiorpc_torch.observe.recorder import OTHER, Counts, Histogram, NameLimit


def test_values_are_counted_in_buckets() -> None:
    """A bound belongs to its bucket; what is above all bounds is in the last one."""
    histogram = Histogram((1, 2))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.record(("a",), value)
    histogram.record(("b",), 2.0)
    assert histogram.collect() == {
        ("a",): Counts([2, 1, 1], [6.0]),
        ("b",): Counts([0, 1, 0], [2.0]),
    }


def test_threads_are_added_up() -> None:
    """Those that have ended keep what they have counted, once."""
    histogram = Histogram((1,))

    def record() -> None:
        for _ in range(1000):
            histogram.record("a", 1.0)

    for _ in range(2):
        threads = [threading.Thread(target=record) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        record()
        histogram.collect()
    assert histogram.collect() == {"a": Counts([10_000, 0], [10_000.0])}
    assert len(histogram._tables) == 1, "those of threads that have ended are kept as one"


def test_a_thread_that_ends_while_it_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has counted is kept, whenever it is found to have ended."""
    histogram = Histogram((1,))
    histogram.record("a", 1.0)
    alive = iter([True])
    monkeypatch.setattr(threading.Thread, "is_alive", lambda _: next(alive, False))
    for _ in range(2):
        assert histogram.collect() == {"a": Counts([1, 0], [1.0])}


def test_names_are_bounded() -> None:
    """The first ones are kept, further ones are one name."""
    limit = NameLimit(2)
    assert [limit(name) for name in "abcab"] == ["a", "b", OTHER, "a", "b"]
