"""Events of calls in traces of `torch.profiler`, where one records this thread."""

from typing import Any

from .compat import begin_record, profiler_enabled

__all__ = ("call_event", "profiler_enabled")


def call_event(side: str, method: str, caller: str, callee: str) -> Any:
    """Begin an event; it ends when the returned object is released.

    The side is "call" at the caller, "serve" at the callee.
    """
    return begin_record(f"aiorpc_{side}#{method}({caller} -> {callee})", None)
