"""A role of examples/week.py that can be made to hang: SIGUSR1 keeps the GIL for ever.

SIGUSR2 prints the stacks of its tasks and threads. Everything else that happens to it comes from
outside.
"""

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import signal
import sys
import time

from examples import week


def hang(*_: object) -> None:
    """Do not return, and keep the GIL, as a fault of C code may."""
    ctypes.PyDLL(None).pause()


def dump(*_: object) -> None:
    """Print where the tasks stand, on stderr; faulthandler prints the threads."""
    print(f"{time.time():.1f}: tasks", file=sys.stderr)
    with contextlib.suppress(RuntimeError):  # the event loop does not run
        for each in asyncio.all_tasks():
            each.print_stack()


def run(given: argparse.Namespace) -> None:
    """Play a role in this process."""
    signal.signal(signal.SIGUSR1, hang)
    signal.signal(signal.SIGUSR2, dump)
    faulthandler.register(signal.SIGUSR2, chain=True)
    week.run(given)


if __name__ == "__main__":
    week.start(run, week.parse())
