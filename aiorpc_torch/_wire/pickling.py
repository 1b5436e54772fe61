"""Pickling of values that are not plain cells: tensors, RRefs and exceptions included.

Each call's arguments and each result are pickled apart from the message. A value that cannot be
unpickled fails its own call only. torch answers a message that it cannot unpickle without calling
the callee's code, so it gets bytes and tensors only. Tensors stay outside the bytes, and so do the
buffers of large arrays and long bytes; nothing of them is copied here.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.jit import ScriptFunction
from torch.nn import Module

from .._aio.loops import call_soon
from .._aio.threads import memory_threads
from .._torch.compat import RRefBase
from .._torch.cuda import fence_tensors
from .._torch.devices import check_sendable
from .._torch.modules import reduce_module
from .._torch.rrefs import SharingMode, deserialize_rref, serialize_rref, take_back
from .._torch.sendable import COMPRESSED, check_subclass, compressed_parts
from .blocks import share
from .buffers import COPY_ON_LOOP, NOTHING, OWN_REDUCTIONS, Outside, PickleParts, open_pickle
from .by_value import (
    NAMED,
    NotByName,
    dump_by_value,
    explain,
    reduce_script_function,
    refuse_by_value,
)
from .exceptions import RECEIVER, RemoteFailure, copy_exception, reduce_exception, try_add_note
from .tensors import (
    TensorKind,
    compact_at_call,
    from_bytes,
    size_of,
    small_tensor,
)


class PickledValue:
    """A pickled value, its tensors and its size in bytes.

    Create it in the thread, and on the CUDA streams, that computed the tensors.

    Args:
        data: The pickle, b"" if it is long.
        tensors: The value's tensors; then its buffers; then the parts of a long pickle.
        outside: The number of those parts, and the bytes of each buffer.

    Attributes:
        rrefs: What `serialize_rref` has returned for the RRefs in it.
        on_host: The tensors' bytes (`staged.stage`); None before they are looked at, () if they
            travel by torch RPC.
    """

    __slots__ = (
        "data",
        "fence",
        "on_host",
        "outside",
        "rrefs",
        "size",
        "tensors",
        "without_graph",
    )

    def __init__(
        self,
        data: bytes,
        tensors: list[Tensor],
        outside: Outside = NOTHING,
        without_graph: type[Tensor] | None = None,
    ) -> None:
        self.data = data
        self.tensors = tensors
        self.outside = outside
        self.without_graph = without_graph
        self.fence = fence_tensors(tensors)
        self.on_host: Sequence[Tensor] | None = None
        self.rrefs: Sequence[tuple[Any, SharingMode]] = ()
        self.size = len(data) + sum(map(size_of, tensors))

    def on_the_wire(self) -> tuple[Any, ...]:
        """Return the pickle as a message holds it, beside its tensors."""
        if self.outside is NOTHING:
            return self.data, len(self.tensors)
        return self.data, len(self.tensors), self.outside

    def warn_of_lost_graph(self, what: str) -> None:
        """Warn if a tensor that requires a gradient was pickled without its autograd graph."""
        if self.without_graph is not None:
            name = self.without_graph.__name__
            warnings.warn(
                f"{what} is or holds a {name}, to which no gradient returns: tensors of subclasses "
                "travel as copies without a graph. Send its `.as_subclass(torch.Tensor)`, or "
                "`.detach()` it",
                stacklevel=2,
            )

    def check_sendable(self, mapped: Collection[torch.device], peer: str) -> None:
        """Raise ValueError for a tensor on a device from which no map leads to `peer`."""
        if self.fence is not None:
            check_sendable(self.tensors, mapped, peer)

    def ready_tensors(self) -> list[Tensor]:
        """Return the tensors after making this thread's CUDA streams wait for them."""
        if self.fence is not None:
            self.fence.wait()
        return self.tensors


@dataclass(slots=True, eq=False, repr=False)
class CallAborted:
    """The outcome of a call that will get no answer, sent or not."""

    error: BaseException
    was_sent: bool = True

    def raise_(self) -> NoReturn:
        """Raise a copy of the error, a new object for each caller."""
        raise copy_exception(self.error, "the call") from None


