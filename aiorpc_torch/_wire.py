"""What travels: messages, what they ask for, and how values are packed.

Each call's arguments and each result are pickled apart from the message around them, so that one
that cannot be read at the other end fails alone, as an answer, and never as a lost message. Tensors
stay outside the bytes, in a table that torch sends without a copy. Knows torch's pickling, and
nothing of loops or threads.
"""

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc import RRef

from ._exceptions import Failure, reduce_exception

# ── values ──────────────────────────────────────────────────────────────────────────────────────


class Value:
    """A value that has arrived."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        """The value."""
        return self.value


class Packed:
    """A value ready to travel. It arrives as a `Value`, or a `Failure` if it cannot be read."""

    __slots__ = ("data", "tensors")

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        self.data = data
        self.tensors = tensors

    def __reduce__(self) -> Any:
        return unpack, (self.data, self.tensors)


Outcome = Value | Failure


def pack(value: Any) -> Packed:
    """Pickle `value`. Raises what pickling raises."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return Packed(file.getvalue(), packer.tensors)


def unpack(data: bytes, tensors: list[Tensor]) -> Outcome:
    """What `pack` packed. Never raises: what cannot be read is the failure of this call alone."""
    try:
        return Value(_Unpacker(io.BytesIO(data), tensors).load())
    except Exception as exc:
        exc.add_note("(while unpickling what the other worker sent)")
        return Failure.of(exc, "the receiver")


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor:  # subclasses have reductions of their own, made of plain tensors
            self.tensors.append(obj)
            return _tensor_slot, (len(self.tensors) - 1,)
        if isinstance(obj, PyRRef):
            return _read_rref, (obj._serialize(),)
        if isinstance(obj, BaseException):
            return reduce_exception(obj)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if name == "_tensor_slot" and module == __name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _read_rref(data: Any) -> "PyRRef[Any]":
    return PyRRef._deserialize(data)


def _tensor_slot(index: int) -> Tensor:
    raise pickle.UnpicklingError("a tensor's place in a message, read outside a message")


# ── what a call asks for ────────────────────────────────────────────────────────────────────────


class Method(NamedTuple):
    """The method called `name` of the object behind `rref`."""

    rref: RRef[Any]
    name: str

    def bind(self) -> Callable[..., Any]:
        return _public(self.rref.local_value(), self.name)


class TypedMethod(NamedTuple):
    """`function` of the object behind `rref`: a method as it overrides it, or a function of it."""

    rref: RRef[Any]
    function: Callable[..., Any]

    def bind(self) -> Callable[..., Any]:
        obj, name = self.rref.local_value(), getattr(self.function, "__name__", "")
        if any(vars(cls).get(name) is self.function for cls in type(obj).__mro__):
            return _public(obj, name)
        return partial(self.function, obj)


class Function(NamedTuple):
    """A function, or anything else that can be called and pickled by reference."""

    function: Callable[..., Any]

    def bind(self) -> Callable[..., Any]:
        return self.function


class Create(NamedTuple):
    """A class or factory; the answer is an RRef of what it makes."""

    factory: Callable[..., Any]

    def bind(self) -> Callable[..., Any]:
        return self.factory


class Fetch(NamedTuple):
    """The object behind `rref` itself."""

    rref: RRef[Any]

    def bind(self) -> Callable[..., Any]:
        return self.rref.local_value


Target = Method | TypedMethod | Function | Create | Fetch


def check_public(name: str) -> None:
    """Raise AttributeError for a name that is not called from outside."""
    if name.startswith("_"):
        raise AttributeError(f"{name!r} is private: remote calls reach public names only")


def _public(obj: Any, name: str) -> Callable[..., Any]:
    check_public(name)
    method = getattr(obj, name)
    if not callable(method):
        raise TypeError(f"{type(obj).__name__}.{name} is a {type(method).__name__}, not a method")
    return method  # type: ignore[no-any-return]


# ── messages ────────────────────────────────────────────────────────────────────────────────────
# Each carries the name of its sender and its number among what that sender sent to this worker.


class Call(NamedTuple):
    """Run `work`, packed `(target, args, kwargs)`; `budget` seconds are left for it, None: any."""

    caller: str
    seq: int
    work: Any  # a Packed when it leaves, an Outcome when it has arrived
    budget: float | None


class Cancel(NamedTuple):
    """Nobody waits for call number `call` any more."""

    caller: str
    seq: int
    call: int


class Goodbye(NamedTuple):
    """The sender leaves, and makes no more calls; `alone`, it does not join in torch's shutdown."""

    caller: str
    seq: int
    alone: bool


Message = Call | Cancel | Goodbye
