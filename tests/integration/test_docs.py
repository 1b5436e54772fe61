"""The programs in the documentation, run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/groups.md"])
def test_program_runs(page: str, tmp_path: Path) -> None:
    """A whole program in a page runs, says something, and warns of nothing."""
    programs = [
        code
        for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        if "__main__" in code
    ]
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
    shown = re.search(r"```text\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert shown is None or done.stdout == shown[1]


@pytest.mark.promise("testing.page")
def test_the_tests_in_the_page_on_testing(tmp_path: Path) -> None:
    """Its blocks are files of one folder, named in their first lines; pytest runs them."""
    page = (ROOT / "docs" / "testing.md").read_text()
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```") // 2
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-p", "pytest_aiorpc_torch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    tests = sum(text.count("def test_") for _, text in blocks)
    assert done.returncode == 0, done.stdout
    assert f"{tests} passed" in done.stdout
