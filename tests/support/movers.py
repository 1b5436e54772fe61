"""Workers that a test commands by pipes, for worlds whose directory moves."""

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

import aiorpc_torch as aiorpc
from aiorpc_torch._directory.directory_server import DirectoryServer

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds


class Mover:
    """A worker in a process of its own.

    Args:
        prefix: words before its command.
        options: those of `worker`; `tls` is the files of `Tls`.
    """

    def __init__(self, name: str, prefix: Sequence[str] = (), **options: Any) -> None:
        self.name = name
        arguments = json.dumps({"name": name, **options})
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.support.movers", arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[Any] = []
        self._heard = threading.Condition()
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._errs)]
        for each in self._readers:
            each.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self._lines.append(json.loads(line))
                self._heard.notify()
        with self._heard:
            self._lines.append(["ended", None])
            self._heard.notify()

    def _errs(self) -> None:
        assert self.process.stderr is not None
        self._errors += self.process.stderr

    def hear(self, word: str) -> Any:
        """Wait for an event; return its value."""
        end = time.monotonic() + PATIENCE
        with self._heard:
            while time.monotonic() < end:
                for index, (found, value) in enumerate(self._lines):
                    if found == word:
                        del self._lines[index]
                        return value
                    assert found != "ended" or word == "ended", self.errors()
                self._heard.wait(end - time.monotonic())
        raise TimeoutError(f"{self.name}: {word} {self._lines} {self.errors()}")

    def has_said(self, word: str) -> bool:
        """Return whether there is an event that was not heard."""
        with self._heard:
            return any(found == word for found, _ in self._lines)

    def errors(self) -> str:
        """Return what it has logged, and the tracebacks."""
        return "".join(self._errors)

    def logs(self, text: str) -> None:
        """Wait until it has logged a text."""
        end = time.monotonic() + PATIENCE
        while text not in self.errors():
            if self.process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"{self.name} did not log {text!r}: {self.errors()}")
            time.sleep(0.01)

    def ask(self, word: str, *args: Any) -> Any:
        self.tell(word, *args)
        return self.hear(word)

    def tell(self, word: str, *args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([word, *args]) + "\n")
        self.process.stdin.flush()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> int:
        """Let it leave its world, unless it does so already; return the exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.tell("end")
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def leave(self) -> None:
        """Let it leave while the others go on, and wait for its end."""
        self.ask("leave")
        assert self.process.wait(PATIENCE) == 0, self.errors()

    def end_by(self, how: str) -> None:
        """Let it be killed, freeze or leave."""
        {"kill": self.kill, "freeze": self.freeze, "leave": self.leave}[how]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        for each in self._readers:
            each.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def all_call_all(workers: Sequence[Mover]) -> None:
    """Let each worker call each other one."""
    pids = {each.name: each.process.pid for each in workers}
    for each in workers:
        found = {name: each.ask("call", name) for name in pids if name != each.name}
        assert found == {name: pid for name, pid in pids.items() if name != each.name}


def check_directories(workers: Sequence[Mover]) -> None:
    """Check that at no time two workers, which are alive, kept a directory."""
    found = sorted((*times, each.name) for each in workers for times in each.ask("directories"))
    print("directories:", *found)
    for (_, end, _), (start, _, _) in itertools.pairwise(found):
        assert end <= start, found


def end_all(workers: Sequence[Mover]) -> None:
    """Let the workers leave together."""
    for each in workers:
        with contextlib.suppress(BrokenPipeError):
            each.tell("end")
    for each in workers:
        assert each.end() == 0, each.errors()


# ── in the process ──────────────────────────────────────────────────────────────────────────────


def tell(event: str, value: Any = None) -> None:
    print(json.dumps([event, value]), flush=True)


async def pid_of(name: str) -> int:
    return await aiorpc.call(name, os.getpid)


def ports() -> list[list[Any]]:
    """Return the addresses and ports at which this process listens, but for loopback ones."""
    found = psutil.Process().net_connections("tcp")
    listening = {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
    return sorted([ip, port] for ip, port in listening if not ip.startswith("127."))


def follow_directories() -> list[tuple[float, float]]:
    """Return a list of the times from which and until which a directory here lets others enter.

    The clock is that of `time.monotonic`, one for all processes of a machine.
    """
    found: list[tuple[float, float]] = []
    renew = DirectoryServer._renew

    async def followed(server: DirectoryServer) -> None:
        start = time.monotonic()
        found.append((start, math.inf))
        try:
            await renew(server)
        finally:
            found[found.index((start, math.inf))] = start, time.monotonic()

    DirectoryServer._renew = followed  # type: ignore[method-assign]
    return found


async def live(options: dict[str, Any]) -> None:
    """Enter a world and obey commands."""
    if "tls" in options:
        options["tls"] = aiorpc.Tls(*options["tls"])
    directories = follow_directories()
    calling: asyncio.Task[tuple[int, float]] | None = None
    stop = asyncio.Event()
    async with aiorpc.worker(**options) as me:
        tell("in", [me.rank, me.restarts, me.coordinator])
        while True:
            line = await asyncio.to_thread(sys.stdin.readline)
            word, *args = json.loads(line or '["end"]')
            match word:
                case "end":
                    break
                case "block":  # and then end
                    tell("block")
                    sys.stdin.readline()
                    break
                case "leave":
                    await me.leave()
                    tell("leave")
                    break
                case "call":
                    tell("call", await aiorpc.call(args[0], os.getpid))
                case "call all":
                    tell("call all", {name: await pid_of(name) for name in me.peers})
                case "who":
                    tell("who", me.coordinator)
                case "coordinator":
                    while me.coordinator != args[0]:  # noqa: ASYNC110 - nothing tells of it
                        await asyncio.sleep(0.01)
                    tell("coordinator", me.coordinator)
                case "directories":
                    tell("directories", directories)
                case "ports":
                    tell("ports", ports())
                case "keep calling":
                    end = time.monotonic() + args[1]
                    until = lambda end=end: time.monotonic() > end  # noqa: E731
                    tell("keep calling", await keep_calling(args[0], until))
                case "begin calling":
                    calling = asyncio.create_task(keep_calling(args[0], stop.is_set))
                case "end calling":
                    stop.set()
                    assert calling is not None
                    tell("end calling", await calling)
                case _:
                    raise ValueError(word)


async def keep_calling(name: str, is_over: Callable[[], bool]) -> tuple[int, float]:
    """Call a worker again and again; return how often, and the longest call in seconds."""
    count, longest = 0, 0.0
    while not is_over():
        start = time.monotonic()
        await aiorpc.call(name, os.getpid)
        count, longest = count + 1, max(longest, time.monotonic() - start)
        await asyncio.sleep(0.001)
    return count, longest


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    asyncio.run(live(json.loads(sys.argv[1])))
