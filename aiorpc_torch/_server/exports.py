"""The export policy of a worker: restrict what callers can reach.

The target of a call is read without importing, running or changing what it names. Its unpickler
knows the target classes; any other global is read as a name, and only exported names are looked up.
(tests/loopback/test_exports.py)
"""

import importlib
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NoReturn

from torch import Tensor

from .._protocol import by_value
from .._protocol.names import watch_name
from .._protocol.pickling import read_rref
from .._protocol.targets import (
    BoundTarget,
    CreateTarget,
    FetchTarget,
    FunctionTarget,
    MethodTarget,
    Target,
    check_public_name,
)
from .._torch.compat import RRefBase
from ..errors import NotExported

Export = Callable[..., Any] | str
"""A class, a function, or the name of a module, which includes its submodules."""


def checked_exports(exports: Iterable[Export]) -> tuple[Export, ...]:
    """Return `exports` as a tuple, checked.

    Raises:
        TypeError: if it is not a list, or has a member that cannot be exported.
        ImportError: if a module in it does not exist.
    """
    if isinstance(exports, str | type):
        raise TypeError(f"exports must be a list, got {exports!r}; write [{exports!r}]")
    given = tuple(exports)
    ExportPolicy(given)
    return given


class ExportPolicy:
    """Decides which calls a worker runs."""

    def __init__(self, exports: Iterable[Export]) -> None:
        self._objects = tuple(each for each in exports if not isinstance(each, str))
        self._modules = tuple(each for each in exports if isinstance(each, str))
        for exported in self._objects:
            if not (callable(exported) and hasattr(exported, "__qualname__")):
                raise TypeError(
                    f"exports must hold classes, functions and names of modules, got {exported!r}"
                )
        for module in self._modules:
            importlib.import_module(module)  # raises ImportError

    def load_target(self, data: bytes, tensors: Sequence[Tensor]) -> Target:
        """Return the target that was pickled.

        Raises:
            NotExported: if it is not exported, or is not pickled by name.
        """
        try:
            stub = _NameUnpickler(BytesIO(data)).load()
            kind = type(stub).kind
            parts = zip(kind._fields, stub, strict=False)
            target: Target = kind(*(self._resolve(kind, *each) for each in parts))
        except NotExported:
            raise
        except BaseException as exc:
            raise NotExported(
                "the worker has exports=, so the target of a call must be pickled by name "
                f"({type(exc).__name__}: {exc})"
            ) from None
        return target

    def check(self, target: Target, found: Any) -> None:
        """Raise NotExported unless `target`, a method of the object `found`, is exported."""
        if isinstance(target, MethodTarget):
            check_public_name(target.name)
            if not self._has_class(type(found)):
                _refuse(f"{_describe(type(found))}.{target.name}")
        elif isinstance(target, BoundTarget):
            function = target.function
            if not (self._is_method(function, found) or self._has_function(function)):
                _refuse(_describe(function))
        # `load_target` has checked functions and classes. Who holds an RRef may fetch its object.

    def _resolve(self, kind: type, field: str, part: Any) -> Any:
        if isinstance(part, _FIELD_TYPES[field]):
            is_name = isinstance(part, _Name)
            return self._find(part.text, by_itself=kind is not BoundTarget) if is_name else part
        raise TypeError(f"{field!r} must not be a {type(part).__name__}")

    def _find(self, name: str, *, by_itself: bool) -> Any:
        """Return the object of that name in a loaded module, without running user code."""
        module, _, path = name.partition(":")
        if self._has_module(module):
            importlib.import_module(module)
        owner: Any = None
        found: Any = sys.modules.get(module)
        parts = path.split(".")
        for part in parts:
            owner, found = found, _static_attribute(found, part)
        if isinstance(owner, type) and isinstance(found, _BOUND_BY_CLASS):
            found = getattr(owner, parts[-1])
        is_public = not any(part.startswith("_") for part in parts)
        inside = is_public and isinstance(owner, type) and self._has_class(owner)
        if by_itself and not (inside and callable(found)):
            self._check_itself(found, name, is_public)
        if found is None:
            _refuse(name)
        return found

    def _check_itself(self, found: Any, name: str, is_public: bool) -> None:
        exported = found is watch_name or self._has_object(found)  # `lookup` needs no export
        if not exported and is_public:
            exported = self._has_module(getattr(found, "__module__", None)) and callable(found)
        if not exported:
            _refuse(name)

    def _has_object(self, found: Any) -> bool:
        return any(found is each or _is_same_callable(found, each) for each in self._objects)

    def _has_function(self, function: Any) -> bool:
        is_public = not getattr(function, "__name__", "_").startswith("_")
        inside = is_public and self._has_module(getattr(function, "__module__", None))
        return inside or self._has_object(function)

    def _is_method(self, function: Any, found: Any) -> bool:
        name = getattr(function, "__name__", "")
        is_its = any(vars(cls).get(name) is function for cls in type(found).__mro__)
        return is_its and self._has_class(type(found))

    def _has_class(self, cls: type) -> bool:
        return any(
            base in self._objects or self._has_module(base.__module__) for base in cls.__mro__
        )

    def _has_module(self, name: Any) -> bool:
        # A child of a local world knows the program's main module by another name.
        names = ("__main__", name) if name == "__mp_main__" else (name,)
        return any(
            each == module or (isinstance(each, str) and each.startswith(f"{module}."))
            for module in self._modules
            for each in names
        )


