"""Workers that a test commands by pipes, for worlds whose directory moves."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiorpc_torch as aiorpc

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds


class Mover:
    """A worker in a process of its own."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        arguments = json.dumps({"name": name, **options})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.movers", arguments],
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

    def errors(self) -> str:
        return "".join(self._errors)

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


# ── in the process ──────────────────────────────────────────────────────────────────────────────


def tell(event: str, value: Any = None) -> None:
    print(json.dumps([event, value]), flush=True)


async def pid_of(name: str) -> int:
    return await aiorpc.call(name, os.getpid)


async def live(options: dict[str, Any]) -> None:
    """Enter a world and obey commands."""
    async with aiorpc.worker(**options) as me:
        tell("in", [me.rank, me.restarts, me.coordinator])
        while True:
            line = await asyncio.to_thread(sys.stdin.readline)
            word, *args = json.loads(line or '["end"]')
            match word:
                case "end":
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
                case "keep calling":
                    tell("keep calling", await keep_calling(args[0], args[1]))
                case _:
                    raise ValueError(word)


async def keep_calling(name: str, seconds: float) -> tuple[int, float]:
    """Call a worker again and again; return how often, and the longest call in seconds."""
    count, longest, end = 0, 0.0, time.monotonic() + seconds
    while (start := time.monotonic()) < end:
        await aiorpc.call(name, os.getpid)
        count, longest = count + 1, max(longest, time.monotonic() - start)
        await asyncio.sleep(0.001)
    return count, longest


if __name__ == "__main__":
    asyncio.run(live(json.loads(sys.argv[1])))
