"""Snapshots: the tensors of a tree in a few blocks of memory, and the rest of the tree pickled.

A version's tensors are in one block on their way, however many they are: it is encoded, copied and
mapped as one. A large tensor that has not changed since the version before stays in that version's
block, which followers have. (tests/unit/training/test_snapshots.py,
tests/unit/training/test_snapshots_internals.py)
"""

import asyncio
import ctypes
import dataclasses
import functools
import io
import math
import mmap
import pickle
import secrets
import weakref
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Size, Tensor, nn
from torch.optim import Optimizer

from .shards import Box, Slice, is_dtensor, local, slice_of, whole

T = TypeVar("T")

ALIGNMENT = 64
"""Bytes to which the tensors of a snapshot are aligned."""

MAX_STATE = 1 << 16
"""Bytes of a tensor that may be the state of a random generator, whose copy costs nothing."""

COPY_ON_LOOP = 1 << 20
"""Maximum bytes of a snapshot that is copied on the event loop, not in a thread."""

MIN_KEPT = 1 << 16
"""Bytes of a tensor from which on it is not sent again if it has not changed."""

SAMPLE = 1 << 11
"""Bytes at each end of a tensor that tell whether it was written into."""

MAX_BLOCKS = 8
"""Maximum number of earlier blocks that a version refers to: each is a tensor of its own to send to
those who begin to follow."""

SMALL = 1 << 20
"""Bytes of a block below which torch's own memory is as good."""


class Place(NamedTuple):
    """The place of a tensor in a snapshot.

    Attributes:
        block: name of its block.
        start: its first byte there.
        dtype, shape, strides: of the tensor.
        slice: what it is of a larger tensor; None for a whole one.
        checksum: of its bytes, if it is in a block of an earlier version.
    """

    block: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    slice: Slice | None = None
    checksum: int | None = None

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, blocks: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor in its block."""
        flat = blocks[self.block].view(self.dtype)
        offset = flat.storage_offset() + self.start // self.dtype.itemsize
        return flat.as_strided(self.shape, self.strides, offset)

    def bytes_in(self, blocks: Mapping[str, Tensor]) -> Tensor:
        """Return its bytes, uint8 [aligned size]."""
        return blocks[self.block][self.start : self.start + _aligned(self.size)]

    @property
    def part(self) -> Slice:
        """Return what it is of the whole tensor."""
        return self.slice or Slice(whole(self.shape), self.shape)


def place_of(tensor: Tensor, part: Slice | None = None) -> Place:
    """Return the place of a tensor that is in no block yet, with dense strides."""
    like = torch.empty_like(tensor, device="meta")
    if part is not None and part.box == whole(part.shape):
        part = None
    return Place("", 0, tensor.dtype, tuple(tensor.shape), like.stride(), part)


class Part(NamedTuple):
    """A tensor of a snapshot; without a place it was not wanted."""

    position: int
    place: Place | None
    tensor: Tensor


Loaded = tuple[Any, dict[int, Part]]
"""A tree, and the part that each of its tensors is, by the tensor's `id`."""

Version = tuple[int, bytes, dict[str, Tensor]]
"""A version on its way: its number, the head of its `Snapshot`, and the blocks that are sent."""


