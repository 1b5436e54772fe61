"""What travels: messages, what they ask for, and how values are packed.

Each call's arguments and each result are pickled apart from the message around them, so that one
that cannot be read at the other end fails alone, as an answer, and never as a lost message. Tensors
stay outside the bytes, in a table that torch sends without a copy. Knows torch's pickling, and
nothing of loops or threads.
"""

import ctypes
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_rpc import PyRRef

from ._exceptions import Failure, reduce_exception, replica
from ._handles import Named
from .errors import RpcError

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

    __slots__ = ("data", "size", "tensors")

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        self.data = data
        self.tensors = tensors
        self.size = len(data) + sum(map(_nbytes, tensors))

    def __reduce__(self) -> Any:
        return unpack, (self.data, self.tensors)


class Broken:
    """What stands for an answer that will not come."""

    __slots__ = ("error",)

    def __init__(self, error: RpcError) -> None:
        self.error = error

    def get(self) -> NoReturn:
        """Raise the error: a new object for each caller."""
        raise replica(self.error, "the call") from None


Outcome = Value | Failure | Broken


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
            if is_small(obj):
                return read_small, (obj.dtype, tuple(obj.shape), _bytes(obj))
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


def _nbytes(tensor: Tensor) -> int:
    # A sparse tensor does not know its own; what it may have is large.
    return tensor.nbytes if tensor.layout is torch.strided else 1 << 20


# ── small tensors ride in the bytes ─────────────────────────────────────────────────────────────
# A tensor in torch's table costs about 100 µs a message, whatever its size; packed, a tenth of it.

SMALL = 4096  # bytes


def _kind(tensor: Tensor) -> int:
    return torch._C._dispatch_keys(tensor).raw_repr()


def _plain_kinds() -> frozenset[int]:
    with torch.inference_mode():
        inference = torch.empty(0)
    return frozenset((_kind(torch.empty(0)), _kind(inference)))


_PLAIN = _plain_kinds()


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor's bytes may stand for it: plain, dense, on the CPU, outside autograd."""
    # Its dispatch keys say at once that it is not sparse, quantised, conjugated, negated, wrapped
    # or elsewhere. is_conj() and is_neg() give up the GIL, which costs 20 µs in a busy process.
    return (
        not tensor.requires_grad
        and tensor.numel() * tensor.element_size() <= SMALL
        and _kind(tensor) in _PLAIN
    )


def read_small(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    """The tensor that was packed."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return flat if len(shape) == 1 else flat.reshape(shape)


def _bytes(tensor: Tensor) -> bytes:
    # Not numpy(), which knows no bfloat16 and may not be installed.
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""


# ── what a call asks for ────────────────────────────────────────────────────────────────────────


class Method(NamedTuple):
    """The method called `name` of the object behind `on`."""

    on: Named
    name: str

    def bind(self, found: Any) -> Callable[..., Any]:
        return _public(found, self.name)


class TypedMethod(NamedTuple):
    """`function` of the object behind `on`: a method as it overrides it, or a function of it."""

    on: Named
    function: Callable[..., Any]

    def bind(self, found: Any) -> Callable[..., Any]:
        name = getattr(self.function, "__name__", "")
        if any(vars(cls).get(name) is self.function for cls in type(found).__mro__):
            return _public(found, name)
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


class Call(NamedTuple):
    """Run `work`, packed `(target, args, kwargs)`; `budget` seconds are left for it, None: any."""

    number: int
    work: Any  # a Packed when it leaves, an Outcome when it has arrived
    budget: float | None


class Cancel(NamedTuple):
    """Nobody waits for call number `number` any more."""

    number: int


class Goodbye(NamedTuple):
    """The sender leaves, and makes no more calls; `alone`, it does not join in torch's shutdown."""

    alone: bool


Item = Call | Cancel | Goodbye


class Message(NamedTuple):
    """What goes to a worker at once; without items, a poll for results.

    `seq` is its number among the messages of that link of that caller. The answer is a list of
    call numbers with their outcomes, of this message's calls or earlier ones'.
    """

    caller: str
    link: int
    seq: int
    items: tuple[Item, ...]
