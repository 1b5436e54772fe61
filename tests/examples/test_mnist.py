"""MNIST through a parameter server: its gradients, its data, and the program as a user runs it."""

import argparse
import asyncio
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.support.example_programs import (
    PATIENCE,
    Process,
    command,
    killed,
    ranks,
    run,
    run_line,
    started,
    until,
    workers_of,
)

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError) as exc:  # RuntimeError: it was built for another torch
    pytest.skip(f"no torchvision: {exc}", allow_module_level=True)

from aiorpc_torch import RRef, create, fetch, remote
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs
from aiorpc_torch.testing import world as new_world
from aiorpc_torch.types import Worker
from examples import _digits as digits
from examples._mnist import Net, devices, load, prepare, shuffled, snapshot
from examples.mnist import ParameterServer, Trainer

# Several processes import torch twice over: a busy machine takes its time.

END = 90.0  # seconds in which everybody has ended once somebody was killed
TIMEOUT = 10.0  # seconds of a backward


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set of digits."""
    root = tmp_path_factory.mktemp("data")
    digits.write(root, train=1200, test=200)
    return root


# ── gradients ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.worlds
async def test_one_trainer_is_one_process(data: Path) -> None:
    """After five steps the parameters are those of a program without workers, dropout included."""
    options = argparse.Namespace(data=data, images=80, batch_size=16, lr=0.1, seed=5, device="cpu")
    async with new_world(["ps"], transports=["uv"]):
        ps = await create("ps", ParameterServer, 0, 3)
        trainer = Trainer(ps, 0, 1, options)
        assert await trainer.prepare() == 5
        found = await trainer.train(0)
        parameters = [(await fetch(each)).detach() for each in await parameter_rrefs(ps)]

    torch.manual_seed(3)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = load(data, train=True).part(slice(80)).batches(16, shuffled(80, 5, 0))
    for loss, (pixels, labels) in zip(found, batches, strict=True):
        opt.zero_grad()
        alone = functional.nll_loss(net(pixels), labels)
        alone.backward()
        opt.step()
        assert loss == pytest.approx(alone.item(), rel=1e-5)
    torch.testing.assert_close(parameters, [each.detach() for each in net.parameters()])


class Small(ParameterServer):
    """A network of forty numbers on the server."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.net = net


def batch(trainer: int, turn: int) -> Tensor:
    return torch.linspace(-1, 1, 6).view(2, 3).roll(trainer).mul(1 + trainer + turn / 3)


