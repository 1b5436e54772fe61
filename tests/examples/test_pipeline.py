"""The pipeline: as the uncut model, and as a user runs it."""

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import autograd as torchs

pytest.importorskip("psutil")

from aiorpc_torch import call, create
from aiorpc_torch.testing import Workers
from benchmarks._uncut import Uncut
from examples._textures import Shape, batches, cut, held_out, microbatches
from examples.pipeline import Pipeline, Stage
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

SMALL = ("--blocks", "3", "--width", "4", "--batch", "16")
LONG = (*SMALL, "--steps", "100000")


# ── as the uncut model ──────────────────────────────────────────────────────────────────────────


def state(stage: Stage) -> list[Tensor]:
    """Its parameters, and the running statistics of its batches."""
    return [*stage.layers.state_dict().values()]


def gradients(stage: Stage, number: int) -> list[Tensor]:
    """Of its parameters, in a context."""
    found = torchs.get_gradients(number)
    return [found[parameter] for parameter in stage.parameters()]


def agree(stages: Sequence[Sequence[Tensor]], whole: Sequence[Any]) -> None:
    """What the stages have, one after the other, is what the uncut model has."""
    found = [each for stage in stages for each in stage]
    torch.testing.assert_close(found, [*whole], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "micro"),
    [
        (2, 1),
        (2, 4),
        (3, 5),
    ],
)
async def test_it_is_the_uncut_model(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, stages: int, micro: int
) -> None:
    """Losses, gradients, parameters and batch statistics, dropout included, after four steps."""
    names = [f"stage{number}" for number in range(stages)]
    await workers(names, transports=["uv"])
    shape = Shape(blocks=3, width=4, seed=7)
    pipeline, uncut = await Pipeline.create(names, shape, 0.1), Uncut(shape, 0.1)
    step, seen = pipeline.optimizer.step, []

    async def looked_at(ctx: Any) -> None:
        seen[:] = await call(pipeline.stages, gradients, ctx.id)
        await step(ctx)

    monkeypatch.setattr(pipeline.optimizer, "step", looked_at)
    for batch in batches(4, 24, seed=7):
        loss = await pipeline.step(batch, micro)
        assert loss == pytest.approx(uncut.step(batch, micro), rel=1e-4)
        agree(seen, [parameter.grad for parameter in uncut.layers.parameters()])
    agree(await call(pipeline.stages, state), uncut.layers.state_dict().values())
    with pytest.raises(AssertionError):  # they have learnt
        agree([uncut.layers.state_dict().values()], cut(shape).state_dict().values())

    held = held_out(64, seed=7)
    uncut.layers.eval()
    right = (uncut.layers(held.images).argmax(1) == held.labels).float().mean().item()
    assert await pipeline.accuracy(held) == pytest.approx(right, abs=1 / 64)


async def test_the_order_of_microbatches_counts(workers: Workers) -> None:
    """The same parts in another order leave other statistics: what `compute` keeps in order."""
    await workers(["stage0"], transports=["uv"])
    shape = Shape(blocks=1, width=4)
    (batch,) = batches(1, 24, seed=0)
    found = []
    for turn in (1, -1, 1):
        stage = await create("stage0", Stage, shape, 0, 1)
        for images, labels in microbatches(batch, 3)[::turn]:
            await call(stage, Stage.loss, images, labels)
        found.append(await call(stage, state))
    agree([found[0]], found[2])
    with pytest.raises(AssertionError):
        agree([found[0]], found[1])


# ── the program ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_as_one_command() -> None:
    """It learns, says so, and nothing is warned of."""
    printed = run("pipeline", *SMALL, "--quick")
    losses = [float(each) for each in re.findall(r"step +\d+: loss (\d\.\d+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
    assert re.search(r"stage1: process \d+, 2 layers", printed)
    accuracy = re.search(r"held-out accuracy: (\d+\.\d)%", printed)
    assert accuracy
    assert float(accuracy[1]) > 20.0  # by chance 12.5


@pytest.mark.exhaustive
@pytest.mark.parametrize(("struck", "codes"), [(0, (-9, 1)), (2, (1, 1, -9))])
def test_a_worker_that_is_killed(struck: int, codes: tuple[int, ...]) -> None:
    """Nobody goes on without it, or ends as if all were well: neither master nor stages."""
    with ranks("pipeline", len(codes), *LONG) as processes:
        until(processes[0], f"stage{len(codes) - 2}: process")
        since = killed(processes[struck].pid)
        outputs = [process.communicate(timeout=END) for process in processes]
        assert time.monotonic() - since < END
    assert tuple(process.returncode for process in processes) == codes, outputs
    name = ("master", "stage0", "stage1")[struck]
    for number, (_, errors) in enumerate(outputs):
        assert number == struck or f"worker '{name}' is lost" in errors


@pytest.mark.exhaustive
def test_a_stage_of_a_local_world_that_is_killed() -> None:
    """The command ends with 1 and names it, and leaves no process behind."""
    with started(command("pipeline", "--stages", "1", *LONG)) as process:
        until(process, "stage0: process")
        everybody = workers_of(process)
        assert len(everybody) == 1
        killed(everybody[0].pid)
        _, errors = process.communicate(timeout=END)
        all_ended(everybody)
    assert process.returncode == 1
    assert "worker 'stage0' is lost" in errors