def _static_attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a module or class without running descriptors or `__getattr__`."""
    if isinstance(owner, type):
        return next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), None)
    return vars(owner).get(name) if isinstance(owner, types.ModuleType) else None


_BOUND_BY_CLASS = (
    classmethod,
    staticmethod,
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
)


def _is_same_callable(one: Any, other: Any) -> bool:
    # Each access makes a new object of class methods and of most torch functions.
    kinds = types.BuiltinFunctionType, types.MethodType
    return type(one) is type(other) and isinstance(one, kinds) and one == other


def _describe(found: Any) -> str:
    return f"{getattr(found, '__module__', '?')}.{getattr(found, '__qualname__', repr(found))}"


def _refuse(name: str) -> NoReturn:
    name = name.replace(":", ".")
    raise NotExported(f"the worker does not export {name}; add it to that worker's exports=")


# ── unpickling names ────────────────────────────────────────────────────────────────────────────


_TARGETS = {
    (kind.__module__, kind.__name__): kind
    for kind in (MethodTarget, BoundTarget, FunctionTarget, CreateTarget, FetchTarget)
}


class _TargetStub(tuple[Any, ...]):
    """A stand-in for a target class. Each pickle has its own subclass, which it may change."""

    __slots__ = ()
    kind: Any

    def __new__(cls, *parts: Any) -> Any:
        return super().__new__(cls, parts)


@dataclass(slots=True)
class _Name:
    """A stand-in for any other global: `module:qualified.name`."""

    text: str


class _NameUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (kind := _TARGETS.get((module, name))) is not None:
            return type(name, (_TargetStub,), {"__slots__": (), "kind": kind})
        if (module, name) == (read_rref.__module__, read_rref.__name__):
            return lambda *parts: read_rref(*parts)  # a new object, since BUILD could change it
        if (module, name) == ("builtins", "getattr"):  # class methods are pickled with it
            return lambda owner, name: _attribute(owner, name)
        if module == by_value.__name__:
            by_value.refuse_received(name)
        return _Name(f"{module}:{name}")


def _attribute(owner: Any, name: str) -> _Name:
    if not isinstance(owner, _Name):
        raise pickle.UnpicklingError(f"getattr on a {type(owner).__name__}")
    return _Name(f"{owner.text}.{name}")


# The types allowed in the fields of the target classes.
_FIELD_TYPES: dict[str, Any] = {
    "on": RRefBase | tuple | None,
    "name": str,
    "function": _Name,
    "factory": _Name,
}
