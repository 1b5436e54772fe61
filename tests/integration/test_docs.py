"""The programs in the documentation, run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.example_programs import ROOT, free_port
from tests.support.pages import blocks, pages, run_together, saved

STEPS = pages("docs/tutorial")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("docs/index.md", "docs/groups.md")),
    ],
)
def test_program_runs(page: str, tmp_path: Path) -> None:
    """A whole program in a page runs, says something, and warns of nothing."""
    programs = [code for _, code in blocks(page, "python") if "__main__" in code]
    assert len(programs) == 1
    path = tmp_path / "program.py"
    path.write_text(programs[0])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    # A busy machine may take so long to start that it says for whom it waits.
    said = [line for line in done.stderr.splitlines() if "waits for rank" not in line]
    assert (done.returncode, said) == (0, [])
    assert done.stdout
    assert [text for _, text in blocks(page, "text")] in ([], [done.stdout])


@pytest.mark.slow
@pytest.mark.parametrize("page", STEPS)
def test_a_step_of_the_tutorial(page: str, tmp_path: Path) -> None:
    """A reader saves its file, runs its commands at once, and sees the texts in their order."""
    port = str(free_port())  # another test may listen at the one in the page
    commands = [[word.replace("29500", port) for word in line] for line in saved(page, tmp_path)]
    assert run_together(commands, tmp_path) == [text for _, text in blocks(page, "text")]


@pytest.mark.slow
@pytest.mark.promise("testing.page")
def test_the_tests_in_the_page_on_testing(tmp_path: Path) -> None:
    """Its blocks are files of one folder, named in their first lines; pytest runs them."""
    files = blocks("docs/testing.md", "python", "toml")
    assert len(files) == (ROOT / "docs/testing.md").read_text().count("```") // 2
    for block in files:
        assert block.file
        (tmp_path / block.file).write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-p", "pytest_aiorpc_torch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    tests = sum(text.count("def test_") for _, text in files)
    assert done.returncode == 0, done.stdout
    assert f"{tests} passed" in done.stdout
