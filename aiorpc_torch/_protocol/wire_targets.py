"""Targets of calls as a message holds them: as names, or pickled if they have none.

A name is a kind of target, a module and a path in it, so a reader with `exports=` compares text and
imports nothing. What has no such name is pickled: a function that travels by value, a partial, an
object that can be called. (tests/unit/protocol/test_wire_targets.py)
"""

import functools
import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.rrefs import RRefId, SharingMode, deserialize_rref, serialize_rref
from .by_value import NAMED, NotByName, explain, refuse_by_value
from .exceptions import RemoteFailure, try_add_note
from .pickling import PickledValue, pack, unpack
from .plain import dump, reader
from .targets import BoundTarget, CreateTarget, FetchTarget, FunctionTarget, MethodTarget, Target

METHOD, BOUND, FUNCTION, CREATE, FETCH = "method", "bound", "function", "create", "fetch"


class NamedTarget(NamedTuple):
    """A target by names.

    Attributes:
        kind: Which target it is.
        on: RRef id of the object, an RRef that only torch can resolve, as it travels, or None.
        name: Name of a method; for a function or class its path in `module`.
        module: Module of a function or class.
    """

    kind: str
    on: RRefId | bytes | None
    name: str = ""
    module: str = ""


EncodedTarget = NamedTarget | PickledValue
"""A target to send: by names, or pickled."""


def encode_target(target: Target, on: RRefId | None) -> EncodedTarget:
    """Return the target as sent, with the RRef id `on`, unless None, instead of its RRef."""
    if type(target) is MethodTarget:  # the common case
        return NamedTarget(METHOD, _object(target, on), target.name)
    if isinstance(target, FetchTarget):
        return NamedTarget(FETCH, _object(target, on))
    kind, function = _parts(target)
    if (name := name_of(function)) is not None:
        return NamedTarget(kind, _object(target, on), *name)
    if on is not None and isinstance(target, BoundTarget):
        target = target._replace(on=on)
    return pack(target)


def _object(target: Target, on: RRefId | None) -> RRefId | bytes | None:
    if on is not None:
        return on
    found = target.on
    return found if found is None or isinstance(found, tuple) else dump(serialize_rref(found))


def _parts(target: Target) -> tuple[str, Callable[..., Any]]:
    if isinstance(target, CreateTarget):
        return CREATE, target.factory
    assert isinstance(target, BoundTarget | FunctionTarget)
    return BOUND if isinstance(target, BoundTarget) else FUNCTION, target.function


def name_of(function: Any) -> tuple[str, str] | None:
    """Return path and module by which a peer finds a function or class, None if by none."""
    owner, last = function, ""
    if isinstance(function, _OF_OWNERS):
        reduced = function.__reduce__()  # as pickle sees it: its name, or its owner's attribute
        if not isinstance(reduced, str):
            owner, last = reduced[1]
            if not isinstance(owner, type):  # an object, which has a state
                return None
    elif not isinstance(function, NAMED) and not hasattr(type(function), "__aiorpc_reduce__"):
        return None
    try:
        refuse_by_value(owner)
    except NotByName:
        return None
    return _resolved_name(function, owner, last)


# An entry keeps its function alive. A function without a name of its own has none.
@functools.lru_cache(maxsize=1024)
def _resolved_name(function: Any, owner: Any, last: str) -> tuple[str, str] | None:
    module = owner.__module__ or owner.__self__.__name__  # some of torch's do not know theirs
    path = f"{owner.__qualname__}.{last}" if last else owner.__qualname__
    try:
        found = find(path, module)
    except Exception:
        return None
    return (path, module) if found is function or found == function else None


_OF_OWNERS = (
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
)


def find(path: str, module: str) -> Any:
    """Return what has that name; import its module. Raises what importing raises."""
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def decode_target(target: NamedTarget | bytes, tensors: Sequence[Tensor]) -> Any:
    """Return the target, or a RemoteFailure if it cannot be read; `tensors` are of its pickle."""
    if isinstance(target, bytes):
        return unpack(target, tensors)
    try:
        return read_named(target, find)
    except BaseException as exc:  # a module may raise even SystemExit
        exc = explain(exc)
        try_add_note(exc, "(while looking up what the other worker named)")
        return RemoteFailure.of(exc, "the receiver")


def read_named(target: NamedTarget, find_named: Callable[[str, str], Any]) -> Target:
    """Return the target that names stand for.

    Args:
        target: The names.
        find_named: Returns the function or class of a path in a module.

    Raises:
        ValueError: if the target is malformed.
        Exception: what `find_named` raises.
    """
    kind, on, name, module = target
    where: Any = deserialize_rref(*_read_rref(on)) if isinstance(on, bytes) else on
    if kind not in _KINDS or (kind in (FUNCTION, CREATE)) is not (where is None):
        raise ValueError(f"malformed target of a call: {target!r}")
    if kind == METHOD:
        return MethodTarget(where, name)
    if kind == FETCH:
        return FetchTarget(where)
    function = find_named(name, module)
    if kind == BOUND:
        return BoundTarget(where, function)
    return CreateTarget(function) if kind == CREATE else FunctionTarget(function)


_KINDS = METHOD, BOUND, FUNCTION, CREATE, FETCH
_read_rref = reader(tuple[tuple[int, int, int, int, int, int, str], SharingMode])
