"""The parameter server: what a step is, and what a user sees who runs it and kills parts of it."""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.example_programs import ROOT, STRICT, command, free_port, run

try:
    from torchvision.models import get_model
except Exception as exc:  # one that was built for another torch fails in ways of its own
    pytest.skip(f"no torchvision: {exc}", allow_module_level=True)

from examples.parameter_server import CLASSES, ParameterServer, learn, pictures

QUICK = ("--model", "resnet18", "--side", "32", "--trainers", "2")
SOON = 30.0  # seconds within which everybody has ended


# ── a step ──────────────────────────────────────────────────────────────────────────────────────


def options(iterations: int = 60) -> argparse.Namespace:
    return argparse.Namespace(
        model="resnet18",
        side=32,
        trainers=2,
        quorum=1,
        timeout=60.0,
        iterations=iterations,
        server_device="cpu",
        via="cpu",
    )


async def contribute(ps: ParameterServer, name: str, batch: tuple[Tensor, Tensor]) -> nn.Module:
    """What a trainer of that name does, with BatchNorm in eval mode; its next model."""
    model = get_model("resnet18", num_classes=CLASSES).eval()
    model.load_state_dict(ps.state()[1])
    _, state = await ps.step(name, learn(model, *batch, "cpu", "cpu"))
    model.load_state_dict(state)
    return model


