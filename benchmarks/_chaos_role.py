"""A role of examples/week.py that can be made to hang: SIGUSR1 keeps the GIL for ever.

Everything else that happens to it comes from outside.
"""

import argparse
import ctypes
import signal

from examples import week


def hang(*_: object) -> None:
    """Do not return, and keep the GIL, as a fault of C code may."""
    ctypes.PyDLL(None).pause()


def run(given: argparse.Namespace) -> None:
    """Play a role in this process."""
    signal.signal(signal.SIGUSR1, hang)
    week.run(given)


if __name__ == "__main__":
    week.start(run, week.parse())
