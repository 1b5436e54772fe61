"""Heads of received groups of calls: resolved once in a session, and verified at each group."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import Tensor

from .._protocol.exclusive import is_exclusive, turns_of
from .._protocol.runtime import runs_on_loop
from .._torch import rrefs
from .._wire.exceptions import RemoteFailure
from .._wire.messages import CallHead
from .._wire.targets import CreateTarget, MethodTarget, Target, order_key
from .._wire.wire_targets import decode_target
from .calls import CreateCall, Joiner, RpcCall, batch_joiner
from .exclusive import unguarded
from .exclusive_calls import Entrance, ExclusiveCall, ExclusiveStream
from .exports import ExportPolicy
from .stream_writer import StreamCall

Resolved = tuple[Callable[..., Any], bool, Joiner | Entrance | None, Callable[..., RpcCall]]
"""The function of a group of calls, whether it starts on the loop, what its calls join or enter,
and their class."""


class KnownHead:
    """The head of groups of calls, read once in a session, and the method that it named last.

    It refers to the object weakly. While the object and its function are those of the last call, no
    other look-up is needed.
    """

    __slots__ = ("_function", "_join", "_kind", "_object", "_on_loop", "_target", "key", "wire")

    def __init__(self, data: bytes) -> None:
        self.wire = CallHead(data)
        self._target: Any = self.wire.target
        self.key: Any = None  # of the object, whose calls stay in order
        self._object: Callable[[], Any] = _nothing
        self._function: Any = None
        self._on_loop = False
        self._join: Callable[..., Any] | None = None
        self._kind: Callable[..., RpcCall] = RpcCall

    def resolve(self, tensors: Iterator[Tensor], exports: ExportPolicy | None) -> Resolved:
        """Return the function of a group; take the tensors of its target.

        Raises an exception of any class if the object is gone, the call is not exported, or user
        code raises.
        """
        owner = self._object()
        if owner is not None:
            function = getattr(owner, self._target.name, None)
            if type(function) is MethodType and function.__func__ is self._function:
                join = self._join
                # Its own object's batches: it may be a method of another object.
                joiner = None if join is None else functools.partial(join, function.__self__)
                return function, self._on_loop, joiner, self._kind
        return self._resolve_again(self.wire.tensors_of_target(tensors), exports)

    def _resolve_again(self, tensors: Sequence[Tensor], exports: ExportPolicy | None) -> Resolved:
        decode = decode_target if exports is None else exports.load_target
        target: Any = decode(self._target, tensors)
        if isinstance(target, RemoteFailure):
            target.raise_()
        self.key, self._object = order_key(target), _nothing
        owner = None if target.on is None else rrefs.find_object(target.on)
        found = _resolve_on(owner, target, exports, self.wire.stream)
        function: Any = found[0]
        _, on_loop, joiner, kind = found
        is_method = isinstance(target, MethodTarget) and type(function) is MethodType
        if is_method and function.__self__ is owner and type(joiner) is not Entrance:
            with contextlib.suppress(TypeError):  # its class has no weak references
                self._object = weakref.ref(owner)
            self._function, self._on_loop, self._kind = function.__func__, on_loop, kind
            self._join = joiner.func if isinstance(joiner, functools.partial) else None
        return found


def _resolve_on(owner: Any, target: Target, exports: ExportPolicy | None, stream: bool) -> Resolved:
    if exports is not None:
        exports.check(target, owner)
    function = target.bind(owner)
    on_loop, joiner = runs_on_loop(function), batch_joiner(function)
    # A batch takes the turn when it runs. If its calls took it when they join, each would wait for
    # the batch of the one before.
    if joiner is None and is_exclusive(owner):
        entrance = Entrance(turns_of(owner), on_loop)
        kind = ExclusiveStream if stream else ExclusiveCall
        return unguarded(function), True, entrance, kind
    if isinstance(target, CreateTarget):
        return function, on_loop, joiner, CreateCall
    if stream:
        return function, on_loop, None, StreamCall
    return function, on_loop, joiner, RpcCall


def _nothing() -> None:
    """Return no object: none is remembered."""
