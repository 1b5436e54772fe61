"""What a worker answers to, if not to everything: the classes, functions and modules it was given.

What a call is of is read here without importing, running or changing what it names: by an unpickler
that knows the few words of our own and takes any other name for no more than a name. Knows how a
call names its target, and nothing of where it comes from.
"""

import importlib
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import Any, NoReturn

from torch import Tensor

from .._protocol.targets import (
    Create,
    Fetch,
    Function,
    Method,
    Target,
    TypedMethod,
    check_public,
    read_rref,
)
from .._torch.compat import RRefBase
from ..errors import NotExported

Export = Callable[..., Any] | str
"""A class, a function, or the name of a module: all that it and the modules in it define."""


def as_exports(exports: Iterable[Export]) -> tuple[Export, ...]:
    """What the user gave.

    Raises:
        TypeError: if it is one thing and not a list of such, or holds what cannot be exported.
        ImportError: if there is no module of a name in it.
    """
    if isinstance(exports, str | type):
        raise TypeError(f"exports is a list of what is exported, as in [{exports!r}]")
    given = tuple(exports)
    Exports(given)
    return given


class Exports:
    """Decides which calls are answered."""

    def __init__(self, exports: Iterable[Export]) -> None:
        self._things = tuple(each for each in exports if not isinstance(each, str))
        self._modules = tuple(each for each in exports if isinstance(each, str))
        for thing in self._things:
            if not (callable(thing) and hasattr(thing, "__qualname__")):
                raise TypeError(
                    f"exports holds classes, functions and names of modules, not {thing!r}"
                )
        for module in self._modules:
            importlib.import_module(module)  # a name that is none is the caller's to see

    def __repr__(self) -> str:
        names = [*(each.__qualname__ for each in self._things), *self._modules]
        return f"<Exports {', '.join(names)}>"

    def unpack(self, data: bytes, tensors: Sequence[Tensor]) -> Target:
        """The target that was packed; in place of `_wire.unpack`.

        Raises:
            NotExported: if it names anything that is not exported, or is more than a name.
        """
        try:
            asked = _Reader(BytesIO(data)).load()
            kind = type(asked).kind
            parts = zip(kind._fields, asked, strict=False)
            target: Target = kind(*(self._understood(kind, *each) for each in parts))
        except NotExported:
            raise
        except BaseException as exc:
            raise NotExported(
                "this worker answers to what its exports name, and this call is not of a class or "
                f"function by its name ({type(exc).__name__}: {exc})"
            ) from None
        return target

    def check(self, target: Target, found: Any) -> None:
        """Raise NotExported unless `target`, of the object `found`, is answered to."""
        if isinstance(target, Method):
            check_public(target.name)
            if not self._has_class(type(found)):
                _refuse(f"{_name(type(found))}.{target.name}")
        elif isinstance(target, TypedMethod):
            function = target.function
            if not (self._is_method(function, found) or self._has_function(function)):
                _refuse(_name(function))
        # A class or function by itself was looked at when it was read; to hold an RRef is to be
        # allowed to fetch.

    def _understood(self, kind: type, field: str, part: Any) -> Any:
        if isinstance(part, _FIELDS[field]):
            is_name = isinstance(part, _Name)
            return self._find(part.text, by_itself=kind is not TypedMethod) if is_name else part
        raise TypeError(f"a {type(part).__name__} in place of {field!r}")

    def _find(self, name: str, *, by_itself: bool) -> Any:
        """What has that name in the modules that are loaded; nothing runs while it is looked up."""
        module, _, path = name.partition(":")
        if self._has_module(module):
            importlib.import_module(module)
        owner: Any = None
        found: Any = sys.modules.get(module)
        parts = path.split(".")
        for part in parts:
            owner, found = found, _look(found, part)
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
        exported = self._has_thing(found)
        if not exported and is_public:
            exported = self._has_module(getattr(found, "__module__", None)) and callable(found)
        if not exported:
            _refuse(name)

    def _has_thing(self, found: Any) -> bool:
        return any(found is each or _same(found, each) for each in self._things)

    def _has_function(self, function: Any) -> bool:
        is_public = not getattr(function, "__name__", "_").startswith("_")
        inside = is_public and self._has_module(getattr(function, "__module__", None))
        return inside or self._has_thing(function)

    def _is_method(self, function: Any, found: Any) -> bool:
        name = getattr(function, "__name__", "")
        is_its = any(vars(cls).get(name) is function for cls in type(found).__mro__)
        return is_its and self._has_class(type(found))

    def _has_class(self, cls: type) -> bool:
        return any(
            base in self._things or self._has_module(base.__module__) for base in cls.__mro__
        )

    def _has_module(self, name: Any) -> bool:
        # A child of a local world knows the program's main module by another name.
        names = ("__main__", name) if name == "__mp_main__" else (name,)
        return any(
            each == module or (isinstance(each, str) and each.startswith(f"{module}."))
            for module in self._modules
            for each in names
        )


def _look(owner: Any, name: str) -> Any:
    """An attribute of a module or a class, as it lies there: nothing of the user's runs."""
    if isinstance(owner, type):
        return next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), None)
    return vars(owner).get(name) if isinstance(owner, types.ModuleType) else None


_BOUND_BY_CLASS = (
    classmethod,
    staticmethod,
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
)


def _same(one: Any, other: Any) -> bool:
    # Made anew at each look: a method of a class, and most of what is in torch.
    kinds = types.BuiltinFunctionType, types.MethodType
    return type(one) is type(other) and isinstance(one, kinds) and one == other


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', repr(thing))}"


def _refuse(name: str) -> NoReturn:
    name = name.replace(":", ".")
    raise NotExported(f"{name} is not among what this worker answers to: see its exports=")


# ── names, and no more ──────────────────────────────────────────────────────────────────────────


class _Sealed(type):
    # A pickle can set the attributes of whatever it can name.
    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a pickle may not set {name}")


class _Asked(tuple[Any, ...], metaclass=_Sealed):
    """Stands for one of the classes by which a call names its target."""

    __slots__ = ()
    kind: Any

    def __new__(cls, *parts: Any) -> Any:
        return super().__new__(cls, parts)


_WORDS = {
    (kind.__module__, kind.__name__): _Sealed(
        kind.__name__, (_Asked,), {"__slots__": (), "kind": kind}
    )
    for kind in (Method, TypedMethod, Function, Create, Fetch)
}


class _Name(metaclass=_Sealed):
    """Stands for anything else: `module:qualified.name`."""

    __slots__ = ("text",)
    text: str

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "text", text)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a pickle may not set {name}")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        word = _WORDS.get((module, name))
        if word is not None:
            return word
        if (module, name) == (read_rref.__module__, read_rref.__name__):
            return lambda *parts: read_rref(*parts)  # its own: see _Sealed
        if (module, name) == ("builtins", "getattr"):  # how a class method is named
            return lambda owner, name: _attribute(owner, name)
        return _Name(f"{module}:{name}")


def _attribute(owner: Any, name: str) -> _Name:
    if not isinstance(owner, _Name):
        raise pickle.UnpicklingError(f"an attribute of {type(owner).__name__}")
    return _Name(f"{owner.text}.{name}")


# What may stand in the fields of those classes.
_FIELDS: dict[str, Any] = {
    "on": RRefBase | tuple | None,
    "name": str,
    "function": _Name,
    "factory": _Name,
}
