"""Children for tests: forked from a process that has imported torch, so they are there at once.

A spawned child imports torch for 1.2 to 2.5 s; one that is forked from such a process is there in a
tenth of that and is as fresh: the process that it comes from runs nothing but the import. Not for
programs: that process outlives their worlds, and what torch reads when it is imported is as it was.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from .._world.child import new_process

# multiprocessing's helpers, which live as long as this process does.
_HELPERS: tuple[tuple[Any, str], ...] = (
    (resource_tracker._resource_tracker, "_pid"),
    (forkserver._forkserver, "_forkserver_pid"),
)


@contextlib.contextmanager
def warm_children() -> Iterator[None]:
    """Children that start in this block are forked from a process that has imported torch."""
    token = new_process.set(_forked)
    try:
        yield
    finally:
        new_process.reset(token)


def helpers() -> set[int]:
    """The pids of multiprocessing's own processes: no world's, and nobody's leak."""
    return {pid for helper, pid_of in _HELPERS if (pid := getattr(helper, pid_of, None))}


def _forked(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aiorpc_torch"])
    return context.Process(target=_live, args=(dict(os.environ), target, args), name=name)


def _live(environment: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A fork has the environment in which its origin started, perhaps many tests ago.
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
