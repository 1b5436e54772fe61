"""The soak of shared memory: a short run, and what makes it fail."""

import argparse
import asyncio
from collections import deque

import pytest
import torch

from benchmarks import shared_memory_soak as soak
from benchmarks._shared_memory_shelf import KEPT, Client, Kept, Wrong, check, keep
from benchmarks.shared_memory_soak import SURVIVORS, WORKERS, Sample

AT_REST = Sample(
    memory=300 * soak.MB, descriptors=170, mapped=1, segments=0, segment_bytes=0, pending=1
)
SHORT = argparse.Namespace(quick=True, messages=400, kills=1, seed=0)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm up for less than a second, and rest for little longer than segments do."""
    monkeypatch.setattr(soak, "WARM_UP", 200)
    monkeypatch.setattr(soak, "REST", 8.0)


@pytest.mark.slow
def test_a_short_run(short: None, capsys: pytest.CaptureFixture[str]) -> None:
    """All is well, with a kill; the figures are printed."""
    assert asyncio.run(soak.main(SHORT)) == []
    printed = capsys.readouterr().out
    assert "1 kills" in printed
    assert all(f"\n{worker} " in printed for worker in WORKERS)


@pytest.mark.slow
def test_tensors_that_are_never_dropped(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their segments are found, at their senders and where they are mapped."""
    monkeypatch.setattr(Client, "drop", lambda self: None)
    found = "\n".join(asyncio.run(soak.main(SHORT)))
    assert "segments are left" in found
    assert "main: " in found
    assert "mapped are left" in found


@pytest.mark.parametrize("name", ["descriptors", "mapped", "segments", "segment_bytes", "pending"])
def test_what_is_left(name: str) -> None:
    """One more at the end, in a process that was there at the start, or fewer."""
    before = [AT_REST] * len(WORKERS)
    more = AT_REST._replace(**{name: getattr(AT_REST, name) + 1})
    assert not [*soak.left(before, before)]
    assert not [*soak.left([more] * len(WORKERS), before)]
    assert [*soak.left(before, [AT_REST, more, *before[2:]])] == [f"a: 1 {name} are left"]


@pytest.mark.parametrize(("size", "grows"), [(soak.GROWTH, False), (soak.GROWTH + soak.MB, True)])
def test_memory_that_grows(size: int, grows: bool) -> None:
    """In the second half, more than it may; in few rounds nothing is concluded."""
    grown = AT_REST._replace(memory=AT_REST.memory + size)
    rounds = [[AT_REST, AT_REST]] * soak.ENOUGH + [[AT_REST, grown]] * soak.ENOUGH
    assert [*soak.grown(rounds)] == ([f"{SURVIVORS[1]}: the second half added 5.0 MB"] * grows)
    assert not [*soak.grown(rounds[-3:])]


def test_tensors_that_torch_has_carried() -> None:
    """A run without shared memory proves nothing of it."""
    assert not [*soak.unshared(400, 1_000)]
    assert [*soak.unshared(10, 1_000)]


def test_wrong_tensors() -> None:
    """Of another length or number, or changed while they are kept."""
    with pytest.raises(Wrong):
        check(torch.full((10,), 3.0), 11, 3.0)
    with pytest.raises(Wrong):
        check(torch.full((10,), 3.0), 10, 4.0)
    kept: Kept = deque()
    for number in range(KEPT):
        keep(kept, torch.full((10,), float(number)), float(number))
    kept[1][0][5] = 7.0
    keep(kept, torch.zeros(1), 0.0)  # the first one is as it was
    with pytest.raises(Wrong, match="a kept tensor of 1"):
        keep(kept, torch.zeros(1), 0.0)
