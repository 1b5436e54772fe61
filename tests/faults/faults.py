"""The faults of the search: each is injected once, before one step of a run."""

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass

from aiorpc_torch import CallTimeout, RpcError

from . import inside
from .loop import SteppingLoop
from .operations import WORLDS
from .watching import scrape

DEADLINE = 0.4  # seconds; less than what a closed connection waits for


class Injected(MemoryError):
    """Raised by the search."""


@dataclass(frozen=True)
class Fault:
    """What happens at a step.

    Attributes:
        name: of the tests.
        steps: "callback", "write" (frames of a connection), "torch" (messages of torch RPC),
            "chunk" (of a tensor, at either end of a socket), "memory" (for tensors that arrive) or
            "watch" (what interceptors and exporters of spans are told).
        act: is called with the caller's task before the step.
        allowed: exceptions that the operation may end with.
        has_deadline: whether the operation runs under a deadline.
        leaves: whether the world ends at that step.
        is_of_watching: whether only watched worlds meet it.
        way: of large tensors that has such steps, "" for all.
    """

    name: str
    steps: str
    act: Callable[["asyncio.Task[object]"], object]
    allowed: tuple[type[BaseException], ...]
    has_deadline: bool = False
    leaves: bool = False
    is_of_watching: bool = False
    way: str = ""


def _cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()


def _expire(_: "asyncio.Task[object]") -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppingLoop)
    loop.clock.offset += DEADLINE * 1.1


def _raise(_: "asyncio.Task[object]") -> None:
    raise Injected("injected: cannot allocate memory")


def _raise_as_torch(_: "asyncio.Task[object]") -> None:
    raise RuntimeError("injected: cannot allocate memory")


def _raise_as_socket(_: "asyncio.Task[object]") -> None:
    raise ConnectionResetError("injected: the socket has failed")


def _raise_as_memory(_: "asyncio.Task[object]") -> None:
    raise OSError(errno.ENOMEM, "injected: cannot allocate memory")


_LOST = (RpcError, asyncio.CancelledError)  # a callee's task that was cancelled answers so

FAULTS = (
    Fault("cancel", "callback", _cancel, (asyncio.CancelledError,)),
    Fault("deadline", "callback", _expire, (CallTimeout,), has_deadline=True),
    Fault("cancel at the callee", "callback", lambda _: inside.cancel_at_callee(), _LOST),
    Fault("end at the caller", "callback", lambda _: inside.end_at_caller(), _LOST),
    Fault("end at the callee", "callback", lambda _: inside.end_at_callee(), _LOST),
    Fault("lost peer", "callback", lambda _: inside.lose_peer(), _LOST),
    Fault("cancel while writing", "write", _cancel, (asyncio.CancelledError,)),
    Fault("writing raises", "write", _raise, (*_LOST, Injected)),
    Fault("torch raises", "torch", _raise_as_torch, _LOST),
    Fault("watching raises", "watch", _raise, (), is_of_watching=True),
    Fault("scrape", "callback", lambda _: scrape(), (), is_of_watching=True),
    Fault("socket fails", "chunk", _raise_as_socket, _LOST, way="sockets"),
    Fault("no memory", "memory", _raise_as_memory, (), way="sockets"),
    Fault("leave", "callback", lambda _: None, _LOST, leaves=True),
)


def is_possible(fault: Fault, around: str, way: str) -> bool:
    """Return whether an operation that runs there, with tensors on that way, can meet the fault."""
    if fault.is_of_watching:
        return around == "watched"
    return (not fault.leaves or around in WORLDS) and fault.way in ("", way)
