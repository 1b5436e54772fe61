"""What a launcher or an argument lacks: an error where the world is entered."""

from typing import Any

import pytest

import aiorpc_torch as aiorpc
from tests.support.launchers import POD, TASK, forget_launcher, set_all


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may be a task or a pod."""
    forget_launcher(monkeypatch)


async def enter(**options: Any) -> None:
    async with aiorpc.worker(start_timeout=30.0, **options):
        pass


@pytest.mark.promise("worlds.launchers")
async def test_worlds_that_need_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one and a local one do not read its variables."""
    set_all(monkeypatch, TASK, POD, SLURM_STEP_NODELIST="node[", SLURM_NTASKS="many")
    async with aiorpc.worker(rank=0, world_size=1) as me:
        assert (me.name, me.peers) == ("worker0", ())
    async with aiorpc.local_world(0) as me:
        assert me.world_size == 1


async def test_a_value_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable that has it."""
    set_all(monkeypatch, TASK, SLURM_PROCID="first")
    with pytest.raises(ValueError, match="SLURM_PROCID must be a number, got 'first'"):
        await enter()


async def test_what_a_manifest_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the line to add."""
    set_all(monkeypatch, POD)
    with pytest.raises(ValueError, match=r'manifest.*\{name: WORLD_SIZE, value: "8"\}$'):
        await enter()
    with pytest.raises(ValueError, match=r'\{name: MASTER_ADDR, value: "JOB-0.SERVICE"\}$'):
        await enter(world_size=8)


@pytest.mark.parametrize("url", ["127.0.0.1:29500", "ps:29500", "tcp://ps", "http://ps:29500"])
async def test_an_init_method_without_an_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"must be tcp://host:port, .*, got '{url}'"):
        await enter(rank=1, world_size=2, init_method=url)
