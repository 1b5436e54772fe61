"""Methods that lone calls name: resolved once in a session, and verified at each call."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from .._protocol.exclusive import is_exclusive, turns_of
from .._protocol.lone import decode_method
from .._protocol.runtime import runs_on_loop
from .._protocol.targets import Target
from .._torch import rrefs
from .calls import Joiner, batch_joiner
from .exclusive import unguarded
from .exclusive_calls import Entrance
from .exports import ExportPolicy

Resolved = tuple[Callable[..., Any], bool, Joiner | Entrance | None]
"""The function of a target, whether it starts on the loop, and what it joins or enters."""


def resolve(target: Target, exports: ExportPolicy | None) -> Resolved:
    """Return the function of a target.

    Raises an exception of any class if the object is gone, the call is not exported, or user code
    raises.
    """
    owner = None if target.on is None else rrefs.find_object(target.on)
    return _resolve_on(owner, target, exports)


def _resolve_on(owner: Any, target: Target, exports: ExportPolicy | None) -> Resolved:
    if exports is not None:
        exports.check(target, owner)
    function = target.bind(owner)
    on_loop, joiner = runs_on_loop(function), batch_joiner(function)
    if joiner is None and is_exclusive(owner):  # a batch takes the turn when it runs
        return unguarded(function), True, Entrance(turns_of(owner), on_loop)
    return function, on_loop, joiner


class LoneMethod:
    """Cache of one resolved method, for the lone calls that name it by the same `encoded` target.

    It refers to the object weakly. While the object and its function are those of the last call, no
    other look-up is needed. Otherwise the target is resolved like that of any other call.
    """

    __slots__ = ("_function", "_join", "_object", "_on_loop", "target")

    def __init__(self, encoded: bytes) -> None:
        self.target = decode_method(encoded)
        self._object: Callable[[], Any] = _nothing
        self._function: Any = None
        self._on_loop = False
        self._join: Callable[..., Any] | None = None

    def resolve(self, exports: ExportPolicy | None) -> Resolved:
        """Return the function now. Raises the same as `resolve`."""
        owner = self._object()
        if owner is not None:
            function = getattr(owner, self.target.name, None)
            if type(function) is MethodType and function.__func__ is self._function:
                join = self._join
                return function, self._on_loop, join and functools.partial(join, owner)
        return self._resolve_again(exports)

    def _resolve_again(self, exports: ExportPolicy | None) -> Resolved:
        owner = rrefs.find_object(self.target.on)
        function, on_loop, joiner = found = _resolve_on(owner, self.target, exports)
        self._object = _nothing
        if type(joiner) is Entrance:
            return found
        if type(function) is MethodType and function.__self__ is owner:
            with contextlib.suppress(TypeError):  # its class has no weak references
                self._object = weakref.ref(owner)
            self._function, self._on_loop = function.__func__, on_loop
            self._join = joiner.func if isinstance(joiner, functools.partial) else None
        return found


def _nothing() -> None:
    """Return no object: none is remembered."""
