"""The soak of workers that join and leave: a short run, and what makes it fail."""

import argparse
import asyncio

import pytest

from benchmarks import membership_soak as soak
from benchmarks.membership_soak import Sample

AT_REST = Sample(
    memory=300_000_000, objects=900_000, descriptors=40, threads=30, tasks=4, in_flight=1
)


@pytest.mark.promise("joining.flat")
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All is well: no call ends otherwise than documented, and no socket is left."""
    found = asyncio.run(soak.main(argparse.Namespace(quick=True, joins=4, at_once=4)))
    printed = capsys.readouterr().out
    assert found == [], printed
    assert "4 workers have joined and left" in printed
    assert "WorkerLeft" in printed


@pytest.mark.parametrize("name", ["descriptors", "threads", "tasks"])
def test_what_is_left(name: str) -> None:
    """A few may come and go; one of each worker is too many."""
    more, many = (
        AT_REST._replace(**{name: getattr(AT_REST, name) + count})
        for count in (soak.SPARE, soak.SPARE + 1)
    )
    before = [AT_REST, AT_REST]
    assert not [*soak.left(before, [more, more], 5)]
    assert [*soak.left(before, [AT_REST, many], 5)] == [f"stays: {soak.SPARE + 1} {name} are left"]


def test_memory_that_grows() -> None:
    """With each worker, more than torch keeps; after few workers nothing is concluded."""
    joins = soak.ENOUGH
    grown = AT_REST._replace(
        memory=AT_REST.memory + int(1.1e3 * soak.KILOBYTES * joins),
        objects=AT_REST.objects + int(1.1 * soak.OBJECTS * joins),
    )
    before, after = [AT_REST, AT_REST], [grown, AT_REST]
    assert not [*soak.left(before, after, joins - 1)]
    found = [*soak.left(before, after, joins)]
    assert [text.partition(":")[0] for text in found] == ["main", "main"]
    assert "kB of memory are left of each worker" in found[0]
    assert "objects are left of each worker" in found[1]
