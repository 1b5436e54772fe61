"""Child processes for tests, forked from a process that has imported torch.

A spawned child imports torch for 1.2 to 2.5 s; a forked one starts in a tenth of that. It is as
clean, since its origin runs nothing but the import. Only for tests: the origin outlives the worlds,
and keeps what torch read at its import.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from .._world.child import process_factory

# Processes of multiprocessing that live as long as this one. Their names are private to CPython
# (3.11 to 3.14; tests/integration/test_testing.py, on children of a process with one thread).
_HELPERS: tuple[tuple[Any, str], ...] = (
    (resource_tracker._resource_tracker, "_pid"),
    (forkserver._forkserver, "_forkserver_pid"),
)


@contextlib.contextmanager
def forkserver_children() -> Iterator[None]:
    """Fork children that start in this block from a process that has imported torch."""
    token = process_factory.set(_forked)
    try:
        yield
    finally:
        process_factory.reset(token)


def helper_pids() -> set[int]:
    """Return the pids of multiprocessing's own processes, which are not leaks."""
    return {pid for helper, pid_of in _HELPERS if (pid := getattr(helper, pid_of, None))}


def _forked(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aiorpc_torch"])
    return context.Process(target=_main, args=(dict(os.environ), target, args), name=name)


def _main(environment: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A fork has the environment with which its origin started, perhaps many tests ago.
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
