"""The end of objects that callers have created: `aclose()` or `close()`, called once.

torch does not tell that the last RRef of an object was dropped; it only releases the object. A weak
reference tells it when the object is gone, which is too late to call a method. Python keeps a
released object for the `__del__` of its class alone (PEP 442). So the class of a created object has
such a `__del__` while its worker is in its world. Types whose attributes cannot be set, such as
files, end by themselves when they are freed. (tests/unit/server/test_created.py)

Other ways were rejected. A second reference hides the release, and keeps a cycle for ever. A holder
behind the RRef is what `local_value()` and plain torch clients would get. A subclass is not the
class as which objects are pickled.
"""

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from .._aio.identity import WeakIdentityDict
from .._aio.tasks import Steps, detach_task
from .._aio.threads import run_in_thread
from .._endpoint.runtime import runs_on_loop
from .._text import printable
from .._turns.turns import is_limited, turns_of

log = logging.getLogger("aiorpc_torch")

CANCEL_TIMEOUT = 0.5  # seconds for an `aclose` to end after its cancellation

Finalizer = Callable[[Any], None]
"""The `__del__` that a class has of its own."""

_REPLACED = "__aiorpc_replaced__"
"""Attribute of our `__del__`: the one that the class defines itself, else None."""


class CreatedObjects:
    """The objects created on one worker that have `aclose()` or `close()`, which ends them."""

    def __init__(self, call_on_loop: Callable[[Callable[[], None]], None]) -> None:
        self._call_on_loop = call_on_loop  # runs a function on that loop; in any thread
        self._alive: dict[int, weakref.ref[Any]] = {}  # by the object's id
        self._released: deque[tuple[Any, Finalizer | None]] = deque()
        self._ending: dict[asyncio.Task[None], str] = {}
        self._lock = threading.Lock()  # for what follows
        self._hooked: WeakIdentityDict[type, bool] = WeakIdentityDict()  # have our `__del__`
        self._is_closed = False

    def add(self, instance: Any) -> None:
        """End this object when it is released, or in `close`. In any thread."""
        key = id(instance)
        known = self._alive.get(key)
        if end_of(instance) is None or (known is not None and known() is instance):
            return
        has_hook = self._hook(type(instance))
        forget = None if has_hook else lambda _: self._alive.pop(key, None)
        with contextlib.suppress(TypeError):  # its class has no weak references
            self._alive[key] = weakref.ref(instance, forget)

    def _hook(self, cls: type) -> bool:
        """Let the release of instances begin their ends; return whether that is possible."""
        with self._lock:
            if self._is_closed or self._hooked.get(cls):
                return not self._is_closed
            finalizer = getattr(cls, "__del__", None)

            def release(instance: Any) -> None:
                if self._alive.pop(id(instance), None) is not None:
                    self._released.append((instance, finalizer))
                    self._call_on_loop(self._end_released)
                elif finalizer is not None:
                    finalizer(instance)

            setattr(release, _REPLACED, vars(cls).get("__del__"))
            try:
                cls.__del__ = release  # type: ignore[attr-defined]
            except (AttributeError, TypeError):  # a type of C, or one whose attributes are fixed
                return False
            self._hooked.set(cls, True)
            return True

    def _end_released(self) -> None:
        while self._released:
            self._begin_end(*self._released.popleft())

    def _begin_end(self, instance: Any, finalizer: Finalizer | None = None) -> None:
        name = printable(f"{type(instance).__qualname__}.{end_of(instance)}")
        coroutine = _end(instance, name, finalizer)
        # In an empty context: under no deadline.
        task = asyncio.get_running_loop().create_task(
            coroutine, name=name, context=contextvars.Context()
        )
        self._ending[task] = name
        task.add_done_callback(lambda task: self._ending.pop(task, None))

    async def close(self, timeout: float) -> None:
        """End every object that is left. An end that takes over `timeout` seconds is cancelled."""
        with self._lock:
            self._is_closed = True
        refs, self._alive = self._alive, {}
        self._end_released()
        for ref in [*refs.values()]:
            if (instance := ref()) is not None:
                self._begin_end(instance)
        # Not sooner: from Python 3.13 on, a class whose attributes have changed a thousand times
        # loses the interpreter's caches.
        for cls in self._hooked.owners():
            hooked: Any = cls
            replaced = getattr(vars(cls).get("__del__"), _REPLACED, cls)
            if replaced is None:
                del hooked.__del__
            elif replaced is not cls:  # else another one has replaced ours since
                hooked.__del__ = replaced
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


async def _end(instance: Any, name: str, finalizer: Finalizer | None) -> None:
    try:
        turn = turns_of(instance).hold(name) if is_limited(instance) else contextlib.nullcontext()
        async with turn:
            end = getattr(instance, end_of(instance) or "")
            result = end() if runs_on_loop(end) else await run_in_thread(end, "aiorpc-close")
            if inspect.iscoroutine(result):
                await Steps(result, name)
            elif inspect.isawaitable(result):
                await result
        if finalizer is not None:  # Python calls it once only, and the object was kept instead
            finalizer(instance)
    except asyncio.CancelledError:
        raise
    except BaseException as exc:  # of the user's own code
        log.error("%s of a created object failed", name, exc_info=exc)


def end_of(instance: Any) -> str | None:
    """Return the name of the method that ends an object: "aclose", else "close", else None."""
    for name in ("aclose", "close"):
        method = getattr(type(instance), name, None)  # not of a proxy, which has any attribute
        if not callable(method):
            continue
        try:
            inspect.signature(method).bind(None)
        except TypeError:  # it takes arguments
            continue
        except ValueError:  # of a builtin without a signature
            pass
        return name
    return None