def pack(value: Any) -> PickledValue:
    """Pickle `value`. Raises what pickling raises.

    Large tensors, arrays and bytes are not copied: they must not change until they are sent.
    """
    return _ValuePickler().pack(value)


class SharedPickle:
    """A value that is pickled once for many receivers.

    The pickle has slots. An RRef has one, since torch counts a reference for each receiver. A
    `ValueSlot` has one for a value that differs from receiver to receiver.
    """

    def __init__(self, value: Any) -> None:
        packer = _SharedPickler()
        self._shared = packer.pack(value)
        self._shared.tensors = share(self._shared.tensors)
        self._slots = packer.slots

    def fill(self, values: Sequence[Any]) -> PickledValue:
        """Return the pickle for one receiver; `values` are those of the `ValueSlot`s, by index."""
        if not self._slots:
            return self._shared
        filled = [
            values[each.position] if type(each) is ValueSlot else each for each in self._slots
        ]
        shared = self._shared
        packer = _ValuePickler(shared.tensors)  # they come first
        packer.without_graph = shared.without_graph
        found = shared.data, len(shared.tensors), shared.outside, filled
        packed = packer.pack(PickledAs(_fill_slots, *found))
        packed.rrefs = ()  # not to be taken back: a retry sends the same pickle
        return packed


class ValueSlot(NamedTuple):
    """A place in a `SharedPickle` for the value at `position` of each receiver."""

    position: int


