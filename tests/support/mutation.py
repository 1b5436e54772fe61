"""Mutation of the state machines and codecs: `python -m tests.support.mutation [PATTERN ...]`.

mutmut changes one expression at a time and runs the unit tests of its module. A mutant that no test
notices is a survivor, and is printed. tests/README.md judges those that are known. The patterns
select mutants by name; the default is a fixed sample of an eighth.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = ROOT / "mutants"

SAMPLE = ("*_mutmut_*3",)
"""Names of mutants end in their number within their function."""

LEAST_KILLED = 0.9
"""Share of the mutants that tests must notice."""


def mutmut(*arguments: str) -> str:
    """Run mutmut in the repository; return what it prints."""
    settings = {"HYPOTHESIS_PROFILE": "mutation", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"mutmut {arguments[0]} failed\n{done.stdout[-3000:]}")
    return done.stdout


def counts() -> Mapping[str, int]:
    """Return the number of mutants of each outcome."""
    mutmut("export-cicd-stats")
    found: Mapping[str, int] = json.loads((MUTANTS / "mutmut-cicd-stats.json").read_text())
    return found


def survivors() -> list[str]:
    """Return the names of the mutants that no test noticed."""
    pairs = (line.strip().rpartition(": ") for line in mutmut("results").splitlines())
    return [name for name, _, state in pairs if state in ("survived", "no tests")]


def changes(name: str) -> str:
    """Return the lines that a mutant changes."""
    lines = mutmut("show", name).splitlines()
    return "\n".join(line for line in lines if line.startswith(("- ", "+ ", "-  ", "+  ")))


def main(patterns: list[str]) -> int:
    shutil.rmtree(MUTANTS, ignore_errors=True)
    mutmut("run", *(patterns or SAMPLE))
    for name in survivors():
        print(name, changes(name), "", sep="\n")
    found = counts()
    killed = found["killed"] + found["timeout"] + found["segfault"]
    missed = found["survived"] + found["no_tests"]
    share = killed / (killed + missed)
    print(f"{killed} of {killed + missed} mutants killed: {share:.1%}, at least {LEAST_KILLED:.0%}")
    return 0 if share >= LEAST_KILLED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
