"""The parameter server: what a step is, and what a user sees who runs it and kills parts of it."""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from tests.support.example_programs import ROOT, STRICT, command, free_port, run

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
try:
    import torchvision  # noqa: F401
except Exception as exc:  # one that was built for another torch fails in ways of its own
    pytest.skip(f"no torchvision: {exc}", allow_module_level=True)

from examples import _classifier, parameter_server
from examples._classifier import Learned, Mean, learn
from examples.parameter_server import ParameterServer, arguments

# Several processes import torch twice over: a busy machine takes its time.

SOON = 15.0  # seconds within which everybody has ended


# ── a step ──────────────────────────────────────────────────────────────────────────────────────


def options(*words: str) -> argparse.Namespace:
    return arguments(["--model", "small", "--classes", "3", "--trainers", "2", *words])


def new_server(given: argparse.Namespace) -> ParameterServer:
    return ParameterServer(given)


def samples(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 64, 64), torch.arange(count) % 3


async def contribute(ps: ParameterServer, rank: int, batch: tuple[Tensor, Tensor]) -> nn.Module:
    """What a trainer of that rank does, with BatchNorm in eval mode; its next model."""
    model = _classifier.new_model(options()).eval()
    model.load_state_dict((await ps.state()).model)
    parts: list[Learned] = []
    learn(model, batch, options(), parts.append)
    for part in parts:
        await ps.add(len(batch[0]), part)
    model.load_state_dict((await ps.step(rank)).model)
    return model


async def test_a_round_is_a_step_on_all_batches() -> None:
    """Of different lengths, for three steps with momentum: the single process's very model."""
    torch.manual_seed(1)
    whole = _classifier.new_model(options()).eval()
    optimizer = torch.optim.SGD(whole.parameters(), options().lr, options().momentum)
    ps = new_server(options())
    for step in range(1, 4):
        first, second = samples(5), samples(3)
        models = await asyncio.gather(contribute(ps, 1, first), contribute(ps, 2, second))
        both = [torch.cat(each) for each in zip(first, second, strict=True)]
        loss = nn.functional.cross_entropy(whole(both[0]), both[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert len(ps.losses) == step
        assert ps.losses[-1] == pytest.approx(loss.item(), rel=1e-5)
        for model in (ps.model, *models):
            for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


async def test_running_statistics_are_averaged() -> None:
    """Weighed with samples, beside the gradients, and part of the answer; counts stay counts."""
    ps = new_server(options())
    buffers = [*ps.model.buffers()]

    async def trainer(rank: int, samples: int, value: float) -> dict[str, Tensor]:
        zeros = [torch.zeros_like(parameter) for parameter in ps.model.parameters()]
        mine = [torch.full_like(b, value if b.is_floating_point() else 7) for b in buffers]
        await ps.add(samples, dict(enumerate([torch.tensor(0.0), *zeros])))
        await ps.add(samples, dict(enumerate(mine, 1 + len(zeros))))
        return (await ps.step(rank)).model

    models = await asyncio.gather(trainer(1, 3, 1.0), trainer(2, 1, 5.0))
    for model in models:
        assert model["1.running_mean"].tolist() == [2.0] * 16
        assert model["1.running_var"].tolist() == [2.0] * 16
        assert model["1.num_batches_tracked"].item() == 7
        assert model["1.num_batches_tracked"].dtype is torch.int64


async def test_a_step_after_the_last_changes_nothing() -> None:
    """One that comes late gets the model, and the optimizer makes no step without gradients."""
    ps = new_server(options("--iterations", "1", "--trainers", "1"))
    model = await contribute(ps, 1, samples(3))
    state = await ps.step(1)
    assert state.steps == len(ps.losses) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(state.model[name], value)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(-100, 100)), min_size=1, max_size=6))
