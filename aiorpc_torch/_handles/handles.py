"""Handles: what `remote` returns, in the place of the RRef or group that it was given."""

from typing import Any


def is_of_this_process(value: Any) -> bool:
    """Return whether it stands for objects, and cannot be an object that others call."""
    return hasattr(type(value), "__aiorpc_stands_for__")


def of_handle(value: Any) -> Any:
    """Return what `remote` was given if `value` is its result, else `value` itself."""
    found = getattr(type(value), "__aiorpc_handle__", None)  # a handle has any public attribute
    return value if found is None else found(value)


def described(value: Any) -> str:
    """Return the `repr` of a value that is no RRef, or the remedy for torch's RemoteModule."""
    kind = type(value)
    if hasattr(kind, "get_module_rref"):  # its `repr` fails
        return f"a {kind.__name__}: pass its get_module_rref()"
    return repr(value)
