"""What travels: what a call asks for, and how values that are no column's cell are pickled.

Each call's arguments and each result are pickled apart from the message around them, so that one
that cannot be read at the other end fails alone, as an answer, and never as a lost message. Tensors
stay outside the bytes, in a table that torch sends without a copy. Knows torch's pickling, and
nothing of loops or threads.
"""

import functools
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial, partialmethod, singledispatchmethod
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, Union

import torch
from torch import Tensor

from .._torch.compat import RRefBase
from .._torch.cuda import fence
from .._torch.rrefs import Ident, Way, arrive, depart
from ..errors import RpcError
from .exceptions import Failure, note, reduce_exception, replica
from .tensors import Kind, compact, from_bytes, size_of, small_bytes

# ── values ──────────────────────────────────────────────────────────────────────────────────────


class Packed:
    """A value ready to travel, and the bytes that it takes. Made where its tensors were."""

    __slots__ = ("data", "fence", "size", "tensors")

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        self.data = data
        self.tensors = tensors
        self.fence = fence(tensors)
        self.size = len(data) + sum(map(size_of, tensors))

    def devices(self) -> Iterable[torch.device]:
        """Where its tensors are, beside the CPU."""
        return () if self.fence is None else self.fence.devices

    def ready(self) -> list[Tensor]:
        """The tensors, of which this thread may make use now."""
        if self.fence is not None:
            self.fence.wait()
        return self.tensors


class Broken:
    """What stands for an answer that will not come."""

    __slots__ = ("error",)

    def __init__(self, error: RpcError) -> None:
        self.error = error

    def get(self) -> NoReturn:
        """Raise the error: a new object for each caller."""
        raise replica(self.error, "the call") from None


def pack(value: Any) -> Packed:
    """Pickle `value`. Raises what pickling raises."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return Packed(file.getvalue(), packer.tensors)


def unpack(data: bytes, tensors: Sequence[Tensor]) -> Any:
    """What `pack` packed, or a `Failure` of this value alone, if it cannot be read."""
    try:
        return _Unpacker(io.BytesIO(data), tensors).load()
    except BaseException as exc:  # a class's own __reduce__ may raise SystemExit: not in our name
        note(exc, "(while unpickling what the other worker sent)")
        return Failure.of(exc, "the receiver")


def plain(data: bytes) -> Any:
    """Unpickle numbers, texts and containers of them: the frame around what users send.

    Raises UnpicklingError for anything else, so reading a frame runs nobody's code.
    """
    return _Plain(io.BytesIO(data)).load()


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "complex" and module == "builtins":  # the one plain number that is no opcode
            return complex
        raise pickle.UnpicklingError(f"{module}.{name} in a message, where only plain values are")


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor:  # subclasses have reductions of their own, made of plain tensors
            if (data := small_bytes(obj)) is not None:
                return read_small, ((obj.dtype, tuple(obj.shape)), data)
            self.tensors.append(compact(obj))
            return _tensor_slot, (len(self.tensors) - 1,)
        if isinstance(obj, RRefBase):
            return read_rref, depart(obj)
        if isinstance(obj, BaseException):
            return reduce_exception(obj)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if name == "_tensor_slot" and module == __name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def read_rref(data: Any, way: Way) -> "RRefBase[Any]":
    """The RRef that was packed."""
    return arrive(data, way)


def _tensor_slot(index: int) -> Tensor:
    raise pickle.UnpicklingError("a tensor's place in a message, read outside a message")


def read_small(kind: Kind, data: bytes) -> Tensor:
    """The tensor that was packed."""
    return from_bytes(kind, data, 1)[0]


# ── what a call asks for ────────────────────────────────────────────────────────────────────────


Named = Union[Ident, "RRefBase[Any]"]
"""What a call names its object by: its ident, or the RRef where only torch finds the object."""


class Method(NamedTuple):
    """The method called `name` of the object behind `on`."""

    on: Named
    name: str

    def bind(self, found: Any) -> Callable[..., Any]:
        return public(found, self.name)


class TypedMethod(NamedTuple):
    """`function` of the object behind `on`: a method as it overrides it, or a function of it."""

    on: Named
    function: Callable[..., Any]

    def bind(self, found: Any) -> Callable[..., Any]:
        name = getattr(self.function, "__name__", "")
        if any(vars(cls).get(name) is self.function for cls in type(found).__mro__):
            return public(found, name)
        return partial(self.function, found)


class Function(NamedTuple):
    """A function, or anything else that can be called and pickled by reference."""

    function: Callable[..., Any]
    on: None = None

    def bind(self, _: None) -> Callable[..., Any]:
        return self.function


class Create(NamedTuple):
    """A class or factory; the answer is an RRef of what it makes."""

    factory: Callable[..., Any]
    on: None = None

    def bind(self, _: None) -> Callable[..., Any]:
        return self.factory


class Fetch(NamedTuple):
    """The object behind `on` itself."""

    on: Named

    def bind(self, found: Any) -> Callable[..., Any]:
        return lambda: found


Target = Method | TypedMethod | Function | Create | Fetch


def describe(target: Target) -> str:
    """What a call is known by, in words."""
    if isinstance(target, Fetch):
        return "fetch"
    if isinstance(target, Method):
        return target.name
    function = target.factory if isinstance(target, Create) else target.function
    return getattr(function, "__qualname__", repr(function))


def order_key(target: Target) -> Any:
    """What tells its object, or its function, from those of other calls; None: nothing does."""
    if target.on is not None:
        return target.on if isinstance(target.on, tuple) else None
    function: Any = (
        target.factory if isinstance(target, Create) else getattr(target, "function", None)
    )
    name = getattr(function, "__qualname__", None)
    return f"{getattr(function, '__module__', '')}.{name}" if isinstance(name, str) else None


@functools.lru_cache(maxsize=4096)
def check_public(name: Any) -> None:
    """Raise AttributeError for a name that is not called from outside."""
    if not isinstance(name, str):
        raise TypeError(f"a method's name is a str, not {name!r}")
    if name.startswith("_"):
        raise AttributeError(f"{name!r} is private: remote calls reach public names only")
    if not name.isidentifier():
        raise AttributeError(f"{name!r} is no method's name: remote calls reach no parts of parts")


def public(obj: Any, name: str) -> Callable[..., Any]:
    """The public method `name` of `obj`. Raises if there is none, or it computes a value."""
    check_public(name)
    for cls in type(obj).__mro__:
        if name in cls.__dict__:
            found = cls.__dict__[name]
            if type(found) is not FunctionType:
                _check_lies_there(found, f"{type(obj).__name__}.{name}")
            break
    method = getattr(obj, name)
    if not callable(method):
        raise TypeError(f"{type(obj).__name__}.{name} is a {type(method).__name__}, not a method")
    return method  # type: ignore[no-any-return]


def _check_lies_there(found: Any, name: str) -> None:
    """Raise TypeError for what computes a value when it is looked up: it is not even looked up."""
    is_method = callable(found) or isinstance(found, _METHODS)
    if not is_method and hasattr(type(found), "__get__"):
        raise TypeError(f"{name} is a {type(found).__name__}, not a method")


_METHODS = (classmethod, staticmethod, partialmethod, singledispatchmethod)
