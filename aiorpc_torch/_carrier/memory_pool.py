"""Decide which piece of memory a message is written to, and which pieces are freed.

A state machine without system calls, a clock or torch. A piece is free, or it has holders: the
sender while it writes, and each receiver until it has freed its tensors. Only a free piece is used
again: new pages cost more CPU than the bytes. (tests/unit/carrier/test_memory_pool.py)
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")

MIN_PIECE = 256 * 1024
"""Bytes of the smallest piece."""

MAX_PIECES = 256
"""Pieces of one pool; a segment has a descriptor of the process."""

_STEPS = 4  # classes between a power of two and the next: at most a fifth of a piece is unused


def piece_size(size: int) -> int:
    """Return the bytes of the pieces that messages of `size` bytes are written to."""
    if size <= MIN_PIECE:
        return MIN_PIECE
    step = (1 << (size - 1).bit_length()) // (2 * _STEPS)
    return -(-size // step) * step


@dataclass(slots=True, eq=False)
class Piece(Generic[M]):
    """A piece of memory."""

    number: int  # in this process; never used again
    size: int  # bytes
    memory: M  # what `make` has returned
    holders: int = 0  # number of those who write or read it
    is_reusable: bool = True  # False: a holder that has ended may still read it
    free_since: float = 0.0  # when its last holder let go


# Of all pools: a message may be sent again once the pool of its piece is closed, beside messages in
# pieces of another pool.
_numbers = itertools.count(1)


class MemoryPool(Generic[M]):
    """Pieces of memory, each for one message at a time.

    Args:
        limit: Maximum bytes of all pieces together.
        make: Returns new memory of so many bytes.
        closed: Is called with each piece that is in the pool no more.
        count: Maximum number of pieces.
    """

    def __init__(
        self,
        limit: int,
        make: Callable[[int], M],
        closed: Callable[[Piece[M]], object] = lambda _: None,
        count: int = MAX_PIECES,
    ) -> None:
        self.total = 0  # bytes of all pieces, free ones included
        self._limit = limit
        self._make = make
        self._closed = closed
        self._count = count
        self._pieces: dict[int, Piece[M]] = {}
        self._free: dict[int, list[Piece[M]]] = {}  # by size; the last one was used last

    def __len__(self) -> int:
        """Return the number of pieces, free ones included."""
        return len(self._pieces)

    def acquire(self, size: int) -> Piece[M] | None:
        """Return a piece of at least `size` bytes with one holder, None if the limit excludes it.

        Raises what `make` raises.
        """
        size = piece_size(size)
        if free := self._free.get(size):
            piece = free.pop()
        elif self._make_space(size):
            piece = Piece(next(_numbers), size, self._make(size))
            self._pieces[piece.number] = piece
            self.total += size
        else:
            return None
        piece.holders = 1
        return piece

    def release(self, piece: Piece[M], now: float) -> None:
        """Remove a holder; `now` is the time in seconds."""
        piece.holders -= 1
        if piece.holders:
            return
        if piece.is_reusable:
            piece.free_since = now
            self._free.setdefault(piece.size, []).append(piece)
        else:
            self._forget(piece)

    def trim(self, before: float) -> float | None:
        """Free what is unused since `before` or longer; return since when another piece is."""
        for piece in self._unused():
            if piece.free_since > before:
                return piece.free_since
            self._give_back(piece)
        return None

    def close(self) -> None:
        """Free all pieces, those with holders when they are let go; no further one is made."""
        self._limit = self.total = 0
        for piece in self._pieces.values():
            piece.is_reusable = False
        self._pieces.clear()
        self._free.clear()

    def _unused(self) -> list[Piece[M]]:
        """Return the free pieces, the longest unused first."""
        free = [piece for pieces in self._free.values() for piece in pieces]
        return sorted(free, key=lambda each: each.free_since)

    def _make_space(self, size: int) -> bool:
        """Free what is unused, the longest first, until `size` bytes fit; return if they do."""
        unused = self._unused()
        held = self.total - sum(each.size for each in unused)
        if held + size > self._limit or len(self) - len(unused) >= self._count:
            return False
        for piece in unused:
            if self.total + size <= self._limit and len(self) < self._count:
                break
            self._give_back(piece)
        return True

    def _give_back(self, piece: Piece[M]) -> None:
        """Forget a free piece."""
        self._free[piece.size].remove(piece)
        self._forget(piece)

    def _forget(self, piece: Piece[M]) -> None:
        if self._pieces.pop(piece.number, None) is not None:  # else the pool was closed
            self.total -= piece.size
            self._closed(piece)
