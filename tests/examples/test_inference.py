"""The model server: what is computed and for whom, and the program as a user runs it."""

import argparse
import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# RuntimeError: it was built for another torch.
pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
pytest.importorskip("psutil")

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, QueueFull, RRef, remote
from aiorpc_torch.types import Worker
from benchmarks._inference_report import Left, OpenLoop, Outcome, row, served_both
from examples.inference import Client, Model, served
from tests.support.example_programs import (
    END,
    all_ended,
    command,
    killed,
    ranks,
    run,
    started,
    until,
    workers_of,
)

pytestmark = pytest.mark.worlds

LONG = ("--side", "32", "--deadline", "5", "--seconds", "4")


def options(**given: Any) -> argparse.Namespace:
    defaults = {"max_size": 8, "max_wait": 0.0, "max_pending": 16, "device": "cpu", "pad_to": None}
    return argparse.Namespace(**(defaults | given))


class Slow(nn.Module):
    """Answers when it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.open.wait(30.0)
        return x.flatten(1)[:, :2]


def slow_model(**given: Any) -> tuple[Any, Slow]:
    model = served(options(**given))("squeezenet1_1", "cpu", 0)
    model.net = Slow()
    return model, model.net


async def one_inside(model: Any, net: Slow, image: Tensor) -> "asyncio.Task[Tensor]":
    """A request that is being computed: what comes now has to wait."""
    task = asyncio.create_task(remote(RRef(model)).infer(image))
    await asyncio.to_thread(net.entered.wait, 10.0)
    return task


IMAGE = torch.zeros(3, 2, 2, dtype=torch.uint8)


# ── what is computed ────────────────────────────────────────────────────────────────────────────


async def test_answers_are_the_models_own(world: Worker) -> None:
    """Each caller gets what the network makes of its image, scaled to -1 to 1, batched or not."""
    model = served_both(options())("squeezenet1_1", "cpu", 0)
    model.net = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten())
    images = Client(RRef(model), 8, 1).images[:12]
    asked = remote(RRef(model))
    together = await asyncio.gather(*(asked.infer(image) for image in images))
    alone = [await asked.infer_alone(image) for image in images]
    right = [*model.net(torch.stack(images).float() / 255 * 2 - 1).softmax(1)]
    assert torch.stack(right).std(0).min() > 1e-3  # they can be told from each other
    torch.testing.assert_close(together, right)
    torch.testing.assert_close(alone, right)
    counted = next(v for k, v in aiorpc.observe.stats().batches.items() if k.endswith(".infer"))
    assert (counted.items, counted.batches) == (12, 2)


async def test_padded_batches(world: Worker) -> None:
    """The network gets only these numbers of images; each answer is that of its image."""
    model = served(options(pad_to=[4, 8]))("squeezenet1_1", "cpu", 0)
    model.net = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten())
    images = Client(RRef(model), 8, 1).images[:9]
    found = await asyncio.gather(*map(remote(RRef(model)).infer, images))
    right = [*model.net(torch.stack(images).float() / 255 * 2 - 1).softmax(1)]
    torch.testing.assert_close(found, right)
    assert model.computed == 8 + 4


def test_the_network_is_its_seeds() -> None:
    """The same weights again from the same seed, in order to answer and not to learn."""
    first, again, other = (Model("squeezenet1_1", "cpu", seed).net for seed in (1, 1, 2))
    weights = [net.state_dict()["features.0.weight"] for net in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not first.training


async def test_who_gives_up_is_not_computed(world: Worker) -> None:
    """Whether cancelled or late, and the others are."""
    model, net = slow_model()
    first = await one_inside(model, net, IMAGE)
    asked = remote(RRef(model))
    stays, leaves = (asyncio.create_task(asked.infer(IMAGE)) for _ in range(2))
    with pytest.raises(CallTimeout), aiorpc.timeout(0.05):
        await asked.infer(IMAGE)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    await aiorpc.call(world.name, len, [])  # sent after the cancel: that has come
    net.open.set()
    await asyncio.gather(first, stays)
    assert model.computed == 2


async def test_overload_is_shed_at_once(world: Worker) -> None:
    """Who finds too many waiting is told while the model is still at work."""
    model, net = slow_model(max_size=2, max_pending=2)
    first = await one_inside(model, net, IMAGE)
    asked = remote(RRef(model))
    waiting = [asyncio.create_task(asked.infer(IMAGE)) for _ in range(5)]
    done, _ = await asyncio.wait(waiting, timeout=5.0, return_when=asyncio.FIRST_EXCEPTION)
    while len(done) < 3:
        done |= (await asyncio.wait(set(waiting) - done, return_when=asyncio.FIRST_COMPLETED))[0]
    assert all(isinstance(task.exception(), QueueFull) for task in done)
    net.open.set()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [isinstance(each, Tensor) for each in results] == [True, True, True, False, False, False]
    assert model.computed == 3


async def test_an_open_loop_does_not_wait(world: Worker) -> None:
    """Requests are as many while nobody answers; each is answered, late or shed."""
    model, net = slow_model()
    client = OpenLoop(RRef(model), 2, 0)
    outcome = await client.load("infer", 400.0, 0.3, 2.0)
    net.open.set()
    sent = len(outcome.latencies) + outcome.late + outcome.shed
    assert 60 < sent < 200
    assert outcome.latencies == []
    assert outcome.late >= 16
    assert outcome.shed > 0


async def test_users_ask_again(world: Worker) -> None:
    """Each user waits for its answer, and asks until the time is over; all requests count."""
    model = served(options())("squeezenet1_1", "cpu", 0)
    model.net = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten())
    outcome = await Client(RRef(model), 8, 1).ask(3, 0.2, 5.0)
    assert len(outcome.latencies) == model.computed > 3
    assert (outcome.late, outcome.shed) == (0, 0)
    assert str(outcome).startswith(f"{model.computed:,} answered (median ")


async def test_users_are_late_or_shed(world: Worker) -> None:
    """With a model that does not answer, the first wait until their deadline; the rest are shed."""
    model, net = slow_model(max_size=2, max_pending=2)
    first = await one_inside(model, net, IMAGE)
    outcome = await Client(RRef(model), 8, 1).ask(5, 0.1, 0.3)
    net.open.set()
    await first
    assert outcome.latencies == []
    assert (outcome.late, outcome.shed) == (2, 3)
    assert str(outcome) == "0 answered (median 0.0 ms), 2 late, 3 shed"


def test_a_row_counts_everybody() -> None:
    """Of all clients together, over the time that the answers took."""
    outcomes = [Outcome([0.010, 0.030], late=1), Outcome([0.020], shed=2)]
    found = row("infer", outcomes, 2.0, 3.0, Left("nothing"))
    assert (found.asked, found.answered) == (3.0, 1.0)
    assert found.marks[0] == pytest.approx(20.0)
    assert (found.late, found.shed, found.batch) == (1, 2, 0.0)
    assert row("infer", [Outcome()], 1.0, 1.0, Left("nothing")).marks == (0.0, 0.0, 0.0)


@pytest.mark.gpu
async def test_on_a_device(world: Worker) -> None:
    """Stacked there, computed there, and answered from here."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = served(options(device="cuda:0"))("squeezenet1_1", "cuda:0", 0)
    assert next(model.net.parameters()).is_cuda
    model.net = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten())
    images = Client(RRef(model), 8, 1).images[:12]
    asked = remote(RRef(model))
    found = await asyncio.gather(*(asked.infer(image) for image in images))
    right = [*model.net(torch.stack(images).float() / 255 * 2 - 1).softmax(1)]
    torch.testing.assert_close(found, right)  # also that they are on the CPU


