"""A cast of processes in a world of `rpc.init_rpc`, which run functions for tests, step by step."""

import contextlib
import dataclasses
import importlib.abc
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import rpc

from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._node.attachments import Attachments

PATIENCE = 60.0  # seconds for anything that a test waits for
TORCH_THREADS = 3


class _NotInstalled(importlib.abc.MetaPathFinder):
    """Finds nothing of the package, as where it is not installed."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.startswith("aiorpc_torch"):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _play(pipe: Connection, name: str, rank: int, size: int | None, url: str, prepare: str) -> None:
    if prepare == "bare":
        for module in [each for each in sys.modules if each.startswith("aiorpc_torch")]:
            del sys.modules[module]
        sys.meta_path.insert(0, _NotInstalled())
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=url, num_worker_threads=TORCH_THREADS, _transports=["uv"]
    )
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    pipe.send((0, "ready", None))
    while (job := pipe.recv()) is not None:
        number, function, args = job
        try:
            pipe.send((number, "done", function(*args)))
        except BaseException as exc:
            pipe.send((number, "failed", f"{type(exc).__name__}: {exc}"))
    os._exit(0)


@dataclasses.dataclass
class Player:
    """One process of a cast."""

    name: str
    process: Any
    pipe: Connection
    jobs: int = 0

    def start(self, function: Callable[..., Any], *args: Any) -> "Player":
        """Run a function of a module in the main thread of the process."""
        self.jobs += 1
        self.pipe.send((self.jobs, function, args))
        return self

    def result(self) -> Any:
        """Return what the function returned; what it raised fails the test."""
        number = -1
        while number != self.jobs:  # else of a test that has failed
            assert self.pipe.poll(PATIENCE), f"{self.name} does not answer"
            number, kind, value = self.pipe.recv()
        assert kind != "failed", f"{self.name}: {value}"
        return value

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.start(function, *args).result()

    def end(self) -> None:
        if self.pipe.closed:
            return
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


Start = Callable[[str, str], Player]
Enter = Callable[..., contextlib.AbstractContextManager[Player]]


@contextlib.contextmanager
def cast(*names: str, **prepare: str) -> Iterator[dict[str, Player]]:
    """Start processes in one world of torch's; `prepare` says what is special about one."""
    with _starting(len(names)) as start:
        players = {name: start(name, prepare.get(name, "")) for name in names}
        for each in players.values():
            each.result()
        yield players


@contextlib.contextmanager
def dynamic_group() -> Iterator[Enter]:
    """Yield a function that enters a process into a group without a world size, in a block."""
    with _starting(None) as start:

        @contextlib.contextmanager
        def enter_group(name: str, prepare: str = "") -> Iterator[Player]:
            player = start(name, prepare)
            try:
                player.result()
                yield player
            finally:
                player.end()

        yield enter_group


@contextlib.contextmanager
def _starting(size: int | None) -> Iterator[Start]:
    """Yield a function that starts the process of the next rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aiorpc_torch"])
    players: list[Player] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str, prepare: str) -> Player:
            ours, theirs = context.Pipe()
            args = (theirs, name, len(players), size, f"file://{folder}/store", prepare)
            process = context.Process(target=_play, args=args, name=name, daemon=True)
            process.start()
            theirs.close()
            players.append(Player(name, process, ours))
            return players[-1]

        try:
            yield start
        finally:
            for each in players:
                each.end()


# ── what the players have between two steps ─────────────────────────────────────────────────────

_stack = contextlib.ExitStack()
me: Any = None  # of `enter`


def enter(**options: Any) -> None:
    """Attach in a thread, until `leave`."""
    import aiorpc_torch as aiorpc

    global me
    me = _stack.enter_context(aiorpc.in_thread(aiorpc.attach(**options)))


def leave() -> None:
    _stack.close()


_events: dict[str, threading.Event] = {}


def event(name: str) -> threading.Event:
    """An event of this process. In any thread."""
    return _events.setdefault(name, threading.Event())


def set_event(name: str) -> None:
    event(name).set()


def clear_event(name: str) -> None:
    event(name).clear()


def wait_for(name: str) -> None:
    assert event(name).wait(PATIENCE)


def gather_names() -> tuple[dict[str, str], list[str]]:
    """Return what torch's own helpers know of the workers; without aiorpc_torch."""
    from torch.distributed.rpc import api

    gathered = api._all_gather(rpc.get_worker_info().name)
    return gathered, sorted(api._ALL_WORKER_NAMES)


# ── faults in such a process ─────────────────────────────────────────────────────────────────

_tell: list[Any] = []


def speak(version: bytes) -> bytes:
    """Speak another version of the protocol from now on; return the one before."""
    before: bytes = entry_points.VERSION  # type: ignore[attr-defined]
    entry_points.VERSION = version  # type: ignore[attr-defined]
    return before


def keep_leaving_to_itself() -> None:
    """Let torch's messages tell the peers that this process attaches, not that it leaves."""
    tell = Attachments.tell

    async def tell_entry(self: Attachments, is_attached: bool) -> None:
        if is_attached:
            await tell(self, is_attached)

    _tell.append(tell)
    Attachments.tell = tell_entry  # type: ignore[method-assign]


def tell_again() -> None:
    """Let those messages tell it again."""
    Attachments.tell = _tell.pop() if _tell else Attachments.tell  # type: ignore[method-assign]
