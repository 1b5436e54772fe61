"""The socket at which a viewer takes snapshots of a worker."""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiorpc_torch import call
from aiorpc_torch._inspection import snapshot_socket
from aiorpc_torch._inspection.snapshot_socket import THREAD, offered, world_name
from aiorpc_torch._server.timings import timings
from aiorpc_torch._top.probe import listening
from tests.support.other_users import first_byte
from tests.support.two_ends import gated, two_ends


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD]


@contextlib.asynccontextmanager
async def watched_ends() -> AsyncIterator[tuple[Any, str, threading.Thread]]:
    """Two ends of which the far one is offered: they, the name of its socket, and its thread."""
    async with two_ends() as ends:
        before, known = listening(), threads()
        with offered(ends.far, "unix://abc"):
            [name] = [each for each in listening().keys() - before if each.endswith("-far")]
            [thread] = [each for each in threads() if each not in known]
            yield ends, name, thread
        assert not thread.is_alive()
        assert name not in listening()
        assert not timings.is_on


def ask(name: str, request: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as viewer:
        viewer.settimeout(60.0)
        viewer.connect(f"\0{name}")
        viewer.sendall(request)
        data = b""
        while chunk := viewer.recv(1 << 16):
            data += chunk
    found: dict[str, Any] = json.loads(data)
    return found


async def test_a_snapshot() -> None:
    """Counters, waits and calls; with detail the stacks of the calls too."""
    async with watched_ends() as (ends, name, _):
        calling = asyncio.ensure_future(call("far", gated, 1))
        await ends.gate.wait_for()
        found = await asyncio.to_thread(ask, name, b"detail\n")
        assert (found["name"], found["world"]) == ("far", "unix://abc")
        assert found["members"] == {"near": 0, "far": 1}
        [running] = found["calls"]
        assert (running["method"], running["worker"]) == ("gated", "near")
        assert "in gated" in "".join(running["stack"])
        assert "calls" not in await asyncio.to_thread(ask, name, b"brief\n")
        ends.gate.open()
        await calling


@pytest.mark.promise("where.top")
async def test_where_its_calls_stand() -> None:
    """With detail. Nothing is asked while the event loop is blocked."""
    async with two_ends() as ends:
        before = listening()
        with offered(ends.near, "unix://abc"):
            [name] = [each for each in listening().keys() - before if each.endswith("-near")]
            assert (await asyncio.to_thread(ask, name, b"detail\n"))["where"] == []
            calling = asyncio.ensure_future(call("far", gated, 1))
            await ends.gate.wait_for()
            [line] = (await asyncio.to_thread(ask, name, b"detail\n"))["where"]
            assert line.startswith("gated on worker 'far', ")
            assert "in gated" in line
            time.sleep(snapshot_socket.BLOCKED)  # noqa: ASYNC251 - so that the loop counts as blocked
            assert ask(name, b"detail\n")["where"] == []
            ends.gate.open()
            await calling


@pytest.mark.promise("top.nothing")
async def test_durations_are_measured_from_the_first_look() -> None:
    async with watched_ends() as (ends, name, _):
        ends.gate.open()
        await call("far", gated, 1)
        assert not timings.is_on
        await asyncio.to_thread(ask, name, b"brief\n")
        assert timings.is_on
        await call("far", gated, 1)
        assert "gated" in (await asyncio.to_thread(ask, name, b"brief\n"))["timings"]


@pytest.mark.promise("top.nothing")
async def test_nothing_is_measured_once_no_viewer_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_socket, "QUIET", 0.0)
    monkeypatch.setattr(snapshot_socket, "PROBE_INTERVAL", 0.001)
    async with watched_ends() as (_, name, _thread):
        await asyncio.to_thread(ask, name, b"brief\n")
        assert not timings.is_on


async def test_it_answers_while_the_loop_is_blocked() -> None:
    """And names what blocks it. The first look starts to measure."""
    async with watched_ends() as (_, name, _thread):
        ask(name, b"brief\n")  # blocks this loop, which is that of the worker
        time.sleep(snapshot_socket.BLOCKED)  # noqa: ASYNC251 - so that the loop counts as blocked
        found = ask(name, b"brief\n")["loop"]
    assert found["blocked"] >= snapshot_socket.BLOCKED
    assert found["function"] == "ask"


async def test_a_mute_viewer_does_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_socket, "REQUEST_TIMEOUT", 0.01)
    async with watched_ends() as (_, name, _thread):
        with socket.socket(socket.AF_UNIX) as mute:
            mute.connect(f"\0{name}")
            assert (await asyncio.to_thread(ask, name, b"brief\n"))["name"] == "far"


@pytest.mark.promise("security.users")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root connects as other users")
async def test_another_user_gets_nothing() -> None:
    async with watched_ends() as (_, name, _thread):
        assert await asyncio.to_thread(first_byte, name) == "b''\n"


async def test_a_worker_without_descriptors_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> socket.socket:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(snapshot_socket, "listen_unix", fail)
    async with two_ends() as ends:
        before = threads()
        with offered(ends.far, "unix://abc"):
            assert threads() == before


def test_the_name_of_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert world_name("env://") == "tcp://node0:29500"
    assert world_name("unix://abc") == "unix://abc"
