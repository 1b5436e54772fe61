"""The end of objects that callers have created: `aclose()` or `close()`, called once.

torch does not tell that the last RRef of an object was dropped; it only releases the object. So the
class of a created object gets a `__del__` that keeps the object for its end. Types whose attributes
cannot be set, such as files, end by themselves when they are freed.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from .._aio.tasks import detach_task, warn_if_blocking
from .._aio.threads import run_in_thread
from .._protocol.exclusive import is_exclusive, own_turn
from .._protocol.runtime import runs_on_loop

log = logging.getLogger("aiorpc_torch")

CANCEL_TIMEOUT = 0.5  # seconds for an `aclose` to end after its cancellation

Finalizer = Callable[[Any], None]
"""The `__del__` that a class has of its own."""


class CreatedObjects:
    """The objects on one worker that have an end. Ends run on the loop of this worker.

    Args:
        call_on_loop: runs a function on that loop; callable from any thread.
    """

    def __init__(self, call_on_loop: Callable[[Callable[[], None]], None]) -> None:
        self._call_on_loop = call_on_loop
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._ending: dict[asyncio.Task[None], str] = {}

    def add(self, found: Any) -> None:
        """End this object when it is released, or in `close`. In any thread."""
        key = id(found)
        if key in self._alive or end_of(found) is None:
            return
        has_hook = _has_hook(type(found))
        forget = None if has_hook else lambda _: self._alive.pop(key, None)
        try:
            self._alive[key] = weakref.ref(found, forget)
        except TypeError:  # its class has no weak references
            return
        if has_hook:
            _owners[key] = self

    def revive(self, found: Any, finalizer: Finalizer | None) -> bool:
        """Keep a released object for its end; return whether it has one. In any thread."""
        if self._alive.pop(id(found), None) is None:
            return False
        self._call_on_loop(functools.partial(self._begin_end, found, finalizer))
        return True

    def _begin_end(self, found: Any, finalizer: Finalizer | None = None) -> None:
        name = f"{type(found).__qualname__}.{end_of(found)}"
        coroutine = _end(found, name, finalizer)
        # In an empty context: under no deadline.
        task = asyncio.get_running_loop().create_task(
            coroutine, name=name, context=contextvars.Context()
        )
        self._ending[task] = name
        task.add_done_callback(lambda task: self._ending.pop(task, None))

    async def close(self, timeout: float) -> None:
        """End every object that is left. An end that takes over `timeout` seconds is cancelled."""
        refs, self._alive = self._alive, {}
        for key, ref in [*refs.items()]:
            if (found := ref()) is not None:
                _owners.pop(key, None)
                self._begin_end(found)
        if not self._ending:
            return
        _, late = await asyncio.wait([*self._ending], timeout=timeout)
        names = {task: self._ending[task] for task in late}
        for task in late:
            task.cancel()
        for task in late and (await asyncio.wait(late, timeout=CANCEL_TIMEOUT))[1]:
            detach_task(task, names[task])
        for name in names.values():
            log.error("%s did not end within %g s", name, timeout)


async def _end(found: Any, name: str, finalizer: Finalizer | None) -> None:
    try:
        if is_exclusive(found):
            async with own_turn(found, name):
                await _call_end(found, name)
        else:
            await _call_end(found, name)
        if finalizer is not None:  # Python calls it once only, and the object was kept instead
            finalizer(found)
    except asyncio.CancelledError:
        raise
    except BaseException as exc:  # of the user's own code
        log.error("%s of a created object failed", name, exc_info=exc)


async def _call_end(found: Any, name: str) -> None:
    end = getattr(found, end_of(found) or "")
    if runs_on_loop(end):
        result = end()
    else:
        result = await run_in_thread(end, "aiorpc-close")
    if inspect.iscoroutine(result):
        await warn_if_blocking(result, name)
    elif inspect.isawaitable(result):
        await result


def end_of(found: Any) -> str | None:
    """Return the name of the method that ends an object: "aclose", else "close", else None."""
    for name in ("aclose", "close"):
        method = getattr(type(found), name, None)  # not of a proxy, which has any attribute
        if callable(method) and _takes_nothing(method):
            return name
    return None


def _takes_nothing(method: Any) -> bool:
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a builtin without a signature
        pass
    return True


# ── release ─────────────────────────────────────────────────────────────────────────────────────

_owners: dict[int, CreatedObjects] = {}  # by the object's id

_HOOK = "__aiorpc_hook__"


def _has_hook(cls: type) -> bool:
    """Let the release of an instance of `cls` begin its end; return whether that is possible."""
    finalizer = getattr(cls, "__del__", None)
    if hasattr(finalizer, _HOOK):
        return True

    def release(self: Any) -> None:
        owner = _owners.pop(id(self), None)
        if (owner is None or not owner.revive(self, finalizer)) and finalizer is not None:
            finalizer(self)

    setattr(release, _HOOK, True)
    try:
        cls.__del__ = release  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # a type of C, or one whose attributes cannot be set
        return False
    return True
