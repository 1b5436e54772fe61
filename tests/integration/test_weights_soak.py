"""The soak of weights: a short run, and what makes it fail."""

import argparse
import asyncio

import pytest

from benchmarks import weights_soak as soak
from benchmarks.weights_soak import SPARE, SURVIVORS, Follower, Sample

AT_REST = Sample(memory=300 * soak.MB, descriptors=170, mapped=5, tasks=4, pending=2)
SHORT = argparse.Namespace(quick=True, versions=90, rounds=3)


@pytest.mark.slow
@pytest.mark.promise("training.replaced", "training.relays", "training.whole")
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All is well with each kind of kill; the figures are printed."""
    assert asyncio.run(soak.main(SHORT)) == []
    printed = capsys.readouterr().out
    assert "90 versions, 3 kills" in printed
    assert all(f"\n{worker} " in printed for worker in SURVIVORS)


@pytest.mark.parametrize("name", [*SPARE])
def test_what_is_left(name: str) -> None:
    """More at the end than may come and go, or as much."""
    before = [AT_REST] * len(SURVIVORS)
    may_be, is_left = (
        AT_REST._replace(**{name: getattr(AT_REST, name) + SPARE[name] + more}) for more in (0, 1)
    )
    assert not [*soak.left(before, [AT_REST, may_be])]
    assert [*soak.left(before, [AT_REST, is_left])] == [f"stays: {SPARE[name] + 1} {name} are left"]


@pytest.mark.parametrize(("size", "grows"), [(soak.GROWTH, False), (soak.GROWTH + soak.MB, True)])
def test_memory_that_grows(size: int, grows: bool) -> None:
    """In the second half, more than it may; in few rounds nothing is concluded."""
    grown = AT_REST._replace(memory=AT_REST.memory + size)
    rounds = [[AT_REST, AT_REST]] * soak.ENOUGH + [[AT_REST, grown]] * soak.ENOUGH
    assert [*soak.grown(rounds)] == (["stays: the second half added 5.0 MB"] * grows)
    assert not [*soak.grown(rounds[-3:])]


class HalfPlaced(Follower):
    """A follower in whose model a version is half."""

    def __init__(self) -> None:
        super().__init__()
        self.state["layer3"].fill_(7.0)
        self.policy = argparse.Namespace(version=4)  # type: ignore[assignment]


async def test_a_version_that_is_not_whole() -> None:
    follower = HalfPlaced()
    await follower.reach(7)
    assert await follower.found() == ["version 4 is not whole: [-1.0, 7.0]"]