class Parts(NamedTuple):
    """The places of a tensor's parts with what is there, and the slice that is needed."""

    parts: list[tuple[Place, Tensor]]
    box: Box


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An immutable copy of a tree.

    Attributes:
        tree: the tree, pickled, with indices of `places` for its tensors.
        places: the place of each tensor; None for one that was not wanted.
        blocks: the blocks of bytes, by their names.
        sample: checksum of some bytes of each tensor, as they were published.
        kept: names of the blocks that were here before.
    """

    tree: bytes
    places: tuple[Place | None, ...]
    blocks: Mapping[str, Tensor]
    sample: int
    kept: frozenset[str] = frozenset()

    @staticmethod
    def received(
        head: bytes, sent: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
    ) -> "Snapshot":
        """Return a snapshot of which some blocks were here before."""
        tree, places, sample = pickle.loads(head)
        names = {each.block for each in places if each is not None}
        blocks = {each: sent[each] if each in sent else (own or {})[each] for each in names}
        return Snapshot(tree, places, blocks, sample, frozenset(names - sent.keys()))

    @functools.cached_property
    def head(self) -> bytes:
        """Return all but the blocks."""
        facts = self.tree, self.places, self.sample
        return pickle.dumps(facts, protocol=pickle.HIGHEST_PROTOCOL)

    @property
    def size(self) -> int:
        """Return the number of bytes of its blocks."""
        return sum(map(len, self.blocks.values()))

    @property
    def is_whole(self) -> bool:
        """Return whether it has all of each tensor."""
        return all(each is not None and each.slice is None for each in self.places)

    def sent(self, number: int, has: Collection[str]) -> Version:
        """Return what is sent of it as version `number` to a follower that has some blocks."""
        return number, self.head, {k: data for k, data in self.blocks.items() if k not in has}

    def load(self) -> Any:
        """Return the tree; its tensors are views of the blocks."""
        return self.loaded()[0]

    def loaded(self) -> Loaded:
        """Return the tree, and the part that each of its tensors is."""
        parts = dict[int, Part]()

        def read(index: int) -> Tensor:
            place = self.places[index]
            tensor = torch.empty(0) if place is None else place.view(self.blocks)
            # torch reads the state of a random generator at the start of its storage (2.11-2.15).
            if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.nbytes <= MAX_STATE:
                tensor = tensor.clone()
            parts[id(tensor)] = Part(index, place, tensor)
            return tensor

        return _Reader(self.tree, read).load(), parts

    def names(self) -> Iterator[tuple[str, int, Place]]:
        """Return the names of tensors in the tree, each with its place and the place's index."""
        tree, parts = self.loaded()
        for name, tensor in tensors(tree):
            part = parts.get(id(tensor))  # None if it is made of others
            if part is not None and part.place is not None:
                yield name, part.position, part.place

    def slices(self) -> dict[str, Slice]:
        """Return what is here of each tensor, by its name in the tree."""
        return {name: place.part for name, _, place in self.names()}

    def changed(self) -> set[str]:
        """Return the blocks that were here before, and whose bytes have changed since."""
        return {
            each.block
            for each in self.places
            if each is not None
            and each.block in self.kept
            and each.checksum is not None
            and each.checksum != checksum(each.bytes_in(self.blocks))
        }

    @property
    def is_intact(self) -> bool:
        """Return whether its tensors are as they were published, as far as a sample tells."""
        return sample_of(self.places, self.blocks) == self.sample


class _Reader(pickle.Unpickler):
    def __init__(self, tree: bytes, read: Callable[[int], object]) -> None:
        super().__init__(io.BytesIO(tree))
        self._read = read

    def persistent_load(self, index: int) -> object:
        return self._read(index)


def checksum(data: Tensor, before: int = 0) -> int:
    """Return the CRC-32 of bytes, uint8 [n]: 3.6 GB/s, while other threads run."""
    if not data.nbytes:  # zlib would begin anew at a null pointer
        return before
    memory = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
    return zlib.crc32(memory, before)


def sample_of(places: Iterable[Place | None], blocks: Mapping[str, Tensor]) -> int:
    """Return a checksum of both ends of each tensor: whoever trains a model changes them all."""
    found = 0
    for place in places:
        if place is not None:
            data = place.bytes_in(blocks)
            found = checksum(data[:SAMPLE], found)
            found = checksum(data[SAMPLE:][-SAMPLE:], found)
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# ── taking one ──────────────────────────────────────────────────────────────────────────────────