@pytest.mark.slow
async def test_a_round_is_a_step_on_all_batches() -> None:
    """For three steps with momentum: the single process's very model."""
    ps = ParameterServer(options())
    whole = get_model("resnet18", num_classes=CLASSES).eval()
    whole.load_state_dict(ps.state()[1])
    optimizer = torch.optim.SGD(whole.parameters(), 0.01, 0.9)
    for step in range(1, 4):
        first, second = (pictures(options(), 4, seed) for seed in (step, -step))
        models = await asyncio.gather(contribute(ps, "a", first), contribute(ps, "b", second))
        images, labels = (torch.cat(each) for each in zip(first, second, strict=True))
        loss = nn.functional.cross_entropy(whole(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert len(ps.losses) == step
        assert ps.losses[-1] == pytest.approx(loss.item(), rel=1e-4)
        for model in (ps.model, *models):
            for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


async def test_running_statistics_are_averaged() -> None:
    """Beside the gradients, and part of the answer; counts stay counts."""
    ps = ParameterServer(options())
    zeros = {name: torch.zeros_like(each) for name, each in ps.model.named_parameters()}

    async def trainer(name: str, value: float) -> dict[str, Tensor]:
        buffers = {
            key: torch.full_like(each, value if each.is_floating_point() else 7)
            for key, each in ps.model.named_buffers()
        }
        return (await ps.step(name, {"loss": torch.tensor(0.0), **zeros, **buffers}))[1]

    for model in await asyncio.gather(trainer("a", 1.0), trainer("b", 5.0)):
        assert model["bn1.running_mean"].tolist() == [3.0] * 64
        assert model["bn1.running_var"].tolist() == [3.0] * 64
        assert model["bn1.num_batches_tracked"].item() == 7
        assert model["bn1.num_batches_tracked"].dtype is torch.int64


async def test_a_step_after_the_last_changes_nothing() -> None:
    """One that comes late gets the model."""
    ps = ParameterServer(options(iterations=1))
    batch = pictures(options(), 4, seed=1)
    models = await asyncio.gather(contribute(ps, "a", batch), contribute(ps, "b", batch))
    assert len(ps.losses) == 1
    before = {name: each.clone() for name, each in models[0].state_dict().items()}
    late = await asyncio.gather(contribute(ps, "a", batch), contribute(ps, "b", batch))
    assert len(ps.losses) == 1
    for name, value in late[0].state_dict().items():
        assert torch.equal(before[name], value)


def test_what_a_batch_says() -> None:
    """The loss, torch's own gradients and the buffers, each by its name."""
    model = get_model("resnet18", num_classes=CLASSES).eval()
    images, labels = pictures(options(), 4, seed=1)
    learned = learn(model, images, labels, "cpu", "cpu")
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(learned[name], parameter.grad)
    for name, buffer in model.named_buffers():
        assert torch.equal(learned[name], buffer)
    assert learned["loss"].item() == pytest.approx(loss.item())
    assert len(learned) == 1 + len([*model.parameters(), *model.buffers()])


# ── as a user runs it ───────────────────────────────────────────────────────────────────────────


class Program:
    """A program that runs, in a process group of its own; `errors` is its stderr."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self.process, self._errors = process, errors
        self.lines: list[str] = []

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def expect(self, pattern: str) -> "re.Match[str]":
        """Read on until a line matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} in {''.join(self.lines)}\n{self.errors}")

    def begun(self, name: str) -> tuple[int, int]:
        """The process in which that trainer begins, and at which step it does."""
        process, step = self.expect(rf"{name}, process (\d+), begins at step (\d+)").groups()
        return int(process), int(step)

    def kill(self, process: int) -> None:
        """Kill one of its processes."""
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            raise AssertionError(f"it has ended: {''.join(self.lines)}\n{self.errors}") from None

    def end(self, timeout: float = 60.0) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return self.process.wait(timeout)


@contextlib.contextmanager
def running(tmp_path: Path, *words: str, **world: str) -> Iterator[Program]:
    """The program, every warning an error."""
    errors = tmp_path / f"stderr{len(list(tmp_path.iterdir()))}"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command("parameter_server", *QUICK, *words, python=STRICT),
            cwd=ROOT,
            env={**os.environ, **world},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Program(process, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def losses(said: str) -> str:
    """The line with the first loss and the last, of which the last is much smaller."""
    found = re.search(r"loss, first step: ([\d.]+), last of 20: ([\d.]+)", said)
    assert found is not None, said
    assert float(found[2]) < 0.5 * float(found[1])
    return found[0]


@pytest.fixture(scope="module")
def ours() -> str:
    """What the program prints, quick."""
    return run("parameter_server", *QUICK, "--iterations", "20")


@pytest.mark.slow
def test_quick(ours: str) -> None:
    """It learns, and says so."""
    losses(ours)
    assert "of trainer1 trainer2\n" in ours
    right = re.search(r"held out: ([\d.]+)%", ours)
    assert right is not None
    assert float(right[1]) > 60.0  # a tenth is what chance would give


@pytest.mark.slow
def test_a_killed_trainer_comes_back(tmp_path: Path) -> None:
    """The other goes on without it; it begins where the model is by then, and all end well."""
    # Alone, the other takes a second a step, so it is not done before the first is back.
    with running(tmp_path, "--timeout", "1", "--iterations", "60") as program:
        first, _ = program.begun("trainer1")
        program.expect(r"step 3: ")
        program.kill(first)
        program.expect(r"step \d+: loss [\d.]+ of trainer2$")
        second, later = program.begun("trainer1")
        assert second != first
        assert later >= 3
        assert program.end() == 0, program.errors
    assert "last of 60" in "".join(program.lines)


@pytest.mark.slow
def test_a_killed_trainer_is_missed(tmp_path: Path) -> None:
    """Who is not started again: the others go on to the end, and the exit code tells of it."""
    words = ("--restart", "0", "--timeout", "0.2", "--iterations", "10")
    with running(tmp_path, *words) as program:
        process, _ = program.begun("trainer1")
        program.kill(process)
        assert program.end() == 1, program.errors
    assert "WorkerLost: worker 'trainer1' is lost" in program.errors
    assert "last of 10" in "".join(program.lines)


@pytest.mark.slow
def test_a_killed_server_ends_everybody(tmp_path: Path) -> None:
    """In a world of processes that were started one by one: none is left, none ends well."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    with contextlib.ExitStack() as stack:
        ps, *trainers = (
            stack.enter_context(
                running(tmp_path, "--iterations", "100000", **world, RANK=str(rank))
            )
            for rank in range(3)
        )
        for number, trainer in enumerate(trainers, 1):
            trainer.begun(f"trainer{number}")
        os.kill(ps.process.pid, signal.SIGKILL)
        start = time.monotonic()
        for trainer in trainers:
            assert trainer.end(SOON) == 1
            assert "WorkerLost: worker 'ps' is lost" in trainer.errors
        assert time.monotonic() - start < SOON


@pytest.mark.slow
def test_the_plain_form_learns_the_same(ours: str) -> None:
    """The sum of two trainers' gradients has one value in either order, so losses are equal."""
    plain = run("_reference.parameter_server", *QUICK, "--iterations", "20", python=())
    assert losses(ours) == losses(plain)
