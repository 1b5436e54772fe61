"""Context variables whose values travel with calls, from the caller's context to the method's.

A variable is known by its name at both ends. The callee unpickles the values when it enters the
context of a call, so not before the call's target was checked.
"""

import pickle
from collections.abc import Sequence
from contextvars import Context, ContextVar
from typing import Any

from .._wire.exceptions import try_add_note
from .._wire.messages import Carried
from .._wire.plain import is_wire_text

MAX_BYTES = 64 << 10  # of the pickled values of one call

variables: dict[str, ContextVar[Any]] = {}

used = False
"""Whether calls carry variables, or interceptors are told of them. Each call reads it."""

_UNSET: Any = object()


def propagate(var: ContextVar[Any]) -> None:
    """Let the value of a context variable travel with each call and stream.

    The method and the calls that it makes see the value of their caller. It is pickled for each
    call, so keep it small. Where the caller has not set the variable, the method sees the value of
    its worker's start. A batch sees the value that all its callers have, and none if they differ.

        REQUEST = ContextVar("myapp.request", default="")
        aiorpc.observe.propagate(REQUEST)  # in every process, in a module that all import

    Both ends have to call this: the variable is known by its name. A callee ignores names that it
    does not know, and passes them on to no other worker. Call it again with the same variable, and
    nothing changes.

    Args:
        var: The variable; its name should begin with that of the program or library.

    Raises:
        ValueError: if another variable of that name was given; at a call, if the pickled values
            take over 64 KiB.
        TypeError: if it is no context variable.
    """
    global used
    if not isinstance(var, ContextVar):
        raise TypeError(f"propagate takes a ContextVar, got {var!r}")
    if not is_wire_text(var.name):
        raise ValueError(f"the name of a propagated variable must be valid text, got {var.name!r}")
    if variables.setdefault(var.name, var) is not var:
        raise ValueError(
            f"another context variable named {var.name!r} is propagated: give this one another name"
        )
    used = True


def collect() -> Carried:
    """Return the names and pickled values of the variables that are set in this context.

    Raises an exception of any class if a value cannot be pickled.
    """
    found = [(name, var.get(_UNSET)) for name, var in [*variables.items()]]
    carried = tuple([(name, _pickled(name, value)) for name, value in found if value is not _UNSET])
    if carried and (size := sum(len(data) for _, data in carried)) > MAX_BYTES:
        name, data = max(carried, key=lambda each: len(each[1]))
        raise ValueError(
            f"the context variables of a call take {size} bytes, at most {MAX_BYTES}: "
            f"{name!r} takes {len(data)}. Pass large values as arguments"
        )
    return carried


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as exc:
        try_add_note(exc, f"(while pickling the context variable {name!r})")
        raise


def restore(carried: Carried) -> None:
    """Set in this context what `collect` returned at the caller; ignore unknown names.

    Raises an exception of any class if a value cannot be unpickled.
    """
    for name, data in carried:
        if (var := variables.get(name)) is not None:
            try:
                var.set(pickle.loads(data))
            except Exception as exc:
                try_add_note(exc, f"(while unpickling the context variable {name!r})")
                raise


def restore_common(contexts: Sequence[Context]) -> None:
    """Set in this context the variables that have the same value in all of `contexts`."""
    for name, var in [*variables.items()]:
        first, *others = [each.get(var, _UNSET) for each in contexts]
        if first is not _UNSET and all(_are_equal(name, first, each) for each in others):
            var.set(first)


def _are_equal(name: str, value: Any, other: Any) -> bool:
    """Return whether two values are one object, or have the same pickle."""
    if value is other or other is _UNSET:
        return value is other
    try:
        return _pickled(name, value) == _pickled(name, other)
    except Exception:  # of local callers; `==` of the user's class may do anything
        return False