class Memory:
    """Memory that snapshots use again once nothing refers to it. At most one free block is kept.

    The first write into new memory costs more than the copy.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> Tensor:
        """Return a tensor of so many bytes, in memory that is free."""
        if size < SMALL:
            return torch.empty(size, dtype=torch.uint8)
        block = self._free.pop() if self._free else None
        if block is None or len(block) != size:
            # Private: a forked child keeps what it has seen.
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = (ctypes.c_char * size).from_buffer(block)
        # `torch.frombuffer` keeps the buffer until its last storage is freed, in any thread.
        weakref.finalize(buffer, self._give_back, block).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _give_back(self, block: mmap.mmap) -> None:
        self._free[:] = [block]


class Block:
    """A block that is being written: `used` bytes of it so far."""

    def __init__(self, memory: Memory, size: int) -> None:
        self.name = secrets.token_hex(8)
        self.data = memory.take(size)
        self.used = 0

    @property
    def written(self) -> Tensor:
        """Return the bytes that are in use."""
        return self.data[: self.used]

    def add(self, place: Place, source: Tensor | Parts) -> Place:
        """Copy a tensor, or parts of one, to the end; return its place here."""
        found = place._replace(block=self.name, start=self.used)
        target = found.view({self.name: self.data})
        with torch.no_grad():
            if isinstance(source, Tensor):
                target.copy_(source)
            else:
                for each, tensor in source.parts:
                    box = each.part.box.meet(source.box)
                    if box.size:
                        part = box.of(tensor, each.part.box.offset)
                        box.of(target, source.box.offset).copy_(part)
        self.used += _aligned(place.size)
        return found


async def in_thread(function: Callable[[], T], size: int) -> T:
    """Return a function's result; it runs in a thread if it reads or writes many bytes."""
    return await asyncio.to_thread(function) if size > COPY_ON_LOOP else function()