class PickledAs:
    """An object that arrives as the result of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


def unpack(data: bytes, tensors: Sequence[Tensor], outside: Outside = NOTHING) -> Any:
    """Return the value of a `PickledValue`, or a `RemoteFailure` if it cannot be unpickled."""
    try:
        if outside is NOTHING:  # the common case
            return _ValueUnpickler(io.BytesIO(data), tensors).load()
        return _unpickled(data, tensors, outside)
    except BaseException as exc:  # a user's __reduce__ may raise even SystemExit
        exc = explain(exc)
        try_add_note(exc, "(while unpickling what the other worker sent)")
        return RemoteFailure.of(exc, RECEIVER)


def _unpickled(
    data: bytes, tensors: Sequence[Tensor], outside: Outside, values: Sequence[Any] = ()
) -> Any:
    file, buffers = open_pickle(data, tensors, outside)
    return _ValueUnpickler(file, tensors, values, buffers).load()


class LongPickle(NamedTuple):
    """The arguments of `unpack` for a value whose bytes have to be copied."""

    data: bytes
    tensors: Sequence[Tensor]
    outside: Outside

    def load(self) -> Any:
        """Return the value, or a `RemoteFailure`. In any thread."""
        return unpack(*self)

    def load_in_thread(self, loop: Any, then: Callable[[Any], object]) -> None:
        """Load the value in a thread, and call `then` with it on its loop."""
        task: Callable[[], None] = partial(_load, [self], loop, then)
        try:
            memory_threads(task)
        except RuntimeError:  # no thread could be started
            task()


def _load(pickles: list[LongPickle], loop: Any, then: Callable[[Any], object]) -> None:
    # Neither pickle nor value is kept by an idle thread.
    call_soon(loop, then, pickles.pop().load())


def unpack_or_defer(data: bytes, tensors: Sequence[Tensor], outside: Outside = NOTHING) -> Any:
    """Return the value, a `RemoteFailure`, or a `LongPickle` if it has to be loaded apart."""
    parts, buffers = outside
    if parts and sum(buffers) + sum(map(size_of, tensors[-parts:])) > COPY_ON_LOOP:
        return LongPickle(data, tensors, outside)
    return unpack(data, tensors, outside)


class _ValuePickler(pickle.Pickler):
    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self.parts = parts = PickleParts(tensors)
        super().__init__(parts, pickle.HIGHEST_PROTOCOL, buffer_callback=parts.keeps_inside)
        self._given = tensors
        self.without_graph: type[Tensor] | None = None  # class of a tensor that loses its graph
        # By `id`; each is forked or lent once, and lives as long as its `id` stands for it.
        self._rrefs: dict[int, tuple[Any, tuple[Any, SharingMode]]] = {}

    def pack(self, value: Any) -> PickledValue:
        """Pickle a value, once; by value if it has to be."""
        try:
            self._dump(value)
        except BaseException:
            for _, sent in self._rrefs.values():
                take_back(*sent)
            raise
        packed = PickledValue(*self.parts.end(), self.without_graph)
        if self._rrefs:
            packed.rrefs = [sent for _, sent in self._rrefs.values()]
        return packed

    def _dump(self, value: Any) -> None:
        try:
            self.dump(value)
        except NotByName as exc:
            self.restart()
            dump_by_value(value, self.parts, self.reduce, exc)

    def restart(self) -> None:
        """Forget what was pickled."""
        self.parts = PickleParts(self._given)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, NAMED):
            refuse_by_value(obj)
            return NotImplemented
        return self.reduce(obj)

    def reduce(self, obj: Any) -> Any:
        """Return the reduction of an object that is neither a class nor a function."""
        if isinstance(obj, Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, RRefBase):
            if id(obj) not in self._rrefs:
                self._rrefs[id(obj)] = obj, serialize_rref(obj)
            return deserialize_rref, self._rrefs[id(obj)][1]
        if isinstance(obj, BaseException):
            return reduce_exception(obj)
        if (own := OWN_REDUCTIONS.get(type(obj))) is not None:
            return own(obj, self.parts)
        if isinstance(obj, Module):
            return reduce_module(obj)
        return reduce_script_function(obj) if isinstance(obj, ScriptFunction) else NotImplemented

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor:  # it reduces itself, to plain tensors or to its storage
            check_subclass(tensor)
            if tensor.requires_grad:
                self.without_graph = type(tensor)
            return NotImplemented
        if (found := small_tensor(tensor)) is not None:
            (dtype, shape, strides), data = found
            return read_small, ((dtype, tuple(shape), strides), data)
        if tensor.layout in COMPRESSED:
            return _read_compressed, (*compressed_parts(tensor), tuple(tensor.shape), tensor.layout)
        tensors = self.parts.tensors
        tensors.append(compact_at_call(tensor))
        return _tensor_slot, (len(tensors) - 1,)


class _SharedPickler(_ValuePickler):
    def __init__(self) -> None:
        super().__init__()
        self.slots: list[Any] = []

    def restart(self) -> None:
        super().restart()
        self.slots = []

    def reduce(self, obj: Any) -> Any:
        if isinstance(obj, RRefBase) or type(obj) is ValueSlot:
            self.slots.append(obj)
            return _value_slot, (len(self.slots) - 1,)
        return super().reduce(obj)


class _ValueUnpickler(pickle.Unpickler):
    def __init__(
        self,
        file: Any,
        tensors: Sequence[Tensor],
        values: Sequence[Any] = (),
        buffers: Iterable[Any] = (),
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._tensors = tensors
        self._values = values

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == "_tensor_slot":
                return self._tensors.__getitem__
            if name == "_value_slot":
                return self._values.__getitem__
            if name == "_fill_slots":
                return self._fill_slots
        return super().find_class(module, name)

    def _fill_slots(self, data: bytes, count: int, outside: Outside, values: Sequence[Any]) -> Any:
        return _unpickled(data, self._tensors[:count], outside, values)


def _tensor_slot(index: int) -> Tensor:
    raise pickle.UnpicklingError("a tensor of a message must be unpickled with that message")


def _value_slot(index: int) -> Any:
    raise pickle.UnpicklingError("a slot of a shared value must be unpickled with its value")


def _fill_slots(data: bytes, count: int, outside: Outside, values: Sequence[Any]) -> Any:
    raise pickle.UnpicklingError("a shared value must be unpickled with its message")


def _read_compressed(
    compressed: Tensor, plain: Tensor, values: Tensor, shape: tuple[int, ...], layout: torch.layout
) -> Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=False
    )


def read_small(kind: TensorKind, data: bytes) -> Tensor:
    """Return the small tensor that was pickled."""
    return from_bytes(kind, data, 1)[0]
