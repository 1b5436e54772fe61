"""Memory of arrays and of long bytes as tensors, and a pickle whose long parts are such tensors.

A pickler gives buffers (protocol 5) to a callback, and writes long bytes, as they are, past its
own buffer. So neither is copied: both become tensors of bytes, which travel as large tensors do.
What is read lies in the memory that has arrived; bytes are copied into their object once.
(tests/unit/wire/test_buffers.py)
"""

import array
import ctypes
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pickle import PickleBuffer
from typing import Any

import torch
from torch import Tensor

from .._aio.segments import advise_huge_pages
from .tensors import INLINE_BYTES

Outside = tuple[int, Sequence[int]]
"""The number of parts of a long pickle among its tensors, and the bytes of each of its buffers."""

NOTHING: Outside = 0, ()

SMALL_BUFFER = 4096
"""Bytes of a buffer that is a part of the pickle in any case: outside it costs more."""

SHORT_BUFFER = 64 * 1024
"""Bytes from which on a buffer is a tensor of its own."""

ALIGNMENT = 64
"""Bytes to which tensors and buffers in one piece of memory are aligned."""

_PADDING = bytes(ALIGNMENT)

LONG_PART = 256 * 1024
"""Bytes from which on a part of a pickle is a tensor of its own; shorter ones are joined."""


# `Py_buffer` of the stable interface of CPython: the address, and nine further words.
_PyBuffer = ctypes.c_void_p * 10
_get_buffer = ctypes.pythonapi["PyObject_GetBuffer"]
_get_buffer.argtypes = (ctypes.py_object, _PyBuffer, ctypes.c_int)
_release_buffer = ctypes.pythonapi["PyBuffer_Release"]
_release_buffer.argtypes = (_PyBuffer,)
_release_buffer.restype = None


