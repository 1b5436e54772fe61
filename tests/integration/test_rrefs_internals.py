"""Calls that arrive while torch stops, and what torch keeps of objects in a later world."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch._C._distributed_rpc import _rref_context_get_debug_info
from torch.distributed.rpc import api

from aiorpc_torch import NotInWorld, RRef, create, remote
from aiorpc_torch._server.server import Server
from aiorpc_torch._torch.agent import Agent, is_running
from aiorpc_torch._torch.rrefs import PINNED, RRefTable
from aiorpc_torch.testing import world
from tests.support.logs import logged

from .test_rrefs import KINDS, Plain, Slotted


class Late(NamedTuple):
    """Messages after `waiting` is set are accepted after torch has shut down RRefs."""

    waiting: threading.Event
    arrived: threading.Event


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    waiting, arrived, closed = threading.Event(), threading.Event(), threading.Event()
    accept, destroy = Server.payload, api._destroy_rref_context  # type: ignore[attr-defined]

    def accept_late(self: Server, *message: Any) -> Any:
        if waiting.is_set():
            arrived.set()
            assert closed.wait(30.0)
        return accept(self, *message)

    def destroy_first(*args: Any) -> None:
        destroy(*args)
        closed.set()

    monkeypatch.setattr(Server, "payload", accept_late)
    monkeypatch.setattr(api, "_destroy_rref_context", destroy_first)
    yield Late(waiting, arrived)
    closed.set()


async def end_a_world_with_a_late_call(kind: type[Slotted], late: Late) -> None:
    """A call arrives while torch stops, and its caller learns that the world is over."""
    with pytest.raises(LookupError):  # noqa: PT012
        async with world():
            rref = await create("main", kind)
            late.waiting.set()
            call = asyncio.create_task(remote(rref).add(torch.zeros(1_000_000)))
            assert await asyncio.to_thread(late.arrived.wait, 30.0)
            raise LookupError("ends the world without waiting for anybody")
    with pytest.raises(NotInWorld):
        await call


@KINDS
@pytest.mark.usefixtures("over_torch")
async def test_a_call_that_arrives_too_late(
    kind: type[Slotted], late: Late, caplog: pytest.LogCaptureFixture
) -> None:
    """torch would wait for its object without end, and so would this worker's end for torch."""
    with caplog.at_level(logging.ERROR, "aiorpc_torch"):
        await end_a_world_with_a_late_call(kind, late)
    assert not logged(caplog)
    assert not is_running()


@pytest.mark.usefixtures("over_torch")
async def test_the_last_messages_are_answered_while_torch_exists(
    monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """A reply that is completed later makes torch read freed memory."""
    loop, agents, stopped = asyncio.get_running_loop(), list[Agent](), threading.Event()
    stop, on_payload = Agent.stop, Server._on_payload
    existed = []

    def stop_while_loop_waits(self: Agent) -> None:
        agents.append(self)
        loop.call_soon_threadsafe(stopped.wait, 30.0)
        stop(self)
        stopped.set()

    def record(self: Server, *payload: Any) -> None:
        existed.append(hasattr(agents[0], "_agent"))
        on_payload(self, *payload)

    monkeypatch.setattr(Agent, "stop", stop_while_loop_waits)
    monkeypatch.setattr(Server, "_on_payload", record)
    await end_a_world_with_a_late_call(Plain, late)
    assert existed == [True]


@pytest.mark.usefixtures("world")
async def test_what_torch_keeps_of_an_object_in_a_later_world() -> None:
    """It, once, until the table is closed; nothing in an adopted world, which torch ends."""
    others = known_to_torch()
    for adopted, kept in ((False, 1), (True, 0)):
        table, rref = RRefTable(0, counted=False, adopted=adopted), RRef(Plain())
        for _ in range(2):
            assert table.share(rref, rref._serialize()) == PINNED
        assert known_to_torch() - others == kept
        table.close()
        assert known_to_torch() == others
        table.share(rref, rref._serialize())  # a call that has run until now
        assert known_to_torch() == others


def known_to_torch() -> int:
    return int(_rref_context_get_debug_info()["num_owner_rrefs"])
