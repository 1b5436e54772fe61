"""Deadlines, timeouts and heartbeats do not read the wall clock, which an administrator may set."""

import re

import pytest

from tests.support.scripts import ROOT

WALL_CLOCK = re.compile(
    r"\btime\.(time|time_ns|localtime)\(|from time import.*\btime(_ns)?\b"
    r"|CLOCK_REALTIME|\bdatetime\.(now|utcnow)\("
)
READERS = {
    "_port/tls.py": "certificates expire by it",
    "observe/tracing.py": "spans are told by it",
}


@pytest.mark.promise("worlds.clock")
def test_who_reads_the_wall_clock() -> None:
    package = ROOT / "aiorpc_torch"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if WALL_CLOCK.search(path.read_text())
    }
    assert found == {*READERS}
