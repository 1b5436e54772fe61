"""CartPole as a user runs it: the demo, its variants, Ctrl-C, and processes that die."""

import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

import psutil
import pytest
import torch

from tests.support.example_programs import END, ROOT, command, ranks, run, started, workers_of
from tests.support.slack import SLACK

pytest.importorskip("gymnasium")

from aiorpc_torch import call, testing
from examples.cartpole import new_team, train


@pytest.mark.slow
def test_cartpole() -> None:
    """It trains for as long as it is told, says so every round, and sums up."""
    said = run("cartpole", "--seconds", "3").splitlines()
    assert said[0] == "2 observers play 16 environments each"
    assert re.match(r"round 1: \d+ episodes, mean reward [\d.]+; [\d,]+ agent steps/s", said[1])
    calls = re.match(r"Agent.select: ([\d,]+) calls in ([\d,]+) batches", said[-2])
    assert calls is not None, said
    items, batches = (int(each.replace(",", "")) for each in calls.groups())
    assert items > 2 * batches
    assert said[-1].startswith("reward, first ten episodes: ")


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.3, 3.5, 8.0])
def test_cartpole_interrupted(after: float) -> None:
    """Ctrl-C at any time, also while it imports and starts: two seconds, no traceback."""
    with subprocess.Popen(
        [sys.executable, "-m", "examples.cartpole", "--seconds", "40"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        time.sleep(after)  # "at any time" is what is tested, so no event decides it
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=500)
        assert time.monotonic() - start < 2.0 + SLACK
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in errors


# ── the same training, whatever is batched and whoever plays ────────────────────────────────────


async def trained(names: Sequence[str], environments: int, method: str) -> torch.Tensor:
    """The parameters after two rounds of that many environments in each process."""
    options = Namespace(seed=1, device="cpu", environments=environments)
    agent, observers = await new_team(names, options)
    for _ in range(2):
        await train(agent, observers, method, 40)
    return torch.cat([each.detach().flatten() for each in agent.policy.parameters()])


async def test_batched_or_not_the_training_is_the_same() -> None:
    """Bit by bit: two processes or one, each state by itself or all that are there together.

    (A row of a batch may differ from a state alone in its last bit, and change an action, about
    once in ten million steps.)
    """
    names = ["observer0", "observer1"]
    async with testing.world(["agent", *names]):
        batched = await call("agent", trained, names, 2, "select")
        assert torch.equal(batched, await call("agent", trained, names, 2, "select_alone"))
        assert torch.equal(batched, await call("agent", trained, ["observer1"], 4, "select"))


def rewards(name: str, *args: str) -> list[str]:
    """The line of what a program's first and last episodes brought."""
    sizes = ("--rounds", "3", "--steps", "100", "--seed", "5")
    said = run(name, *sizes, *args, python=())
    return [line for line in said.splitlines() if line.startswith("reward")]


@pytest.mark.slow
def test_the_plain_form_trains_the_same() -> None:
    plain = rewards("_reference.cartpole", "--observers", "2")
    ours = rewards("cartpole", "--observers", "1", "--environments", "2", "--no-batched")
    assert plain == ours
    assert len(ours) == 1


# ── processes that die ──────────────────────────────────────────────────────────────────────────


LONG = ("--seconds", "300")


def wait_until_it_plays(agent: subprocess.Popen[str]) -> None:
    assert agent.stdout is not None
    assert "play" in agent.stdout.readline()


@pytest.mark.slow
def test_a_killed_observer_ends_the_program() -> None:
    """kill -9 of a child: the world ends, and its name and a bad exit code say why."""
    with started(command("cartpole", *LONG, "--environments", "2", python=["-u"])) as agent:
        wait_until_it_plays(agent)
        children = psutil.Process(agent.pid).children(recursive=True)
        workers_of(agent)[0].kill()
        _, errors = agent.communicate(timeout=15)
        assert agent.returncode not in (0, None)
        assert "worker 'observer" in errors
        assert not psutil.wait_procs(children, timeout=15)[1]


@pytest.mark.slow
def test_a_killed_agent_ends_all() -> None:
    """kill -9 of the agent, each worker in a terminal of its own: all end, with bad exit codes."""
    with ranks("cartpole", 3, *LONG) as (agent, *observers):
        wait_until_it_plays(agent)
        agent.kill()
        start = time.monotonic()
        for observer in observers:
            _, errors = observer.communicate(timeout=500)
            assert observer.returncode not in (0, None)
            assert "worker 'agent'" in errors
        assert time.monotonic() - start < END
