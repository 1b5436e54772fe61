"""Processes of a local world's children: forked from a server, or with new interpreters."""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from .._aio.waiting import announced
from .._node.config import is_list_of_names
from ..errors import WorldTimeout
from . import forkserver

Start = Literal["forkserver", "spawn"]
Logs = Literal["names"]

ProcessFactory = Callable[[Callable[..., Any], tuple[Any, ...], str], BaseProcess]
"""A function that makes a process of a target function, its arguments and a name."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """The checked options of a local world for the start of its children."""

    start: Start = "forkserver"
    preload: Sequence[str] = ()
    logs: Logs | None = None

    def __post_init__(self) -> None:
        if self.logs not in (None, "names"):
            raise ValueError(f'logs must be "names" or None, got {self.logs!r}')
        if self.start not in ("forkserver", "spawn"):
            raise ValueError(f'start must be "forkserver" or "spawn", got {self.start!r}')
        if not is_list_of_names(self.preload):
            raise TypeError(f"preload must be a tuple of module names, got {self.preload!r}")

    async def factory(self, timeout: float) -> ProcessFactory:
        """Return the factory of the children, once their server is ready if they have one.

        Raises:
            WorldTimeout: if it is not ready in `timeout` seconds.
            ImportError, RuntimeError: as `ForkServer.ready`.
        """
        if self.start == "spawn":
            return spawned_process
        with stop_signals_blocked():
            server = forkserver.obtain(self.preload)
        names = ", ".join(("torch", *self.preload))
        try:
            with announced(f"children wait until their server has imported {names}"):
                await server.ready(timeout)
        except TimeoutError:
            raise WorldTimeout(
                f"the process that forks the children did not import {names} within {timeout:g} s",
                [],
            ) from None
        return server.process


def spawned_process(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Return a process with a new interpreter."""
    # Not "fork", which copies the locks of torch's threads but not the threads.
    return multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)


STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Let processes that this thread starts in the block have Ctrl-C and SIGTERM blocked."""
    # Both may go to all processes of a program, and a child that is still importing torch would
    # print a traceback, or die. A child inherits the mask, until `child_main` installs handlers.
    # multiprocessing's tracker unblocks the signals when it starts: so it starts first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
