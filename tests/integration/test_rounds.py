"""Rounds whose contributors die."""

import asyncio
import time
from typing import Any

import pytest
import torch

from aiorpc_torch import (
    RoundTimeout,
    call,
    create,
    remote,
)
from aiorpc_torch.testing import kill, world
from tests.support import actors
from tests.support.gated_batches import outcome, settled
from tests.support.slack import SLACK

# ── trainers that die ───────────────────────────────────────────────────────────────────────────


TRAINERS = [f"trainer{n}" for n in range(5)]


@pytest.mark.promise("lost.work")
async def test_a_trainer_that_is_killed_in_a_round() -> None:
    """The living go on with a quorum, or are told who is missing; neither waits any longer."""
    async with world(["ps", *TRAINERS], transports=["uv"]):
        ps = await create("ps", actors.Parameters)

        def step(method: str, **names: str) -> list["asyncio.Task[Any]"]:
            """One contribution from each trainer's own process, under some name."""
            calls = [
                call(trainer, actors.call_on, ps, method, torch.ones(2), name)
                for trainer, name in names.items()
            ]
            return [asyncio.create_task(outcome(each)) for each in calls]

        everybody = {name: name for name in TRAINERS}
        living = {name: name for name in TRAINERS[:4]}
        for number, method in enumerate(("lenient", "strict"), 1):
            for parameters, version in await settled(*step(method, **everybody)):
                assert (parameters.tolist(), version) == ([5.0, 5.0], number)

        start = time.monotonic()
        lenient, strict = step("lenient", **living), step("strict", **living)
        await asyncio.sleep(0)
        await asyncio.gather(*(call(name, actors.call_on, ps, "here") for name in living))
        kill(TRAINERS[4])
        for parameters, version in await settled(*lenient):
            assert (parameters.tolist(), version) == ([4.0, 4.0], 3)
        told = await settled(*strict)
        assert 1.0 < time.monotonic() - start < 1.0 + SLACK
        for each in told:
            assert type(each) is RoundTimeout
            assert {*each.present} == {*living}
            assert each.missing == (TRAINERS[4],)
            assert "missing: trainer4" in str(each)

        # The next rounds: of four again, and of five with a living trainer's second coroutine.
        start = time.monotonic()
        assert [version for _, version in await settled(*step("lenient", **living))] == [4] * 4
        assert time.monotonic() - start < 1.0 + SLACK
        full = step("strict", **living) + step("strict", trainer0="its second")
        for parameters, version in await settled(*full):
            assert (parameters.tolist(), version) == ([5.0, 5.0], 5)
        assert (await remote(ps).rounds())[2:4] == [TRAINERS[:4]] * 2
