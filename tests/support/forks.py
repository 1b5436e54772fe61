"""Methods that fork their worker's process, and calls that such a fork makes."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import rpc
from torch.utils.data import DataLoader, Dataset

import aiorpc_torch as aiorpc
from aiorpc_torch import autograd, batched, call, remote
from tests.support.actors import Counter

PATIENCE = 60.0
WENT_ON = 99  # exit code of a fork that ran code which it must not run


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: this process has threads
        return os.fork()


def exit_code(pid: int) -> int:
    """The exit code of a child; fails if it does not end."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the fork lives on")


def end(how: str) -> str:
    """How the code of a fork ends."""
    if how == "raise":
        raise ValueError("of a fork")
    if how == "exit":
        sys.exit(3)
    return "of a fork"


class Forker:
    """Each method forks, and returns the exit code of the fork."""

    def plain(self, how: str) -> Any:
        return exit_code(pid) if (pid := fork()) else end(how)

    async def coroutine(self, how: str) -> Any:
        if pid := fork():
            return await asyncio.to_thread(exit_code, pid)
        if how == "await":
            await asyncio.sleep(0)
            os._exit(WENT_ON)
        return end(how)

    def items(self, how: str) -> Iterator[Any]:
        yield exit_code(pid) if (pid := fork()) else end(how)
        if not pid:
            os._exit(WENT_ON)

    async def async_items(self, how: str) -> AsyncIterator[Any]:
        yield exit_code(pid) if (pid := fork()) else end(how)
        if not pid:
            os._exit(WENT_ON)

    @batched(max_size=2)
    def batch(self, hows: list[str]) -> list[Any]:
        return [exit_code(pid) if (pid := fork()) else end(how) for how in hows]

    @batched(max_size=2)
    async def async_batch(self, hows: list[str]) -> list[Any]:
        return [exit_code(pid) if (pid := fork()) else end(how) for how in hows]

    async def task(self, how: str) -> Any:
        """Fork in a task of its own; the code of the fork ends with its step."""
        asyncio.get_running_loop().call_soon(lambda: None)  # a callback that waits at the fork
        return await asyncio.create_task(self.coroutine(how))

    async def made(self, how: str) -> Any:
        return await remote(await aiorpc.create("a", ForkedAtItsStart, how)).code()


class ForkedAtItsStart:
    def __init__(self, how: str) -> None:
        self._code = self.forked(how)

    def forked(self, how: str) -> Any:
        return exit_code(pid) if (pid := fork()) else end(how)

    def code(self) -> Any:
        return self._code


def fork_at_start(path: str, name: str) -> None:
    """An initializer."""
    if pid := fork():
        with open(path, "a") as file:
            file.write(f"{exit_code(pid)}\n")


# ── forks that live on ──────────────────────────────────────────────────────────────────────────


def leave_a_fork(path: str, *, how: str) -> None:
    """Fork a process that keeps a FIFO open for ever."""
    if how == "fork":
        if not fork():
            live(path)
    elif how == "of a fork":
        if not fork():
            if not fork():
                live(path)
            os._exit(0)
    else:
        multiprocessing.get_context("fork").Process(target=live, args=(path,)).start()


def live(path: str) -> None:
    os.open(path, os.O_WRONLY)
    while True:  # a signal that waits for the interpreter is too late
        pass


async def leave_a_fork_on_the_loop(path: str) -> None:
    leave_a_fork(path, how="fork")


