"""A cast of processes in a world of `rpc.init_rpc`, which run functions for tests, step by step."""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import rpc

PATIENCE = 40.0  # seconds for anything that a test waits for
TORCH_THREADS = 3


def _play(
    pipe: Connection, name: str, rank: int, names: Sequence[str], url: str, prepare: str
) -> None:
    if prepare == "bare":  # as where the package is not installed
        for module in [each for each in sys.modules if each.startswith("aiorpc_torch")]:
            sys.modules[module] = None  # type: ignore[assignment]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=url, num_worker_threads=TORCH_THREADS, _transports=["uv"]
    )
    rpc.init_rpc(name, rank=rank, world_size=len(names), rpc_backend_options=options)
    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send(("done", function(*args)))
        except BaseException as exc:
            pipe.send(("failed", f"{type(exc).__name__}: {exc}"))
    os._exit(0)


@dataclasses.dataclass
class Player:
    """One process of a cast."""

    name: str
    process: Any
    pipe: Connection

    def start(self, function: Callable[..., Any], *args: Any) -> "Player":
        """Run a function of a module in the main thread of the process."""
        self.pipe.send((function, args))
        return self

    def result(self) -> Any:
        """Return what the function returned; what it raised fails the test."""
        assert self.pipe.poll(PATIENCE), f"{self.name} does not answer"
        kind, value = self.pipe.recv()
        assert kind != "failed", f"{self.name}: {value}"
        return value

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.start(function, *args).result()


@contextlib.contextmanager
def cast(*names: str, **prepare: str) -> Iterator[dict[str, Player]]:
    """Start processes in one world of torch's; `prepare` says what is special about one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aiorpc_torch"])
    players = {}
    with tempfile.TemporaryDirectory() as folder:
        for rank, name in enumerate(names):
            ours, theirs = context.Pipe()
            args = (theirs, name, rank, names, f"file://{folder}/store", prepare.get(name, ""))
            process = context.Process(target=_play, args=args, name=name, daemon=True)
            process.start()
            theirs.close()
            players[name] = Player(name, process, ours)
        try:
            for each in players.values():
                each.result()
            yield players
        finally:
            for each in players.values():
                each.process.kill()
                each.process.join()
                each.process.close()
                each.pipe.close()


# ── what the players have between two steps ─────────────────────────────────────────────────────

_stack = contextlib.ExitStack()
me: Any = None  # of `enter`


def enter(**options: Any) -> None:
    """Attach in a thread, until `leave`."""
    import aiorpc_torch as aiorpc

    global me
    me = _stack.enter_context(aiorpc.attach_in_thread(**options))


def leave() -> None:
    _stack.close()


@functools.cache
def event(name: str) -> threading.Event:
    """An event of this process."""
    return threading.Event()


def set_event(name: str) -> None:
    event(name).set()


def wait_for(name: str) -> None:
    assert event(name).wait(PATIENCE)
