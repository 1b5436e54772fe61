"""Readers and the writer: whole values, no starvation, no deadlock."""

import asyncio
import contextvars
import threading

import pytest

from aiorpc_torch import CallTimeout, timeout
from aiorpc_torch.training import holds as module
from aiorpc_torch.training.holds import Holds


async def steps(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def write(holds: Holds, log: list[str]) -> None:
    async with holds.writing():
        log.append("written")


async def test_the_writer_waits_for_readers_and_new_readers_for_the_writer() -> None:
    holds, log = Holds(), list[str]()
    async with holds.in_task():
        writer = asyncio.create_task(write(holds, log))
        await steps()

        async def read() -> None:
            async with holds.in_task():
                log.append("read")

        reader = asyncio.create_task(read(), context=contextvars.Context())
        await steps()
        assert log == []
    await asyncio.gather(writer, reader)
    assert log == ["written", "read"]


async def test_threads_are_readers_too() -> None:
    holds, log, entered, leave = Holds(), list[str](), threading.Event(), threading.Event()

    def read() -> None:
        with holds.in_thread():
            entered.set()
            leave.wait()
            log.append("read")

    reader = asyncio.create_task(asyncio.to_thread(read))
    await asyncio.to_thread(entered.wait)
    writer = asyncio.create_task(write(holds, log))
    await steps()
    assert log == []
    leave.set()
    await asyncio.gather(writer, reader)
    assert log == ["read", "written"]


async def test_a_reader_inside_a_reader_does_not_wait() -> None:
    """Also one of another task or thread with the context of the outer one, which it outlives."""
    holds, log, leave = Holds(), list[str](), asyncio.Event()

    def in_thread() -> None:
        with holds.in_thread():
            log.append("thread")

    async def inner() -> None:
        async with holds.in_task():
            await leave.wait()
            log.append("inner")

    async with holds.in_task():
        writer = asyncio.create_task(write(holds, log))
        await steps()
        async with holds.in_task():
            await asyncio.to_thread(in_thread)
        task = asyncio.create_task(inner())
        await steps()
    await steps()
    assert log == ["thread"]
    assert not holds.is_held_here()
    leave.set()
    await asyncio.gather(writer, task)
    assert log == ["thread", "inner", "written"]


async def test_readers_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new reader waits for a limited time: an earlier one may wait for it."""
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    holds, log = Holds(), list[str]()

    def read() -> None:
        with holds.in_thread():
            log.append("read in thread")

    async def read_in_task() -> None:
        async with holds.in_task():
            log.append("read in task")

    async with holds.in_task():
        writer = asyncio.create_task(write(holds, log))
        await steps()
        await asyncio.get_running_loop().run_in_executor(None, read)
        await asyncio.create_task(read_in_task(), context=contextvars.Context())
    await writer
    assert log == ["read in thread", "read in task", "written"]


async def test_a_writer_that_gives_up_lets_readers_in() -> None:
    holds, log = Holds(), list[str]()
    async with holds.in_task():
        with timeout(0.01), pytest.raises(CallTimeout):
            await write(holds, log)
        task = asyncio.create_task(write(holds, log))
        await steps()
        task.cancel()
        await asyncio.wait([task])
        with holds._condition:
            assert not holds._is_writing
    await write(holds, log)
    assert log == ["written"]


async def test_a_writer_behind_another_has_its_own_deadline() -> None:
    """The first one has none, and its reader may stay for long."""
    holds, log = Holds(), list[str]()
    async with holds.in_task():
        first = asyncio.create_task(write(holds, log))
        await steps()
        async with asyncio.timeout(30):
            with timeout(0.01), pytest.raises(CallTimeout):
                await write(holds, log)
        assert holds._is_writing
    await first
    assert log == ["written"]


async def test_who_is_out_of_patience_does_not_enter_as_the_value_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    holds, log, started = Holds(), list[str](), threading.Event()

    def read() -> None:
        started.set()
        with holds.in_thread():
            log.append("read")

    async with holds.writing():
        with holds.placing() as is_free:
            assert is_free
            reader = threading.Thread(target=read)
            reader.start()
            started.wait()
            reader.join(0.05)
            log.append("replaced")
        await asyncio.to_thread(reader.join)
    assert log == ["replaced", "read"]
    assert holds.entries == 1