def test_a_mean_is_weighted(added: list[tuple[int, int]]) -> None:
    """Whatever the order and the number, and it begins anew when it was taken."""
    mean = Mean()
    for _ in range(2):
        for weight, value in added:
            one, two = torch.tensor(float(value)), torch.tensor([float(value)] * 2)
            mean.add({0: one, 1: two}, weight)
        expected = sum(w * v for w, v in added) / sum(w for w, _ in added)
        one, two = mean.take().values()
        assert one.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert two.tolist() == pytest.approx([expected] * 2, rel=1e-5, abs=1e-5)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_parts_are_the_whole(sizes: list[int]) -> None:
    """In order, none empty, and none much larger than the others."""
    tensors = [torch.empty(size << 20, dtype=torch.uint8, device="meta") for size in sizes]
    found: list[Learned] = []
    parts = _classifier.Parts(found.append)
    for place, tensor in enumerate(tensors):
        parts.put(place, tensor)
    parts.end()
    told = [pair for part in found for pair in part.items()]
    assert [(place, id(each)) for place, each in told] == [*enumerate(map(id, tensors))]
    for part in found[:-1]:
        *first, _ = sizes = [each.nbytes for each in part.values()]
        assert sum(first) < _classifier.PART <= sum(sizes)


@pytest.mark.parametrize("part", [1, 1 << 10, 1 << 30])
def test_what_a_batch_says(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss, torch's own gradients and the buffers, each at its place, in parts of any size."""
    monkeypatch.setattr(_classifier, "PART", part)
    model, batch = _classifier.new_model(options()).eval(), samples(3)
    parts: list[Learned] = []
    learn(model, batch, options(), parts.append)
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    expected = [loss.detach(), *gradients, *model.buffers()]
    told = {place: tensor for each in parts for place, tensor in each.items()}
    assert sum(map(len, parts)) == len(told) == len(expected)
    for place, tensor in enumerate(expected):
        torch.testing.assert_close(told[place], tensor)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [*parts[-1]][-1] == 0, "the loss comes last"
    assert (len(parts) > 1) == (part < 1 << 30)


async def test_parts_travel_while_the_rest_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on their way before the computation ends."""
    arrived = threading.Event()

    class Server:
        """In place of the remote one."""

        async def add(self, samples: int, part: Learned) -> None:
            arrived.set()

    def learn_in_two(*args: object) -> None:
        tell = args[-1]
        assert callable(tell)
        tell({0: torch.ones(1)})
        assert arrived.wait(30.0)

    monkeypatch.setattr(parameter_server, "learn", learn_in_two)
    model = _classifier.new_model(options())
    await asyncio.gather(*await parameter_server.compute(model, samples(3), options(), Server()))


async def test_what_nobody_has_told_of() -> None:
    """It stays as it is: a parameter that no loss depends on, or what came too late."""
    ps = new_server(options("--trainers", "1"))
    before = [tensor.clone() for tensor in (*ps.model.parameters(), *ps.model.buffers())]
    await ps.add(1, {0: torch.tensor(1.0), 1: torch.ones_like(before[0])})
    await ps.step(1)
    after = (*ps.model.parameters(), *ps.model.buffers())
    same = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert same == [False] + [True] * (len(before) - 1)


@given(st.data())
def test_a_mean_of_parts(data: st.DataObject) -> None:
    """Each place has a weight of its own: who was killed after some parts has contributed those."""
    rows = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=5))
    mean = Mean().add(dict(enumerate(torch.ones(4, 1))), 1)
    for weight, count in rows:
        for place in range(count):
            mean.add({place: torch.tensor([5.0])}, weight)
    for place, found in mean.take().items():
        weight = sum(weight for weight, count in rows if place < count)
        assert found.item() == pytest.approx((1 + 5 * weight) / (1 + weight), rel=1e-5)


def test_a_mean_of_bfloat16_is_a_float32() -> None:
    """What is sum and what is mean is not rounded, only what travels."""
    mean = Mean().add({0: torch.tensor([1.0], dtype=torch.bfloat16)}, 3)
    mean.add({0: torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)}, 1)
    (found,) = mean.take().values()
    assert found.dtype is torch.float32
    assert found.item() == 1.0 + 2**-9


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--world-size", "1"], "0 trainers"),
        (["--trainers", "3", "--images", "2"], "cannot share 2 images"),
        (["--trainers", "3", "--quorum", "4"], "a quorum is 1 to 3 trainers, not 4"),
    ],
)
def test_what_cannot_be(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before a process is started."""
    with pytest.raises(SystemExit) as raised:
        arguments(words)
    assert raised.value.code == 2
    assert why in capsys.readouterr().err


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

    def end(self, timeout: float = 60.0) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return self.process.wait(timeout)


@contextlib.contextmanager
def running(tmp_path: Path, *words: str) -> Iterator[Program]:
    """The program, every warning an error."""
    errors = tmp_path / f"stderr{len(list(tmp_path.iterdir()))}"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command("parameter_server", *words, python=STRICT),
            cwd=ROOT,
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


def test_quick(tmp_path: Path) -> None:
    """It learns, says so, and draws its picture where it is told to."""
    picture = tmp_path / "loss.png"
    words = ("--quick", "--compress", "bfloat16", "--plot", str(picture))
    with running(tmp_path, *words) as program:
        assert program.end() == 0, program.errors
    assert "Warning" not in program.errors
    assert "Traceback" not in program.errors
    said = "".join(program.lines)
    losses = re.search(r"loss, first step: ([\d.]+), last of 20: ([\d.]+)", said)
    assert losses is not None, said
    assert float(losses[2]) < 0.5 * float(losses[1])
    assert f"loss curve: {picture}" in said.replace("\n", " ")
    right = re.search(r"held-out images: ([\d.]+)%", said)
    assert right is not None
    assert float(right[1]) > 60.0  # a tenth is what chance would give
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_killed_trainer_comes_back(tmp_path: Path) -> None:
    """The other goes on without it; it begins where the model is by then, and all end well."""
    # Alone, the other takes a second a step, so it is not done before the first is back.
    words = ("--quick", "--timeout", "1", "--iterations", "60", "--plot", str(tmp_path / "l.png"))
    with running(tmp_path, *words) as program:
        first, step = program.begun("trainer1")
        os.kill(first, signal.SIGKILL)
        program.expect(r"step \d+: without trainer1")
        second, later = program.begun("trainer1")
        assert second != first
        assert later > step
        assert program.end() == 0, program.errors
    assert "last of 60" in "".join(program.lines)


@pytest.mark.slow
def test_a_killed_trainer_is_missed(tmp_path: Path) -> None:
    """Who is not started again: the others go on to the end, and the exit code tells of it."""
    words = ("--quick", "--restart", "0", "--timeout", "0.2", "--iterations", "10")
    words += ("--plot", str(tmp_path / "loss.png"))
    with running(tmp_path, *words) as program:
        process, _ = program.begun("trainer1")
        os.kill(process, signal.SIGKILL)
        assert program.end() == 1, program.errors
    assert "WorkerLost: worker 'trainer1' is lost" in program.errors
    assert "last of 10" in "".join(program.lines)


@pytest.mark.slow
def test_a_killed_server_ends_everybody(tmp_path: Path) -> None:
    """In a world of processes that were started one by one: none is left, none ends well."""
    port = str(free_port())
    words = ("--quick", "--iterations", "100000", "--master-port", port, "--rank")
    with contextlib.ExitStack() as stack:
        ps, *trainers = (
            stack.enter_context(running(tmp_path, *words, str(rank))) for rank in range(3)
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
def test_the_plain_form(tmp_path: Path) -> None:
    """What it is compared with learns as well."""
    words = ["--trainers", "2", "--model", "small", "--iterations", "20"]
    words += ["--classes", "10", "--images", "2000"]
    said = run("_reference.parameter_server", *words, python=())
    losses = re.search(r"loss, first step: ([\d.]+), last of 20: ([\d.]+)", said)
    assert losses is not None, said
    assert float(losses[2]) < 0.5 * float(losses[1])