def tensor_of(buffer: Any) -> Tensor:
    """Return the memory of a contiguous buffer as a tensor of bytes, which keeps the buffer.

    It is only read: the memory may be read-only.
    """
    view = memoryview(buffer)  # holds the memory in its place: a bytearray cannot be resized
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    found = _PyBuffer()
    _get_buffer(view, found, 0)
    memory = (ctypes.c_ubyte * view.nbytes).from_address(found[0] or 0)
    _release_buffer(found)
    memory.view = view  # type: ignore[attr-defined]
    # torch warns of a buffer that is read-only. It keeps this one as long as the storage.
    return torch.frombuffer(memory, dtype=torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes, which keeps the tensor. It is writable.

    Raises:
        ValueError: if it is another tensor.
    """
    if tensor.dtype is not torch.uint8 or tensor.device.type != "cpu" or tensor.dim() != 1:
        raise ValueError(f"a buffer is a tensor of bytes, not {tensor.dtype} {tensor.shape}")
    tensor = tensor.detach().contiguous()
    if not tensor.numel():
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _split(sizes: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yield the buffers of these sizes in their tensors. They are writable.

    Raises:
        ValueError: if the tensors are others.
    """
    long, start = iter(tensors), 0
    joined = memory_of(tensors[-1]) if any(size < SHORT_BUFFER for size in sizes) else None
    for size in sizes:
        if size < SHORT_BUFFER and joined is not None:
            found = joined[start : start + size]
            start += size + -size % ALIGNMENT
        else:
            found = memory_of(next(long))
        if len(found) != size:
            raise ValueError(f"a buffer has {len(found)} bytes, not {size}")
        yield found


class PickleParts(list[Any]):
    """The file that a pickler writes: the parts of a pickle, and what it leaves outside its bytes.

    It does not refer to the pickler: that would be a cycle, which keeps what was pickled.

    Attributes:
        tensors: The value's tensors, with those that are outside already.
        are_copied: Whether an object copies its buffer when it is loaded.
    """

    __slots__ = ("_buffers", "_inside", "are_copied", "tensors")

    write = list.append  # of C: a pickle has one part, mostly

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.tensors = [*tensors]
        self.are_copied = False
        self._buffers: list[memoryview] | None = None
        self._inside = 0  # bytes of buffers that are a part of the pickle

    def keeps_inside(self, buffer: PickleBuffer) -> bool:
        """Return whether a buffer is a part of the pickle; otherwise keep it outside."""
        view = buffer.raw()
        inside = self._inside + view.nbytes
        if inside <= INLINE_BYTES or view.nbytes < SMALL_BUFFER:
            self._inside = inside
            return True
        if self._buffers is None:
            self._buffers = []
        self._buffers.append(view)
        return False

    def end(self) -> tuple[bytes, list[Tensor], Outside]:
        """Return the bytes of the pickle, b"" if it is long, and what is outside."""
        if len(self) == 1 and self._buffers is None and len(self[0]) <= INLINE_BYTES:
            return self[0], self.tensors, NOTHING  # the common case
        # A buffer that was kept inside is written as it is.
        self[:] = [each.raw() if type(each) is PickleBuffer else each for each in self]
        buffers = self._buffers or []
        sizes = [view.nbytes for view in buffers]
        tensors = [tensor_of(view) for view in buffers if view.nbytes >= SHORT_BUFFER]
        short = [view for view in buffers if view.nbytes < SHORT_BUFFER]
        if short:  # one tensor for all: a tensor costs more than a copy
            padded = ((view, _PADDING[: -view.nbytes % ALIGNMENT]) for view in short)
            tensors.append(tensor_of(b"".join(itertools.chain.from_iterable(padded))))
        data, parts = b"", list[Tensor]()
        if sum(map(len, self)) <= INLINE_BYTES and not (self.are_copied and sizes):
            data = b"".join(self)
        else:  # an object of long bytes is a part of its own, and is not copied
            for is_short, run in itertools.groupby(self, lambda part: len(part) < LONG_PART):
                pieces = [*run]
                parts += map(tensor_of, [b"".join(pieces)] if is_short else pieces)
        outside = (len(parts), sizes) if parts or sizes else NOTHING
        return data, [*self.tensors, *tensors, *parts], outside


class PickleReader:
    """The file that an unpickler reads: a pickle in parts."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = deque(parts)

    def readinto(self, target: Any) -> int:
        """Fill a buffer, and return the number of bytes."""
        view = memoryview(target).cast("B")
        done = 0
        while done < len(view) and self._parts:
            part = self._take(len(view) - done)
            _copy(view[done : done + len(part)], part)
            done += len(part)
        return done

    def read(self, size: int) -> bytes:
        """Return so many bytes, fewer at the end."""
        if self._parts and size <= len(self._parts[0]):  # the common case
            return bytes(self._take(size))
        found = bytearray(min(size, sum(map(len, self._parts))))
        return bytes(memoryview(found)[: self.readinto(found)])

    def readline(self) -> bytes:
        """Return the bytes up to a line's end: no opcode of protocol 5 reads lines."""
        raise io.UnsupportedOperation("pickles of this protocol have no lines")

    def _take(self, most: int) -> memoryview:
        part = self._parts[0]
        if most < len(part):
            self._parts[0] = part[most:]
            return part[:most]
        return self._parts.popleft()


def open_pickle(
    data: bytes, tensors: Sequence[Tensor], outside: Outside
) -> tuple[Any, Iterable[memoryview]]:
    """Return the file of a pickle and its buffers, for an unpickler, from what `end` returned."""
    parts, sizes = outside
    end = len(tensors) - parts
    file = PickleReader([*map(memory_of, tensors[end:])]) if parts else io.BytesIO(data)
    if not sizes:
        return file, ()
    is_long = [size >= SHORT_BUFFER for size in sizes]
    count = sum(is_long) + (not all(is_long))
    return file, _split(sizes, tensors[end - count : end])


HUGE_PAGES_FROM = 8 << 20
"""Bytes of new memory from which on most of a copy's time is page faults. Memory of shorter objects
is used again for others, which would keep the huge pages."""

COPY_ON_LOOP = 1 << 20
"""Maximum bytes that are copied on an event loop, or with the GIL held, in 0.1 to 0.2 ms. More are
copied in a thread."""


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy memory; without the GIL, if it is large."""
    if len(target) <= COPY_ON_LOOP:
        target[:] = source
        return
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(target))
    if len(target) >= HUGE_PAGES_FROM:
        advise_huge_pages(address, len(target))
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(source))
    ctypes.memmove(address, start, len(target))


# ── objects that pickle copies, or refuses ────────────────────────────────────────────────────────


def _reduce_view(view: memoryview, _: PickleParts) -> Any:
    flat = PickleBuffer(view if view.c_contiguous else bytearray(view.tobytes()))
    return read_view, (flat, view.format, view.shape, view.readonly)


def read_view(flat: Any, kind: Any, shape: tuple[int, ...], readonly: bool) -> memoryview:
    """Return a view of memory, as it was pickled."""
    view = memoryview(flat).cast("B")
    view = view.cast(kind) if len(shape) == 1 else view.cast(kind, shape)
    return view.toreadonly() if readonly else view


def _reduce_array(found: "array.array[Any]", parts: PickleParts) -> Any:
    if len(found) * found.itemsize <= SMALL_BUFFER:
        return NotImplemented
    parts.are_copied = True
    return read_array, (found.typecode, PickleBuffer(found))


def read_array(kind: Any, flat: Any) -> "array.array[Any]":
    """Return the `array.array` that was pickled."""
    found, view = array.array(kind), memoryview(flat).cast("B")
    for start in range(0, len(view), COPY_ON_LOOP):  # each step holds the GIL
        found.frombytes(view[start : start + COPY_ON_LOOP])
    return found


OWN_REDUCTIONS: dict[type, Callable[[Any, PickleParts], Any]] = {
    memoryview: _reduce_view,
    array.array: _reduce_array,
}
"""The reductions of objects, by their classes, as `reducer_override` returns them."""
