"""Worlds beside process groups of `torch.distributed`, at one address."""

import contextlib
import sys
from pathlib import Path

import pytest

from tests.support import samples
from tests.support.example_programs import PATIENCE, free_port, started

from .test_launchers import no_torchrun

__all__ = ["no_torchrun"]

PROGRAM = """
import asyncio, os, sys
import torch, torch.distributed as dist
import aiorpc_torch as aiorpc

order, rank = sys.argv[1], int(sys.argv[2])
url = sys.argv[3] if sys.argv[3:] else None
given = {"init_method": url, "rank": rank, "world_size": 2} if url else {}

def total():
    found = torch.tensor([rank + 1])
    dist.all_reduce(found)
    dist.new_group([0, 1])  # asks the store of the process group
    return int(found)

async def in_group():
    start = asyncio.to_thread(
        dist.init_process_group, "gloo", init_method=url, rank=rank, world_size=2
    )
    await start

async def in_world():
    async with aiorpc.worker(**given) as me:
        if order == "world" and not dist.is_initialized():
            await in_group()
        pid = await aiorpc.call(me.peers[0], os.getpid)
        return me.name, pid != os.getpid(), await asyncio.to_thread(total)

async def main():
    if order == "group":
        await in_group()
    for _ in range(2):
        sys.stdout.write(f"{await in_world()} {await asyncio.to_thread(total)}\\n")
    dist.destroy_process_group()

asyncio.run(main())
"""


def check(order: str, rank: str, environment: dict[str, str], *url: str) -> None:
    """Two workers have two worlds in a row, and one process group."""
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                started(
                    [sys.executable, "-c", PROGRAM, order, str(number), *url],
                    **{"GLOO_SOCKET_IFNAME": "lo"} | environment | {rank: str(number)},
                )
            )
            for number in range(2)
        ]
        found = [each.communicate(timeout=PATIENCE) for each in both]
    expected = [f"('worker{number}', True, 3) 3\n" * 2 for number in range(2)]
    assert [output for output, _ in found] == expected, found
    assert [errors for _, errors in found] == ["", ""]


def address() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@pytest.mark.slow
@pytest.mark.promise("worlds.process_group")
@pytest.mark.parametrize("order", ["group", "world"])
def test_by_hand(order: str) -> None:
    """Whichever is first has the address; the group outlives the worlds."""
    check(order, "RANK", address() | {"WORLD_SIZE": "2"})


@pytest.mark.promise("worlds.process_group")
@pytest.mark.parametrize(
    ("launcher", "order"),
    samples.cells(["slurm", "kubernetes", "arguments", "localhost"], ["group", "world"], of=2),
)
def test_other_launchers(launcher: str, order: str) -> None:
    """The group is given its rank; Slurm's batch script exports the address."""
    match launcher:
        case "slurm":
            task = {"SLURM_STEP_NODELIST": "node03", "SLURM_NTASKS": "2"}
            check(order, "SLURM_PROCID", address() | task)
        case "kubernetes":
            check(order, "JOB_COMPLETION_INDEX", address() | {"WORLD_SIZE": "2"})
        case "arguments":
            check(order, "UNUSED", {}, f"tcp://127.0.0.1:{free_port()}")
        case _:
            check(order, "RANK", address() | {"MASTER_ADDR": "localhost", "WORLD_SIZE": "2"})


TRAINING = """
import asyncio, sys
import torch, torch.distributed as dist
import aiorpc_torch as aiorpc
from torch.nn.parallel import DistributedDataParallel

url, rank = sys.argv[1], int(sys.argv[2])

def part(inputs, outputs):
    made = torch.nn.Linear(inputs, outputs)
    for each in made.parameters():
        torch.nn.init.constant_(each, 0.5)
    return made

async def main():
    start = asyncio.to_thread(
        dist.init_process_group, "gloo", init_method=f"{url}.group", rank=rank, world_size=2
    )
    await start
    async with aiorpc.worker(init_method=url, rank=rank, world_size=2) as me:
        first = await aiorpc.create(me.peers[0], part, 2, 4)
        last = await asyncio.to_thread(DistributedDataParallel, part(4, 1))
        async with aiorpc.autograd.context() as context:
            loss = last(await aiorpc.remote(first)(torch.full((3, 2), rank + 1.0))).mean()
            await context.backward([loss], timeout=60)
            parameters = await aiorpc.autograd.parameter_rrefs(last)
            optimizer = await aiorpc.autograd.DistributedOptimizer.create(
                torch.optim.SGD, parameters, lr=0.1
            )
            await optimizer.step(context)
    print([round(each, 4) for each in last.module.weight[0].tolist()])
    dist.destroy_process_group()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_distributed_model_in_an_autograd_context(tmp_path: Path) -> None:
    """Its gradients of both ranks are averaged: inputs 1.5 and 2.5 make a gradient of 2."""
    (tmp_path / "training.py").write_text(TRAINING)
    with contextlib.ExitStack() as stack:
        lines = (
            [sys.executable, str(tmp_path / "training.py"), f"file://{tmp_path}/world", str(rank)]
            for rank in range(2)
        )
        both = [stack.enter_context(started(each, GLOO_SOCKET_IFNAME="lo")) for each in lines]
        found = [each.communicate(timeout=PATIENCE)[0] for each in both]
    assert found == [f"{[0.3] * 4}\n"] * 2
