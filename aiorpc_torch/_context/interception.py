"""Interceptors: code of users and of `observe` that is told when calls begin and end.

While there are none, they cost a call two look-ups: it asks `propagation.used or TRACER in modules`
in place, and calls `is_needed` only then.
"""

import contextlib
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Literal

from .._wire.messages import Carried
from . import propagation

log = logging.getLogger("aiorpc_torch")

End = Callable[[BaseException | None], object]
"""Is called once, with what the call has raised, None for a result."""

Kind = Literal["call", "stream", "group", "map", "batch"]


@dataclass(frozen=True, slots=True)
class CallInfo:
    """A call, as an `Interceptor` is told of it.

    Attributes:
        kind: `call`, `stream`, `group`, `map` or `batch`. The calls of a group's or a map's members
            are a `call` each.
        method: Name of the method or function, with its class where that is known.
        worker: Name of this worker.
        peer: Name of the other worker; empty for a group, a map and a batch.
        began: `time.monotonic()` at which the call was made here, or arrived here. The difference
            to now is the time that it has waited.
        size: Members of a group or map, calls in a batch, otherwise 1.
    """

    kind: Kind
    method: str
    worker: str
    peer: str
    began: float
    size: int = 1


class Interceptor:
    """Base class of code that is told of the calls of this process: see `intercept`.

    A method that returns a function has it called once, at the end of the call, with the exception
    or None. That may be in another thread and another context. An exception of a method or of such
    a function is logged, and changes nothing for the call.
    """

    def on_call(self, call: CallInfo) -> End | None:
        """Note a call that is made here, before it is sent.

        Variables of `propagate` that it sets travel with this call alone. What it sets for a group
        or map is seen by the calls of the members.
        """
        return None

    def on_receive(self, call: CallInfo) -> End | None:
        """Note a call that begins here, in the context that its method will run in.

        The method sees what this sets. A call that joins a batch has a context of its own.
        """
        return None

    def on_batch(self, batch: CallInfo, callers: Sequence[Context]) -> End | None:
        """Note a batch that begins here, in the context that the batched function will run in.

        Args:
            batch: The batch.
            callers: The context of each of its calls, as it joined.
        """
        return None


interceptors: tuple[Interceptor, ...] = ()


def intercept(interceptor: Interceptor) -> Callable[[], None]:
    """Tell an interceptor of all calls of this process from now on; return how to end that.

    What it does is added to the time of each call. Calls from several event loops and threads reach
    it at the same time.

    Raises:
        TypeError: if it is not an instance of `Interceptor`.
    """
    global interceptors
    if not isinstance(interceptor, Interceptor):
        raise TypeError(f"intercept takes an instance of Interceptor, got {interceptor!r}")
    interceptors = (*interceptors, interceptor)
    propagation.used = True

    def remove() -> None:
        global interceptors
        interceptors = tuple(each for each in interceptors if each is not interceptor)

    return remove


# ── interceptors that another library switches on ───────────────────────────────────────────────

TRACER = "opentelemetry.trace"
"""The module without which no tracer can be set: while it is not imported, no call asks further."""

TRACING = "aiorpc_torch.observe.tracing"  # imported when a provider is set, and not before

_is_tracing = False
_lock = threading.Lock()


def is_needed() -> bool:
    """Return whether a call has to look for variables and interceptors.

    If a tracer provider of OpenTelemetry was set since, calls are traced from now on.
    """
    if TRACER in sys.modules and not _is_tracing:
        _start_tracing()
    return propagation.used


def _start_tracing() -> None:
    global _is_tracing
    api: Any = sys.modules[TRACER]
    # Private, and None until a provider is set: `get_tracer_provider` reads the environment, 1 µs.
    if getattr(api, "_TRACER_PROVIDER", api) is None:
        return
    try:
        if isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):  # none is set
            return
    except AttributeError:  # another thread still imports it
        return
    with _lock:
        if not _is_tracing:
            _is_tracing = True  # also if it fails: it would fail for each call
            try:
                intercept(importlib.import_module(TRACING).Tracing())
            except Exception as exc:
                log.warning("calls are not traced: %r", exc)


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


def begin_call(call: CallInfo) -> tuple[Carried, End | None]:
    """Note a call that is about to be sent; return what travels with it, and its end."""
    if not interceptors:
        return propagation.collect(), None
    context = copy_context()
    end = context.run(_tell, "on_call", call)
    try:
        return context.run(propagation.collect), end
    except BaseException as exc:
        if end is not None:
            end(exc)
        raise


def begin_group(call: CallInfo) -> tuple[Context, End | None]:
    """Note a group or a map; return the context of its members' calls, and its end."""
    context = copy_context()
    return context, context.run(_tell, "on_call", call)


def enter_call(call: CallInfo, carried: Carried) -> End | None:
    """Make the current context that of a received call; return its end."""
    propagation.restore(carried)
    return _tell("on_receive", call)


def enter_batch(batch: CallInfo, callers: Sequence[Context]) -> End | None:
    """Make the current context that of a batch; return its end."""
    propagation.restore_common(callers)
    return _tell("on_batch", batch, callers)


def caller_context() -> Context | None:
    """Return a copy of the context of a call that joins a batch, None if it is not needed."""
    return copy_context() if is_needed() else None


def _tell(hook: str, call: CallInfo, *args: Any) -> End | None:
    ends: list[End] = []
    for each in interceptors:
        try:
            end = getattr(each, hook)(call, *args)
        except BaseException as exc:  # SystemExit, say: a caller would wait for ever
            log.warning("%s of %r failed for %s: %r", hook, each, call.method, exc)
        else:
            if end is not None:
                ends.append(end)
    return functools.partial(_end, ends, call.method) if ends else None


def _end(ends: list[End], method: str, failure: BaseException | None) -> None:
    """Call each end, the last one first, and once: an event loop and a thread may end one call."""
    with contextlib.suppress(IndexError):  # none is left
        while True:
            end = ends.pop()
            try:
                end(failure)
            except BaseException as exc:
                log.warning("an interceptor failed at the end of %s: %r", method, exc)