class Taking(pickle.Pickler):
    """A snapshot that is being taken: pickled at once, its tensors are copied by `take`.

    Args:
        memory: memory that is used again (default: new memory).
        before: the version before, whose tensors stay where they are if they have not changed.
        others: the snapshots of which the tree has parts.
    """

    def __init__(
        self,
        tree: Any,
        memory: Memory | None = None,
        before: Snapshot | None = None,
        others: Sequence[Snapshot] = (),
    ) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self._memory, self._before, self._others = memory or Memory(), before, others
        self._places: list[Place] = []
        self._copied: dict[int, Tensor | Parts] = {}  # what is copied, by its place's index
        self._indices: dict[Any, int] = {}
        self.dump(tree)
        self._size = sum(_aligned(self._places[each].size) for each in self._copied)

    def persistent_id(self, value: Any) -> int | None:
        """Return the index of a tensor's place, None for another object."""
        index = len(self._places)
        if isinstance(value, Parts):
            exact = [place for place, _ in value.parts if place.part.box == value.box]
            if exact:  # all that is needed: it stays where it is
                self._places.append(exact[0])
            else:
                first, tensor = value.parts[0]
                like = torch.empty(value.box.shape, dtype=tensor.dtype, device="meta")
                self._places.append(place_of(like, Slice(value.box, first.part.shape)))
                self._copied[index] = value
            return index
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        part = None
        if is_dtensor(value):
            with torch.no_grad():
                value, part = local(value), slice_of(value)
        elif type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None  # its elements are in other tensors
        elif value.is_quantized or value.is_meta or value.is_nested:
            return None
        # Parameters that share their memory share it in the snapshot.
        key: Any = value.data_ptr(), value.dtype, value.shape, value.stride(), part
        key = key, value.device, value.is_conj(), value.is_neg()
        if key not in self._indices:
            self._indices[key] = index
            self._places.append(place_of(value, part))
            self._copied[index] = value.detach()
        return self._indices[key]

    async def take_in_thread(self) -> Snapshot:
        """Take the snapshot; a thread compares and copies large tensors meanwhile."""
        return await in_thread(self.take, self._size)

    def take(self) -> Snapshot:
        """Copy the tensors that have changed since the version before; return the snapshot."""
        places, block = self._places.copy(), Block(self._memory, self._size)
        for index, source in self._copied.items():
            places[index] = self._placed(index, source, block)
        earlier = {} if self._before is None else self._before.blocks
        kept_places = [places[each] for each in self._copied if places[each].block in earlier]
        used = {each.block for each in kept_places}
        half = sum(len(earlier[each]) for each in used) / 2
        if len(used) > MAX_BLOCKS or half > sum(_aligned(each.size) for each in kept_places):
            self._before = None  # too many, or too little of them is used: all into one block again
            return self.take()
        blocks = {**earlier, block.name: block.written}
        for each in self._others:
            blocks |= each.blocks
        names = {each.block for each in places}
        found = {each: blocks[each] for each in names}
        kept = {name for each in self._others for name in each.kept}
        if self._others:  # what this process has joined, and its user may have written into
            kept |= earlier.keys()
        sample = sample_of(places, found)
        return Snapshot(
            self._file.getvalue(), tuple(places), found, sample, frozenset(kept & names)
        )

    def _placed(self, index: int, source: Tensor | Parts, block: Block) -> Place:
        """Return the place of a tensor: where it was before, if it is large and as it was."""
        place, before, was = self._places[index], self._before, None
        if before is not None and place.size >= MIN_KEPT and index < len(before.places):
            was = before.places[index]
        if not before or not was or was._replace(block="", start=0, checksum=None) != place:
            return block.add(place, source)
        earlier = was.view(before.blocks)
        if (
            isinstance(source, Tensor)
            and source.is_cpu
            and not (source.is_conj() or source.is_neg())
            and source.stride() == place.strides
        ):
            if not _is_equal(source, earlier):
                return block.add(place, source)
        else:  # of another device, or with gaps: can be compared once it is copied
            found = block.add(place, source)
            if not _is_equal(found.view({block.name: block.data}), earlier):
                return found
            block.used = found.start
        if was.checksum is None:
            was = was._replace(checksum=checksum(was.bytes_in(before.blocks)))
        return was


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two dense CPU tensors of one shape have the same bytes, be they NaN."""
    compare = ctypes.CDLL(None).memcmp  # ends at the first difference, and lets other threads run
    places = ctypes.c_void_p(one.data_ptr()), ctypes.c_void_p(other.data_ptr())
    return bool(compare(*places, ctypes.c_size_t(one.nbytes)) == 0)


# ── the tensors of a tree by their names, so that an error can name one ─────────────────────────


def tensors(
    tree: Any, kind: type | tuple[type, ...] = Tensor, name: str = ""
) -> Iterator[tuple[str, Any]]:
    """Return each tensor, or object of another kind, in mappings, sequences and dataclasses."""
    if isinstance(tree, kind):
        yield name or "the tree", tree
        return
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(tree, Mapping):
        items = ((f"[{key!r}]", value) for key, value in tree.items())
    elif isinstance(tree, list | tuple):
        items = ((f"[{index}]", value) for index, value in enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [each.name for each in dataclasses.fields(tree) if hasattr(tree, each.name)]
        items = ((f".{field}", getattr(tree, field)) for field in names)
    for key, value in items:
        yield from tensors(value, kind, f"{name}{key}")


def shapes(tree: Any) -> dict[str, Size]:
    """Return the shape of each tensor, by its name in the tree."""
    # Followers could not put a module, an optimizer or a generator into theirs.
    found = dict[str, Size]()
    for name, each in tensors(tree, (Tensor, nn.Module, Optimizer, Generator)):
        if not isinstance(each, Tensor):
            kind = type(each).__name__
            where = "" if name == "the tree" else f" at {name}"
            text = "a version is a tree of tensors, such as `model.state_dict()`"
            raise TypeError(f"{text}; got {kind}{where}")
        found[name] = each.shape
    return found


def check_shapes(first: Mapping[str, Size], tree: Any) -> None:
    """Check that a tree has each tensor of the first version, in its shape.

    It may have more, such as those of an optimizer that has made its first step.
    """
    found = shapes(tree)
    for place, shape in first.items():
        if place not in found:
            raise ValueError(f"a version must have the tensors of the first one, lacks {place}")
        if found[place] != shape:
            raise ValueError(
                f"a version must have the shapes of the first one: {place} must be "
                f"{tuple(shape)}, got {tuple(found[place])}"
            )
