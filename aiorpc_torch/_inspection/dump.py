"""A report of calls in flight and of all stacks on SIGUSR1, for a worker that hangs.

`faulthandler` writes the stacks of threads in the signal handler itself, also while the loop is
blocked. The rest is written by Python, as soon as the main thread runs Python code.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from .._aio.places import awaited_by
from .calls_in_flight import pending

log = logging.getLogger("aiorpc_torch")

VARIABLE = "AIORPC_TORCH_DUMP_ON_SIGUSR1"
"""Environment variable; with the value 1 workers install the handler."""


@contextlib.contextmanager
def dump_on_signal() -> Iterator[None]:
    """Write a report to stderr on SIGUSR1 in this block, if the environment asks for it."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        yield
        return
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        log.warning("%s has no effect: SIGUSR1 has a handler, or this is no main thread", VARIABLE)
        yield
        return
    output, loop = sys.__stderr__ or sys.stderr, asyncio.get_running_loop()
    signal.signal(
        signal.SIGUSR1, lambda number, frame: print(report(loop), file=output, flush=True)
    )
    faulthandler.register(signal.SIGUSR1, output, all_threads=True, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def report(loop: asyncio.AbstractEventLoop) -> str:
    """Return the calls in flight and the stacks of the tasks of `loop`, as text."""
    calls = pending()
    lines = [f"{len(calls)} calls in flight in process {os.getpid()}, the oldest first:"]
    for call in calls:
        way = "from" if call.incoming else "to"
        lines.append(f"  {call.method} {way} worker {call.worker!r}, {call.age:.2f} s")
    for task in asyncio.all_tasks(loop):
        lines += [f"Task {task.get_name()!r}:", *stack_of(task.get_coro())]
    return "\n".join(lines)


def stack_of(awaited: Any) -> Iterator[str]:
    """Describe the frames of a coroutine and of those that it awaits, the outermost first."""
    for _, frame in awaited_by(awaited):
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_qualname}'
