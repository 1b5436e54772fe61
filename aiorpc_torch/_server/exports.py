"""The export policy of a worker: restrict what callers can reach.

The target of a call is text. It is compared without importing, running or changing what it names,
and only exported names are looked up.
(tests/loopback/test_exports.py)
"""

import importlib
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from .._endpoint.answers import block_of, pause_object, settle_pause
from .._endpoint.names import take_state, watch_name, watch_state
from .._wire.buffers import NOTHING, Outside
from .._wire.by_value import is_among
from .._wire.targets import (
    BoundTarget,
    MakeTarget,
    MethodTarget,
    Target,
    check_public_name,
)
from .._wire.wire_targets import BOUND, MAKE, NamedTarget, read_named
from ..errors import NotExported

ALWAYS_EXPORTED = (
    *(watch_name, watch_state, take_state),  # called by `lookup` and `members`
    *(pause_object, settle_pause),  # by `paused`
    block_of,  # by answers where calls stand
)

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
    for exported in given:
        if isinstance(exported, str):
            importlib.import_module(exported)  # raises ImportError
        elif not (callable(exported) and hasattr(exported, "__qualname__")):
            raise TypeError(
                f"exports must hold classes, functions and names of modules, got {exported!r}"
            )
    return given


class ExportPolicy:
    """Decides which calls the worker `worker` runs."""

    def __init__(self, exports: Iterable[Export], worker: str) -> None:
        checked = checked_exports(exports)
        self._objects = tuple(each for each in checked if not isinstance(each, str))
        self._modules = tuple(each for each in checked if isinstance(each, str))
        self._worker = worker

    def load_target(
        self, target: NamedTarget | bytes, _: Sequence[Tensor], __: Outside = NOTHING
    ) -> Target:
        """Return the target of a message.

        Raises:
            NotExported: if it is not exported, or has no name.
            ValueError: if it is malformed.
        """
        if isinstance(target, bytes):
            raise NotExported(
                f"worker {self._worker!r} has exports=, so the function of a call must have a name "
                "by which it can be imported: not one by value, a partial or a method of an object"
            )
        by_itself = target.kind not in (BOUND, MAKE)
        return read_named(target, lambda path, module: self._find(path, module, by_itself))

    def check(self, target: Target, found: Any) -> None:
        """Raise NotExported unless `target`, a method of the object `found`, is exported."""
        if isinstance(target, MethodTarget):
            check_public_name(target.name)
            if not self._has_class(type(found)):
                self._refuse(f"{_describe(type(found))}.{target.name}")
        elif isinstance(target, BoundTarget | MakeTarget):
            function = target.function
            name = getattr(function, "__name__", "")
            is_its = any(vars(cls).get(name) is function for cls in type(found).__mro__)
            if is_its and self._has_class(type(found)):
                return
            of_module = self._has_module(getattr(function, "__module__", None))
            is_public = name != "" and not name.startswith("_")
            if not ((is_public and of_module) or self._has_object(function)):
                self._refuse(_describe(function))
        # `load_target` has checked functions and classes. Who holds an RRef may fetch its object.

    def _find(self, path: str, module: str, by_itself: bool) -> Any:
        """Return what has that name in a loaded module, without running user code.

        Neither descriptors nor `__getattr__` are run.
        """
        name = f"{module}.{path}"
        if self._has_module(module):
            importlib.import_module(module)
        owner: Any = None
        found: Any = sys.modules.get(module)
        parts = path.split(".")
        for part in parts:
            owner, found = found, None
            if isinstance(owner, type):
                found = next((vars(cls)[part] for cls in owner.__mro__ if part in vars(cls)), None)
            elif isinstance(owner, types.ModuleType):
                found = vars(owner).get(part)
        if isinstance(owner, type) and isinstance(found, _BOUND_BY_CLASS):
            found = getattr(owner, parts[-1])
        is_public = not any(part.startswith("_") for part in parts)
        inside = is_public and isinstance(owner, type) and self._has_class(owner)
        if by_itself and not (inside and callable(found)):
            exported = is_among(found, ALWAYS_EXPORTED) or self._has_object(found)
            if not exported and is_public:
                exported = self._has_module(getattr(found, "__module__", None)) and callable(found)
            if not exported:
                self._refuse(name)
        if found is None:
            self._refuse(name)
        return found

    def _refuse(self, name: str) -> NoReturn:
        raise NotExported(
            f"worker {self._worker!r} does not export {name}; add it to that worker's exports="
        )

    def _has_object(self, found: Any) -> bool:
        if any(found is each for each in self._objects):
            return True
        # Each access makes a new object of class methods and of most torch functions.
        kinds = types.BuiltinFunctionType, types.MethodType
        return isinstance(found, kinds) and any(
            type(found) is type(each) and found == each for each in self._objects
        )

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


_BOUND_BY_CLASS = (
    classmethod,
    staticmethod,
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
)


def _describe(found: Any) -> str:
    module = getattr(found, "__module__", "?")
    if module == "__mp_main__":  # of a child of a local world, see `_has_module`
        module = "__main__"
    return f"{module}.{getattr(found, '__qualname__', repr(found))}"
