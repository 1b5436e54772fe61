"""The public names: which module they are shown as, and what to write for an old one."""

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_NOW = {
    "create_all": "create([...], ...) makes an object on each of several workers",
    "supervised_all": "supervised([...], ...) makes one on each of several workers",
    "NotServing": "a peer that has left is WorkerLeft, this process without a world is NotInWorld",
    "attach_in_thread": "write `with in_thread(attach()) as me:`",
    "AttachedThread": "it is aiorpc_torch.types.WorkerThread",
    "Policy": "it is called Follower",
}
_MOVED = {
    "observe": (
        *("stats", "Stats", "BatchStats", "pending", "PendingCall"),
        *("intercept", "Interceptor", "CallInfo", "propagate"),
    ),
    "types": ("Worker", "LocalWorker", "Supervised", "NamedMembers", "Change", "RemoteTraceback"),
}
_NOW |= {
    name: f"it is aiorpc_torch.{module}.{name}"
    for module, names in _MOVED.items()
    for name in names
}


def show_as(module: str, scope: dict[str, Any], names: Iterable[str]) -> None:
    """Let tracebacks, `help` and pickles show names as those of a public module."""
    for name in names:
        if getattr(scope[name], "__module__", "").startswith("aiorpc_torch."):
            scope[name].__module__ = module


def renamed_parameters(**now: str) -> Callable[[F], F]:
    """Let a function refuse former parameters with a TypeError that says what they are called."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for old in now.keys() & kwargs:
                raise TypeError(f"{function.__name__}(): {old}= is called {now[old]}=")
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorate


def attributes_of(module: str, modules: Collection[str] = ()) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module.

    It imports one of `modules`, of the same package, at its first use. For another name it raises
    AttributeError; for an old one with what to write now, as ImportError if it is asked by
    `from module import name`, which would replace the text.
    """

    def find(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{module}.{name}")
        now = f": {_NOW[name]}" if name in _NOW else ""
        text = f"module {module!r} has no attribute {name!r}{now}"
        # importlib asks first, by `hasattr`.
        if now and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(text)
        raise AttributeError(text, name=name, obj=sys.modules.get(module))

    return find
