"""Losses with a cause inside: late exit codes and messages, processes that cannot start."""

import asyncio
import errno
import os
import signal
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLost, call, create, remote, wrap_future
from aiorpc_torch._children import child, forkserver, supervisor
from aiorpc_torch._client import pool, torch_transfers
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._wire.plain import dump
from aiorpc_torch.testing import Gate, kill, world

from .test_failure_detection import frozen_process, lost_for_good, named


@pytest.mark.promise("lost.exit")
async def test_an_exit_code_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on meanwhile, and the calls of the dead child wait for the reason."""
    monkeypatch.setattr(child, "EXIT_CODE_TIMEOUT", 30.0)
    async with world(["b"]), asyncio.timeout(60.0):
        gate = await create("b", Gate)
        passed = named("passed", remote(gate).passed())
        await remote(gate).entered()
        number = await call("b", os.getpid)
        connection, server = pool.current().connection("b"), forkserver.server_pid()
        assert server is not None
        with frozen_process(server):  # it reports no exit code
            os.kill(number, signal.SIGKILL)
            await connection.ended.wait()
            later = named("later", remote(gate).passed())
            await asyncio.sleep(0)
            assert not passed.done()
        for each in (passed, later):
            with pytest.raises(WorkerLost) as lost:
                await each
            assert lost.value.reason.startswith("its process was killed by SIGKILL; it is not ")


@pytest.mark.promise("lost.exit")
async def test_a_peer_that_told_of_its_failure() -> None:
    """Its own words stay the reason, also for the first call to it, which finds no process."""
    async with world(["b"]) as me:
        membership, peer = me._node.membership, me._node.members.peers["b"]
        ended = WorkerLost("b", "its connection has ended")
        before = membership.on_disconnect("b", peer.worker_id, ended)
        membership.on_leave_message("b", peer.worker_id, "failed", "ValueError: odd\nTraceback")
        membership.on_unreachable(peer, RuntimeError("EOF: end of file (tensorpipe/uv.cc:1)"))
        errors = [peer.error, membership.on_disconnect("b", peer.worker_id, ended)]
    assert before is ended
    for error in errors:
        assert isinstance(error, WorkerLost)
        assert error.reason == "ValueError: odd"
        assert "Traceback" in str(error.__cause__)


async def test_a_child_that_cannot_be_restarted(caplog: pytest.LogCaptureFixture) -> None:
    """The system has no process left: those that wait for the child are told."""
    async with world(["b"], max_restarts=1) as me, asyncio.timeout(30.0):

        def no_process(*_: Any) -> Any:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "ChildProcess", no_process)
            kill("b")
            with pytest.raises(WorkerLost, match="temporarily unavailable; it is not restarted"):
                await lost_for_good(me, "b")
    assert "worker 'b' cannot be restarted" in caplog.text


async def test_a_message_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has stopped serving still answers, and runs nothing."""
    sent: list[tuple[Any, ...]] = []
    send = torch_transfers.send
    monkeypatch.setattr(torch_transfers, "send", lambda *args: sent.append(args[2:]) or send(*args))
    async with aiorpc.local_world(0):
        node = entry_points.here
        assert await call("main", torch.numel, torch.zeros(1_000_000)) == 1_000_000
    assert node is not None
    answers = [
        node.server.payload(*sent[0]),
        node.server.collect(dump((("main", 0, 0), 0))),
        node.introduce(dump(("main", 0))),
    ]
    async with asyncio.timeout(30.0):
        for answer in answers:
            await wrap_future(answer)
