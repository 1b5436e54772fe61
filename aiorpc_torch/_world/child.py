"""One child process that is a worker: its start, the pipe to it, and its end.

The pipe carries a word from the parent (`LEAVE` or `CANCEL`) and, if the child fails, its failure
to the parent. Its end is the sign of death, both ways: the kernel closes it however a process goes.
"""

import asyncio
import atexit
import contextlib
import enum
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from .._protocol.exceptions import Failure
from ..errors import WorkerLost
from .config import Place, Worker
from .worker import take_place

Main = Callable[..., Awaitable[Any]]


NewProcess = Callable[[Callable[..., Any], tuple[Any, ...], str], BaseProcess]


def spawned(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> BaseProcess:
    """A process of its own, from nothing."""
    # Not "fork", which copies torch's threads' locks but not its threads.
    return multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)


new_process: ContextVar[NewProcess] = ContextVar("new_process", default=spawned)
"""How children are made, which `_warm` knows to do faster."""


class Word(enum.Enum):
    """What a parent tells a child."""

    LEAVE = "leave"  # everybody is leaving: a child that only serves leaves too
    CANCEL = "cancel"  # something went wrong, or Ctrl-C: stop now


class Child:
    """A process that takes `place` in a world and there runs `main(me, *args)`, or only serves."""

    def __init__(self, place: Place, main: Main | None, args: tuple[Any, ...]) -> None:
        self.name = place.name
        self.ended: asyncio.Future[BaseException | None] = asyncio.Future()
        self._failure: BaseException | None = None
        # Ours stays open until `close`: its end would be our death to the child.
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = new_process.get()(live, (theirs, place, main, args), place.name)
        with _sigint_held_back():
            self._process.start()
        theirs.close()
        _alive.add(self)
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._listen)

    def __repr__(self) -> str:
        return f"<Child {self.name}, {'ended' if self.ended.done() else 'running'}>"

    def tell(self, word: Word) -> None:
        """Send the child a word; it may have ended."""
        with contextlib.suppress(OSError):
            self._pipe.send(word)

    def _listen(self) -> None:
        try:
            self._failure = self._pipe.recv().exception()
        except (EOFError, OSError):
            self.forget()
            self._process.join(0.5)  # the kernel closes its files just before it is reaped
            self.ended.set_result(self._failure or self._death())

    def forget(self) -> None:
        """Watch the child no longer."""
        self.ended.get_loop().remove_reader(self._pipe.fileno())

    def _death(self) -> BaseException | None:
        code = self._process.exitcode
        return None if code == 0 else WorkerLost(self.name, f"its process ended with code {code}")

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, if it has not ended."""
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        _alive.discard(self)
        self._process.close()
        self._pipe.close()


@contextlib.contextmanager
def _sigint_held_back() -> Iterator[None]:
    # Ctrl-C goes to the whole group of processes, and a child that is still importing torch would
    # print a traceback. The mask is inherited; `live` puts a handler in its place.
    # multiprocessing's tracker unblocks the signal when it starts: so it starts first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_alive: set[Child] = set()


@atexit.register
def _end_all() -> None:
    # Before multiprocessing's own exit function, which waits for children: those of a world that
    # was never left wait for this process.
    for child in _alive:
        child.kill()


# ── in the child ────────────────────────────────────────────────────────────────────────────────


class _Parent:
    """The other end of the pipe: hears the parent's words, and its death, in a thread."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._word: Word | None = None
        self._tell: Callable[[Word], None] | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="aiorpc-parent", daemon=True).start()

    def on_word(self, tell: Callable[[Word], None]) -> None:
        """Call `tell` with each word, that which has come already included."""
        with self._lock:
            self._tell = tell
            if self._word is not None:
                tell(self._word)

    def report(self, exc: BaseException, name: str) -> None:
        """Tell the parent of a failure."""
        with contextlib.suppress(OSError):
            self._pipe.send(Failure.of(exc, name))

    def _listen(self) -> None:
        try:
            while True:
                self._heard(self._pipe.recv())
        except (EOFError, OSError):
            # The parent is gone, perhaps by kill -9: nobody is left to do anything for.
            os._exit(1)

    def _heard(self, word: Word) -> None:
        with self._lock:
            self._word = word
            if self._tell is not None:
                self._tell(word)


def live(pipe: Connection, place: Place, main: Main | None, args: tuple[Any, ...]) -> NoReturn:
    """The whole life of a child."""
    # A handler, not SIG_IGN, which programs started from here would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = _Parent(pipe)
    code = 0
    try:
        asyncio.run(_work(parent, place, main, args))
    except asyncio.CancelledError:
        pass  # the parent said so
    except BaseException as exc:
        parent.report(exc, place.name)  # raised, and its traceback printed once, in the parent
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    # As a forked child of multiprocessing ends: exit functions run and streams are flushed, but
    # the interpreter is not taken down, for which torch needs a second of every core.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


async def _work(parent: _Parent, place: Place, main: Main | None, args: tuple[Any, ...]) -> None:
    loop, task, leave = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert task is not None
    obey: dict[Word, Callable[[], object]] = {Word.LEAVE: leave.set, Word.CANCEL: task.cancel}
    parent.on_word(lambda word: _soon(loop, obey[word]))
    async with take_place(place) as me:
        await (_serve(me, leave) if main is None else main(me, *args))


def _soon(loop: asyncio.AbstractEventLoop, act: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself meanwhile
        loop.call_soon_threadsafe(act)


async def _serve(me: Worker, leave: asyncio.Event) -> None:
    await leave.wait()