def gradients(values: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Those of one process, at these values of the parameters."""
    small = Small().net
    with torch.no_grad():
        for parameter, value in zip(small.parameters(), values, strict=True):
            parameter.copy_(value)
    return [*torch.autograd.grad(small(x).square().sum(), [*small.parameters()])]


@st.composite
def schedules(draw: st.DrawFn) -> list[int]:
    """Whose turn it is: each trainer has a few of forward, backward and step."""
    turns = draw(st.lists(st.integers(1, 2), min_size=2, max_size=4))
    return draw(st.permutations([n for n, many in enumerate(turns) for _ in range(3 * many)]))


@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=schedules(), momentum=st.sampled_from([0.0, 0.5]))
@example(schedule=[0, 1, 1, 1, 0, 0], momentum=0.0)
async def test_graphs_in_flight(world: Worker, schedule: list[int], momentum: float) -> None:
    """In any order: gradients are those at the values that their forward has used."""
    server = Small()
    ps = RRef(server)
    mirror = [each.detach().clone() for each in server.parameters()]
    speeds: dict[int, list[Tensor]] = {}
    turns: list[asyncio.Queue[None]] = [asyncio.Queue() for _ in range(max(schedule) + 1)]

    async def trainer(n: int) -> None:
        params = await parameter_rrefs(ps)
        opt = await DistributedOptimizer.create(torch.optim.SGD, params, lr=0.1, momentum=momentum)
        for turn in range(schedule.count(n) // 3):
            await turns[n].get()
            async with context() as ctx:
                used = [each.clone() for each in mirror]
                found = await remote(ps).forward(batch(n, turn), training=True)
                turns[n].task_done()
                await turns[n].get()
                await ctx.backward([found.square().sum()], timeout=TIMEOUT)
                expected = gradients(used, batch(n, turn))
                mine = await ctx.gradients()
                for each, right in zip(server.parameters(), expected, strict=True):
                    torch.testing.assert_close(mine[each], right)
                turns[n].task_done()
                await turns[n].get()
                await opt.step(ctx)
            before = speeds.get(n, [torch.zeros_like(each) for each in expected])
            speeds[n] = [momentum * v + g for v, g in zip(before, expected, strict=True)]
            for value, v in zip(mirror, speeds[n], strict=True):
                value -= 0.1 * v
            turns[n].task_done()

    async with asyncio.TaskGroup() as tasks:
        for n in range(len(turns)):
            tasks.create_task(trainer(n))
        for n in schedule:
            turns[n].put_nowait(None)
            await turns[n].join()
    torch.testing.assert_close([each.detach() for each in server.parameters()], mirror)


async def test_trainers_without_order(world: Worker) -> None:
    """Four at once, forwards and backwards in threads: each goes on as if it were alone."""
    server = ParameterServer(0, 0)
    ps = RRef(server)

    async def train() -> None:
        opt = await DistributedOptimizer.create(torch.optim.SGD, await parameter_rrefs(ps), lr=1e-3)
        for _ in range(4):
            async with context() as ctx:
                found = await remote(ps).forward(torch.ones(2, 1, 28, 28), training=True)
                await ctx.backward([found[:, 0].sum()], timeout=TIMEOUT)
                assert {each.shape for each in await ctx.gradients()} == {
                    each.shape for each in server.parameters()
                }
                await opt.step(ctx)

    await asyncio.gather(*(train() for _ in range(4)))
    assert all(each.isfinite().all() for each in server.parameters())


async def test_a_mode_for_each_call(world: Worker) -> None:
    """Who evaluates has no dropout, and takes it from nobody who trains."""
    server = ParameterServer(0, 0)
    ps, x = RRef(server), torch.ones(2, 1, 28, 28)
    calls = [remote(ps).forward(x, training=n % 2 == 0) for n in range(8)]
    found = await asyncio.gather(*calls)
    evaluated, trained = found[1::2], found[::2]
    assert all(torch.equal(each, evaluated[0]) for each in evaluated)
    assert len({each.sum().item() for each in trained}) == len(trained)
    assert not any(each.requires_grad for each in evaluated)
    assert server.net.training


def test_a_snapshot_is_cut_from_nothing_but_time() -> None:
    """Its values stay, and its gradients are those of the module's own parameters."""
    net = nn.Linear(2, 1)
    taken, x = snapshot(net).eval(), torch.ones(1, 2)
    before = net(x)
    with torch.no_grad():
        for each in net.parameters():
            each.add_(1.0)
    assert torch.equal(taken(x), before)
    assert (net.training, taken.training) == (True, False)
    taken(x).backward()
    assert [each.grad.tolist() for each in net.parameters()] == [[[1.0, 1.0]], [1.0]]


# ── data ────────────────────────────────────────────────────────────────────────────────────────


def test_files_as_torchvision_reads_them(data: Path) -> None:
    """Each digit as often as the others; the files are MNIST's."""
    for train, count in ((True, 1200), (False, 200)):
        images = load(data, train=train)
        assert images.pixels.shape == (count, 28, 28)
        assert images.pixels.dtype == torch.uint8
        assert images.labels.bincount().tolist() == [count // 10] * 10
    raw = data / "MNIST" / "raw"
    for name, head in (
        ("t10k-images-idx3-ubyte", "00000803 000000c8 0000001c 0000001c"),
        ("t10k-labels-idx1-ubyte", "00000801 000000c8"),
    ):
        assert (raw / name).read_bytes().startswith(bytes.fromhex(head))


def test_digits_are_those_of_their_seed(tmp_path: Path) -> None:
    """The same again from the same seed, others from another; what is there stays."""

    def made(name: str, seed: int) -> list[bytes]:
        raw = digits.write(tmp_path / name, train=25, test=11, seed=seed)
        return [(raw / name).read_bytes() for name in digits.FILES]

    first = made("a", 1)
    assert made("b", 1) == first
    assert made("c", 2) != first
    assert made("a", 2) == first
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["MNIST"]
    labels = load(tmp_path / "a", train=False).labels.bincount(minlength=10)
    assert sorted(labels.tolist()) == [1] * 9 + [2]


def test_it_is_said_which_data_there_are(tmp_path: Path) -> None:
    """MNIST is used where it is; digits are drawn where it is not."""
    raw = digits.write(tmp_path, train=10, test=10, seed=7)
    assert prepare(tmp_path) == "digits drawn by examples.digits, seed 7"
    (raw / "drawn.txt").unlink()
    assert prepare(tmp_path) == "MNIST"
    assert len(load(tmp_path, train=True).labels) == 10
    for name in digits.FILES[1:]:
        (raw / name).unlink()
    with pytest.raises(OSError, match="not empty"):
        digits.write(tmp_path, train=10, test=10)


def test_shards_are_all_images_once(data: Path) -> None:
    """Whatever the number of trainers; each shuffles its own, in another order each epoch."""
    images = load(data, train=True)
    parts = [images.part(slice(n, None, 7)) for n in range(7)]
    assert sum(len(part.labels) for part in parts) == 1200
    sums = sorted(each.sum().item() for part in parts for each in part.pixels)
    assert sums == sorted(each.sum().item() for each in images.pixels)
    orders = [shuffled(40, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == [*range(40)] for order in orders)
    assert len({*map(tuple, orders)}) == 4
    assert shuffled(40, 1, 1).tolist() == orders[-1]


@pytest.mark.parametrize("gpus", [-1, 2, 3])
def test_gpus_that_are_not_there(gpus: int) -> None:
    """The answer is at once, and names the number."""
    if gpus == 2 and torch.cuda.device_count() >= 2:
        pytest.skip("there are two")
    with pytest.raises(ValueError, match=f"must be between 0 and . here, got {gpus}"):
        devices(gpus)


# ── the program ─────────────────────────────────────────────────────────────────────────────────


def where(data: Path) -> list[str]:
    return ["--data", str(data)]


def accuracy(output: str) -> float:
    found = re.search(r"accuracy: (\d\.\d+) of 200 test images", output)
    assert found, output
    return float(found[1])


@pytest.mark.slow
@pytest.mark.worlds
def test_as_one_command(data: Path) -> None:
    """Two trainers learn at once, and nothing is warned of."""
    said = run("mnist", *where(data), "--quick")
    assert "data: digits drawn by examples.digits, seed 0" in said
    assert "2 trainers, 228 iterations" in said
    assert accuracy(said) > 0.6  # 0.96 and more; after one epoch it was between 0.3 and 0.6
    assert len(re.findall(r"epoch \d: loss \d", said)) == 3


@pytest.mark.exhaustive
@pytest.mark.worlds
def test_under_torchrun(data: Path) -> None:
    """The world is as large as torchrun says."""
    _, *own = command("mnist", *where(data), "--quick", "--images", "200")
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--nnodes=1"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    said = run_line([sys.executable, "-m", *torchrun, *rendezvous, *own], PATIENCE)
    assert "1 trainers, 39 iterations" in said
    assert accuracy(said) > 0.05


def ranks_of(data: Path, size: int, *args: str) -> AbstractContextManager[list[Process]]:
    return ranks("mnist", size, *where(data), *args)


@pytest.mark.exhaustive
@pytest.mark.worlds
def test_one_terminal_a_worker(data: Path) -> None:
    """They meet at the address that all are given, and end together."""
    with ranks_of(data, 2, "--quick", "--images", "200") as processes:
        outputs = [process.communicate(timeout=500) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
    assert accuracy(outputs[0][0]) > 0.05


LONG = ("--epochs", "1000", "--batch-size", "4", "--images", "80")


@pytest.mark.exhaustive
@pytest.mark.worlds
def test_a_server_that_is_killed(data: Path) -> None:
    """No trainer goes on without it, or ends as if all were well."""
    with ranks_of(data, 3, *LONG) as processes:
        until(processes[0], "iterations")
        processes[0].kill()
        start = time.monotonic()
        outputs = [process.communicate(timeout=END) for process in processes]
        assert time.monotonic() - start < END
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 1, 1], outputs
    assert all("worker 'ps' is lost" in errors for _, errors in outputs[1:])


@pytest.mark.slow
@pytest.mark.worlds
def test_a_trainer_that_is_killed(data: Path) -> None:
    """It ends the run after the epoch, with a code that says so and an error that names it."""
    with started(command("mnist", *where(data), *LONG)) as ps:
        until(ps, "iterations")
        everybody = psutil.Process(ps.pid).children(recursive=True)
        trainers = workers_of(ps)
        assert len(trainers) == 2
        killed(trainers[0].pid)
        _, errors = ps.communicate(timeout=END)
        assert ps.returncode == 1
    assert "worker 'trainer" in errors
    assert not psutil.wait_procs(everybody, timeout=5.0)[1]
