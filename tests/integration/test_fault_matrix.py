"""A few cells of `python -m benchmarks.faults`, so that the matrix stays what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks._faults_cell import FAULTS, KILL, PENDING, STATES, Verdict, makes_no_sense

ROOT = Path(__file__).parents[2]


def play(*words: str) -> "subprocess.CompletedProcess[str]":
    """Play the cells of these faults and states, as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--only", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.promise("lost.every_fault")
@pytest.mark.slow
def test_a_worker_that_is_cut_off_as_it_leaves() -> None:
    """It does not wait for rank 0, which it has lost, beyond its `stop_timeout`."""
    assert "1 cells in" in play("cut link", "stopping").stdout


@pytest.mark.promise("lost.every_fault")
@pytest.mark.slow
def test_some_cells() -> None:
    """As a user runs them: who is told, that the others go on, and how every process ends."""
    words = ["kill -9", "exception", "hang in an async def"]
    done = play(*words, "pending call", "starting", "stopping")
    assert len(re.findall(r"^.* × .*: OK ", done.stdout, re.MULTILINE)) == 8, done.stdout
    assert "8 cells in" in done.stdout
    assert "0 failed" in done.stdout


@pytest.mark.promise("lost.every_fault", "succession.takeover")
@pytest.mark.slow
def test_some_cells_of_rank_0() -> None:
    """Another process enters without it."""
    words = ["kill -9 of rank 0", "SIGSTOP of rank 0", "leave of rank 0"]
    done = play(*words, "pending call", "stopping")
    assert "6 cells in" in done.stdout
    assert "0 failed" in done.stdout


@pytest.mark.slow
def test_a_cell_that_does_not_end_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process is ended, and what it wrote so far is shown."""
    hangs = f"""
import os, sys, time
from benchmarks import faults
def play(fault, state, folder):
    (folder / "a.err").write_text("the last words")
    time.sleep(600)
faults.play, faults.LIMIT = play, 0.3
sys.argv = ["faults", "--only", "kill -9", "idle", "--markdown", {str(tmp_path / "page.md")!r}]
sys.exit(faults.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", hangs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "it did not end within 0.3 s" in done.stdout
    assert "the last words" in done.stdout
    assert not (tmp_path / "page.md").exists()


@pytest.mark.promise("lost.every_fault")
def test_the_page_has_every_cell() -> None:
    """The table that was put there, a row for each fault and what it means below."""
    page = (ROOT / "docs" / "faults.md").read_text()
    text = page.partition("<!-- faults -->")[2].partition("<!-- end -->")[0]
    head, _, *rows = [re.split(r" *\| *", line)[1:-1] for line in text.strip().splitlines()]
    assert head == ["", *STATES]
    assert [row[0] for row in rows] == [fault.name for fault in FAULTS]
    for fault, (_, *cells) in zip(FAULTS, rows, strict=True):
        assert f"\n| {fault.name} | " in page.partition("<!-- end -->")[2], fault.name
        for state, cell in zip(STATES, cells, strict=True):
            assert (cell == "–") == bool(makes_no_sense(fault, state)), (fault.name, state)


def test_the_table_says_what_failed() -> None:
    """And what was skipped; a page is made of what was seen."""
    found = {(KILL, PENDING): Verdict("WorkerLost", 0.12, 2.0, ["something"])}
    assert faults.table(found)[1][:3] == ["kill -9", "", "FAILED"]
    found = {(KILL, PENDING): Verdict(skipped="not here")}
    assert faults.table(found)[1][2] == "skipped"
    found = {(KILL, PENDING): Verdict("WorkerLost", 0.12, 2.0)}
    assert "| kill -9 | – | WorkerLost, 0.1 s |" in faults.markdown(found)