# ── the program ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_as_one_command(tmp_path: Path) -> None:
    """Clients are served, it says what giving up saves, and nothing is warned of; with a trace."""
    pytest.importorskip("opentelemetry.sdk")
    spans = tmp_path / "spans.jsonl"
    printed = run("inference", "--quick", "--clients", "1", "--trace", str(spans))
    for words in ("client0: ", "answered (median", "on average"):
        assert words in printed
    found = re.search(r"32 images .*, 16 given up: (\d+) answered, (\d+) computed", printed)
    assert found
    answered, computed = int(found[1]), int(found[2])
    assert 16 <= answered <= computed <= 32
    lines = map(json.loads, spans.read_text().splitlines())
    requests = [each for each in lines if "infer" in each["name"]]
    workers = {each["resource"]["attributes"]["service.name"] for each in requests}
    assert workers == {"server", "client0"}
    assert any(each["links"] for each in requests)


@pytest.mark.slow
def test_a_client_that_is_killed() -> None:
    """The others ask on; at the end the command says who was lost, and fails."""
    with started(command("inference", *LONG)) as process:
        until(process, "server: process")
        everybody = workers_of(process)
        assert len(everybody) == 2
        killed(everybody[0].pid)
        output, errors = process.communicate(timeout=60)
        all_ended(everybody)
    assert process.returncode == 1
    assert "client1: " in output
    assert "worker 'client0' is lost" in errors


@pytest.mark.exhaustive
def test_a_server_that_is_killed() -> None:
    """No client waits for it, or ends as if all were well."""
    with ranks("inference", 2, *LONG) as processes:
        until(processes[0], "server: process")
        since = killed(processes[0].pid)
        outputs = [process.communicate(timeout=END) for process in processes]
        assert time.monotonic() - since < END
    assert [process.returncode for process in processes] == [-9, 1], outputs
    assert "worker 'server' is lost" in outputs[1][1]
