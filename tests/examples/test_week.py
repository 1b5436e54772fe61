"""A run that outlives its processes: the program of `examples/week.py` under supervisors."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

from examples.week import ROLES
from tests.cluster.programs import Running, environment
from tests.support.example_programs import killed

LOOP = 'until "$@"; do sleep 0.1; done'
ENTERED = r'\{"role": "(\w+)", "pid": (\d+), "restarts": \d+\}'
HOLDS = r'\{"holds": (\d+)\}'
RECOVERED = r'\{"recovered": (\d+), "steps": \d+\}'
LEARNT = r'\{"version": (\d+), "steps": (\d+), .*\}'

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[dict[str, Running]]:
    """Start each role in a loop of a shell."""
    with contextlib.ExitStack() as stack:
        roles = dict[str, Running]()
        for role in ROLES:
            program = ["python", "-m", "examples.week", role, "--place", f"file://{folder}/week"]
            command = ["sh", "-c", LOOP, "sh", *program, "--watchdog", "60", *words]
            running = Running(command, cwd=folder, env=environment())
            roles[role] = stack.enter_context(running)
        yield roles


def pid(role: Running) -> int:
    """Return the last process of a role that has entered the world."""
    return int(role.matching(ENTERED)[-1][2])


def newest_held(*roles: Running) -> int:
    """Return the newest version that one of these roles has told of."""
    return max(int(each[1]) for role in roles for each in role.matching(HOLDS))


@pytest.mark.promise("training.recover", "training.replaced", "succession.takeover")
def test_learner_and_rank_0_are_killed(tmp_path: Path) -> None:
    """The learner first, then both at the same time; each time it goes on with what others hold."""
    with started(tmp_path, "--steps", "1000000000") as roles:
        learner, keeper = roles["learner"], roles["keeper"]
        keeper.wait_for(HOLDS, 5)
        for round_, victims in enumerate(([learner], [keeper, learner]), 2):
            held = newest_held(*(each for each in roles.values() if each not in victims))
            for process in [pid(each) for each in victims]:
                killed(process)
            recovered = int(learner.wait_for(RECOVERED, round_)[-1][1])
            assert recovered >= held
            learner.wait_for(LEARNT, len(learner.matching(LEARNT)) + 5)
            versions = [int(each[1]) for each in learner.matching(LEARNT)]
            assert versions[-1] > recovered
        keeper.wait_for(ENTERED, 2)
        keeper.wait_for(HOLDS, len(keeper.matching(HOLDS)) + 2)
        assert len({pid(each) for each in roles.values()}) == len(ROLES)


@pytest.mark.promise("training.handed_over")
def test_a_learner_that_is_drained(tmp_path: Path) -> None:
    """SIGTERM: it leaves, and its next process goes on; all others follow that."""
    with started(tmp_path, "--steps", "1000000000", "--supervise") as roles:
        learner = roles["learner"]
        roles["keeper"].wait_for(HOLDS, 5)
        held = newest_held(roles["keeper"])
        os.kill(pid(learner), signal.SIGTERM)
        learner.wait_for(r'\{"left": "learner"\}')
        assert int(learner.wait_for(RECOVERED, 2)[-1][1]) >= held
        for each in ("keeper", "replay", "evaluator"):
            roles[each].wait_for(HOLDS, len(roles[each].matching(HOLDS)) + 2)


def test_the_run_ends_in_order(tmp_path: Path) -> None:
    """When all steps are made, each process ends well, and its supervisor too."""
    with started(tmp_path, "--steps", "20000") as roles:
        for role in roles.values():
            assert role.end() == 0, role.lines
            assert len(role.matching(ENTERED)) == 1
        last = roles["learner"].matching(LEARNT)[-1]
        assert int(last[2]) >= 20_000
        assert newest_held(roles["keeper"]) == int(last[1])
        assert not [line for each in roles.values() for line in each.lines if "Traceback" in line]


SUPERVISOR = """\
import os, sys, time
from examples import week

def run(given):
    print("runs", os.getpid(), flush=True)
    time.sleep(600)

week.start(run, week.parse("learner", "--place", "", "--supervise", "--lock", sys.argv[1]))
"""


def test_a_supervisor_in_reserve(tmp_path: Path) -> None:
    """It starts the role once the processes of the other one are killed."""
    command = ["python", "-c", SUPERVISOR, str(tmp_path / "lock")]
    with (
        Running(command, cwd=tmp_path, env=environment()) as first,
        Running(command, cwd=tmp_path, env=environment()) as second,
    ):
        while not (first.lines or second.lines):
            time.sleep(0.01)
        works, waits = (first, second) if first.lines else (second, first)
        works.wait_for(r"runs \d+")
        assert not waits.lines
        works.close()
        waits.wait_for(r"runs \d+")