def terminated() -> int | None:
    """The exit code of a process of multiprocessing that is told to end."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE,))
    process.start()
    process.terminate()
    process.join(PATIENCE)
    return process.exitcode


# ── calls that forks make ───────────────────────────────────────────────────────────────────────


class Source(Counter):
    async def stream(self, count: int) -> AsyncIterator[int]:
        for each in range(count):
            yield each


class Caller:
    """A worker's object that has everything a call can be made with, and lets forks call."""

    async def prepare(self) -> None:
        self.counter = await aiorpc.create("b", Source)
        self.supervised = await aiorpc.supervised("b", Counter)
        self.members = aiorpc.members("counter")
        await self.members.wait()
        self.any = aiorpc.Group([self.counter]).any()
        self.items = aiter(remote(self.counter).stream(1000))
        assert await anext(self.items) == 0

    def calls(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        counter, large = self.counter, torch.ones(1 << 18)
        return {
            "small": lambda: remote(counter).add(1),
            "large": lambda: remote(counter).scale(large),
            "sparse": lambda: remote(counter).scale(torch.eye(3).to_sparse()),
            "by name": lambda: call("b", abs, -3),
            "a new peer": lambda: call("main", abs, -3),
            "itself": lambda: call("a", abs, -3),
            "a stream": lambda: _first(remote(counter).stream(3)),
            "an inherited stream": lambda: _all(self.items),
            "create": lambda: aiorpc.create("b", Counter),
            "supervised": lambda: remote(self.supervised).add(1),
            "fetch": lambda: aiorpc.fetch(counter),
            "a group": lambda: remote(aiorpc.Group([counter, counter])).add(1),
            "workers": lambda: call(["a", "b"], abs, -3),
            "members": lambda: remote(self.members).add(1),
            "members wait": lambda: self.members.wait(5),
            "any": lambda: remote(self.any).add(1),
            "with retries": lambda: remote(self.any, retries=3).add(1),
            "lookup": lambda: aiorpc.lookup("counter"),
            "register": lambda: _called(aiorpc.register, "another", Counter()),
            "a context": lambda: _entered(autograd.context()),
            "attach": lambda: _entered(aiorpc.attach()),
            "worker": lambda: _entered(aiorpc.worker("x", rank=0, world_size=1)),
            "local_world": lambda: _entered(aiorpc.local_world(["x"])),
            "rpc_sync": lambda: _called(rpc.rpc_sync, "b", abs, (-3,)),
            "rpc.remote": lambda: _called(rpc.remote, "b", abs, (-3,)),
            "to_here": lambda: _called(counter.to_here),
            "RRef.rpc_sync": lambda: _called(lambda: counter.rpc_sync().add(1)),
        }

    def call_all(self) -> list[str]:
        """The calls that did not raise at once what they have to, in a fork."""
        read, write = os.pipe()
        if pid := fork():
            os.close(write)
            code = exit_code(pid)
            with open(read) as file:
                return [*file.read().splitlines(), *([f"exit code {code}"] if code else [])]
        for name, make in self.calls().items():
            start = time.monotonic()
            try:
                text = f"{name}: returned {asyncio.run(_run(make))!r}"
            except aiorpc.NotInWorld as exc:
                seconds = time.monotonic() - start
                is_right = "forked from worker 'a'" in str(exc) and seconds < 1.0
                text = "" if is_right else f"{name}: {exc} after {seconds} s"
            except BaseException as exc:
                text = f"{name}: {exc!r}"
            if text:
                os.write(write, f"{text}\n".encode())
        os._exit(0)

    def drop_all(self) -> int:
        """The exit code of a fork that drops all of it."""
        if pid := fork():
            return exit_code(pid)
        vars(self).clear()
        gc.collect()
        return 0

    async def batch_in_a_fork(self) -> int:
        """The exit code of a fork that uses a batched method of its own object."""
        if pid := fork():
            return await asyncio.to_thread(exit_code, pid)
        return sys.exit(asyncio.run(_doubled(21)))

    async def next_item(self) -> Any:
        return await anext(self.items)

    async def value(self) -> int:
        return await remote(self.counter).add(0)


async def _doubled(number: int) -> int:
    return int(await Doubler().double(number))


class Doubler:
    @batched(max_size=2)
    def double(self, numbers: list[int]) -> list[int]:
        return [2 * each for each in numbers]


async def _run(make: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(PATIENCE / 4):
        return await make()


async def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


async def _first(stream: Any) -> Any:
    async for each in stream:
        return each


async def _all(stream: Any) -> Any:
    return [each async for each in stream]


async def _entered(world: Any) -> None:
    async with world:
        pass


# ── DataLoaders ─────────────────────────────────────────────────────────────────────────────────


class Numbers(Dataset[torch.Tensor]):
    """Ten numbers; the last one calls a worker."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            with contextlib.suppress(aiorpc.NotInWorld):
                index = asyncio.run(_run(lambda: call("b", abs, -1000)))
        return torch.tensor(index)


def loaded(epochs: int) -> Sequence[float]:
    """The sums of what forked processes of a DataLoader have loaded, in some epochs."""
    loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")
    return [float(sum(loader)) for _ in range(epochs)]


async def loaded_on_the_loop(epochs: int) -> Sequence[float]:
    return loaded(epochs)
