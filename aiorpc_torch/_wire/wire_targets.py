"""Targets of calls as a message holds them: as names, or pickled if they have none.

A name is a kind of target, a module and a path in it, so a reader with `exports=` compares text and
imports nothing. What has no such name is pickled: a function that travels by value, a partial, an
object that can be called. (tests/unit/wire/test_wire_targets.py)
"""

import copyreg
import functools
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.modules import python_function
from .._torch.rrefs import RRefId, SharingMode, deserialize_rref, serialize_rref, take_back
from .buffers import NOTHING, Outside
from .by_value import NAMED, explain, find, refuse_by_value
from .exceptions import RemoteFailure, try_add_note
from .pickling import PickledValue, pack, unpack
from .plain import are_plain_names, dump, reader
from .targets import (
    BoundTarget,
    CreateTarget,
    FetchTarget,
    FunctionTarget,
    MakeTarget,
    MethodTarget,
    Target,
)

METHOD, BOUND, MAKE, FETCH = "method", "bound", "make", "fetch"  # of an object
FUNCTION, CREATE = "function", "create"


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
    if isinstance(target, MethodTarget):  # the common case
        return NamedTarget(METHOD, _object(target, on), target.name)
    if isinstance(target, FetchTarget):
        return NamedTarget(FETCH, _object(target, on))
    if (name := name_of(target.function)) is not None:
        return NamedTarget(_KINDS[type(target)], _object(target, on), *name)
    if on is not None and isinstance(target, BoundTarget | MakeTarget):
        target = target._replace(on=on)
    return pack(target)


def _object(target: Target, on: RRefId | None) -> RRefId | bytes | None:
    if on is not None:
        return on
    found = target.on
    return found if found is None or isinstance(found, tuple) else dump(serialize_rref(found))


def name_of(function: Any) -> tuple[str, str] | None:
    """Return path and module by which a peer finds a function or class, None if by none."""
    try:
        name = _global_name(function)
    except Exception:  # it travels by value, or has a state
        return None
    # A metaclass may define an equality, or forbid hashing.
    kind: Any = type(function)
    is_hashable = isinstance(function, _OF_OWNERS) or kind.__hash__ is object.__hash__
    return name if (_finds_once if is_hashable else _finds)(function, *name) else None


def _global_name(function: Any) -> tuple[str, str]:
    """Return path and module in which plain pickle looks for a function or class.

    Raises an exception of any class if it looks in none.
    """
    function = python_function(function)
    owner, last = function, ""
    if not isinstance(function, NAMED) and not hasattr(type(function), "__aiorpc_reduce__"):
        kind: Any = type(function)
        reduced = copyreg.dispatch_table.get(kind, kind.__reduce__)(function)
        if isinstance(reduced, str):
            last = reduced  # of an object of a module
        else:  # of a class and its attribute
            getter, (owner, last) = reduced
            if getter is not getattr or not isinstance(owner, type):
                raise TypeError(f"{function!r} has a state")
    if isinstance(owner, NAMED) or hasattr(type(owner), "__aiorpc_reduce__"):
        refuse_by_value(owner)
        last = f"{owner.__qualname__}.{last}" if last else owner.__qualname__
    if "<" in last:
        raise AttributeError(f"no module has {last}")
    # Some of torch's functions do not know their module.
    module = getattr(owner, "__module__", None)
    module = module or getattr(getattr(owner, "__self__", None), "__name__", None)
    return last, module or pickle.whichmodule(owner, last)  # type: ignore[attr-defined]


def _finds(function: Any, path: str, module: str) -> bool:
    """Return whether `find` returns this function, and a message can hold its name."""
    try:
        found = find(path, module)
    except Exception:
        return False
    is_same = found is function or (isinstance(function, _OF_OWNERS) and found == function)
    return is_same and are_plain_names((path, module))


# An entry keeps its function alive. A function without a name of its own has none.
_finds_once = functools.lru_cache(maxsize=1024)(_finds)


_OF_OWNERS = (
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
)


def decode_target(
    target: NamedTarget | bytes, tensors: Sequence[Tensor], outside: Outside = NOTHING
) -> Any:
    """Return the target, or a RemoteFailure if it cannot be read.

    `tensors` and `outside` are those of its `PickledValue`.
    """
    if isinstance(target, bytes):
        return unpack(target, tensors, outside)
    try:
        return read_named(target, find)
    except BaseException as exc:  # a module may raise even SystemExit
        exc = explain(exc)
        try_add_note(exc, "(while looking up what the other worker named)")
        return RemoteFailure.of(exc, "the receiver")


def read_named(target: NamedTarget, find_named: Callable[[str, str], Any]) -> Target:
    """Return the target that names stand for; `find_named` is as `find`.

    Raises:
        ValueError: if the target is malformed.
        Exception: what `find_named` raises.
    """
    kind, on, name, module = target
    where: Any = deserialize_rref(*_read_rref(on)) if isinstance(on, bytes) else on
    make = _TARGETS.get(kind)
    if make is None or (kind in (FUNCTION, CREATE)) is not (where is None):
        raise ValueError(f"malformed target of a call: {target!r}")
    if kind == METHOD:
        return MethodTarget(where, name)
    if kind == FETCH:
        return FetchTarget(where)
    function = find_named(name, module)
    return make(function) if where is None else make(where, function)


_TARGETS: dict[str, Callable[..., Target]] = {
    METHOD: MethodTarget,
    BOUND: BoundTarget,
    MAKE: MakeTarget,
    FUNCTION: FunctionTarget,
    CREATE: CreateTarget,
    FETCH: FetchTarget,
}
_KINDS: dict[Any, str] = {target: kind for kind, target in _TARGETS.items()}


def forget_unsent(target: EncodedTarget, cells: Sequence[Any]) -> None:
    """Drop what is kept for the receiver of a call that was not sent: forks of RRefs, and loans."""
    if type(target) is NamedTarget and type(target.on) is bytes:
        take_back(*_read_rref(target.on))
    for each in (target, *cells):
        if type(each) is PickledValue:
            for sent in each.rrefs:
                take_back(*sent)


_read_rref = reader(tuple[tuple[int, int, int, int, int, int, str], SharingMode])
