"""What is looked at while nothing is propagated, and names that the callee does not know."""

import asyncio

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, remote
from aiorpc_torch._context import propagation
from aiorpc_torch.testing import Gate
from tests.support.hooks import hooks as hooks

from .test_propagation import VAR, Seer

pytestmark = pytest.mark.usefixtures("hooks", "world")


async def test_names_that_the_callee_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ignored."""
    aiorpc.observe.propagate(VAR)
    VAR.set("unknown there")
    gate = RRef(Gate())
    waiting = asyncio.create_task(remote(gate).passed())
    await remote(gate).entered()
    seer = RRef(Seer())
    collected = propagation.collect()
    monkeypatch.setattr(propagation, "collect", lambda: collected)
    monkeypatch.setattr(propagation, "variables", {})
    assert await remote(seer).on_loop() == "default"
    await remote(gate).open()
    await waiting


def test_nothing_is_used_before() -> None:
    """While there is neither a variable nor an interceptor, a call looks at one flag."""
    assert not propagation.used
    aiorpc.observe.propagate(VAR)
    assert propagation.used
