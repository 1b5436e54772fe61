"""Events of calls in traces of `torch.profiler`, where one records this thread.

An event that ends while another profiler runs than the one that it began under is written to freed
memory (2.13, 2.15): the process ends with a segmentation fault. So a profiler that stops ends the
events of its thread. (tests/loopback/test_profiler.py)
"""

import threading
from typing import Any
from weakref import WeakSet

from .compat import begin_record, on_profiler_stop, profiler_enabled

__all__ = ("call_event", "profiler_enabled")


class _Event:
    """An event, which ends when this object is released, or its profiler stops."""

    __slots__ = ("__weakref__", "record")

    def __init__(self, name: str) -> None:
        self.record: Any = begin_record(name, None)


class _Events(threading.local):
    """The events of this thread that have not ended."""

    def __init__(self) -> None:
        self.open: WeakSet[_Event] = WeakSet()


_events = _Events()


def call_event(side: str, method: str, caller: str, callee: str) -> Any:
    """Begin an event; it ends when the returned object is released.

    The side is "call" at the caller, "serve" at the callee.
    """
    event = _Event(f"aiorpc_{side}#{method}({caller} -> {callee})")
    _events.open.add(event)
    return event


def _end_events() -> None:
    for event in _events.open:
        event.record = None
    _events.open.clear()


on_profiler_stop(_end_events)
