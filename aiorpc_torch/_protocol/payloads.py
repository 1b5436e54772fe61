"""Calls and results whose payload travels by torch RPC: large, on a device, or recorded.

The connection is the order. A call with such a payload sends a slot on it, and its payload in one
torch message. The callee holds back later calls of the same object until the payload is there.
Calls of other objects go on. `Slots` decides that, without a loop and without torch.
(tests/test_payloads.py)
"""

import ctypes
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

EVERY: None = None
"""Key of a call of an object that the callee cannot tell from others: it holds back every call."""

_ATTACHED = 64 * 1024  # bytes from which a payload's data is a tensor: torch does not pickle those


class _Entry(Generic[T]):
    """A call in a line: its item, once it is there."""

    __slots__ = ("item", "key", "number")

    def __init__(self, number: int, key: Hashable, item: T | None = None) -> None:
        self.number = number
        self.key = key
        self.item = item


class Slots(Generic[T]):
    """Calls whose payload is on its way, and the calls behind them. Items are never None."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[_Entry[T]]] = {}
        self._open: dict[int, _Entry[T]] = {}
        self._early: dict[int, T] = {}
        self._last = -1  # highest number of a slot so far

    def __repr__(self) -> str:
        return f"<Slots {len(self._open)} open, {len(self._early)} payloads early>"

    def __bool__(self) -> bool:
        """Whether anything is held back."""
        return bool(self._lines)

    def open(self, number: int, key: Hashable) -> list[T]:
        """Open the slot of call `number` of the object `key`; return the items to start now."""
        self._last = max(self._last, number)
        item = self._early.pop(number, None)
        if item is not None:
            return [item] if self.admit(key, item, number) else []
        entry = self._open[number] = _Entry[T](number, key)
        self._lines.setdefault(EVERY if EVERY in self._lines else key, deque()).append(entry)
        return []

    def admit(self, key: Hashable, item: T, number: int = -1) -> bool:
        """Return whether a call may start; else it is held, and returned when it may."""
        for each in (EVERY, key):
            if (line := self._lines.get(each)) is not None:
                line.append(_Entry(number, key, item))
                return False
        return True

    def fill(self, number: int, item: T) -> list[T] | None:
        """Take the payload of call `number`; return the items to start now.

        A payload that is ahead of its slot is kept. None is returned if there is no such slot: it
        was dropped, or filled before.
        """
        entry = self._open.pop(number, None)
        if entry is None:
            if number <= self._last or number in self._early:
                return None
            self._early[number] = item
            return []
        entry.item = item
        return self._advance(entry.key)

    def drop(self, number: int) -> list[T]:
        """Close the slot of a call that was given up; return the items to start now."""
        entry = self._open.pop(number, None)
        if entry is None:
            return []
        line = self._lines.get(entry.key)
        if line is not None and entry in line:
            line.remove(entry)
            return self._advance(entry.key)
        self._lines[EVERY].remove(entry)  # behind its head, which is open
        return []

    def take(self, number: int) -> T | None:
        """Return the item of a slot that is filled and held back: it will not start."""
        for line in self._lines.values():
            for entry in line:
                if entry.number == number and entry.item is not None:
                    line.remove(entry)  # not its head, which is open
                    return entry.item
        return None

    def close(self) -> list[T]:
        """Forget everything; return the items that have not started."""
        items = [entry.item for line in self._lines.values() for entry in line]
        left = [item for item in (*items, *self._early.values()) if item is not None]
        self._lines.clear()
        self._open.clear()
        self._early.clear()
        return left

    def _advance(self, key: Hashable) -> list[T]:
        """Return the items of a line, and of those it held back, that may start now."""
        line, ready = self._lines.pop(key, None), []
        while line:
            entry = line[0]
            if entry.key == key and entry.item is None:  # its head again
                self._lines[key] = line
                break
            line.popleft()
            if entry.key != key and (entry.item is None or entry.key in self._lines):
                self._lines.setdefault(entry.key, deque()).append(entry)
            else:
                ready.append(entry.item)
        return ready  # type: ignore[return-value]


def attach(data: bytes, tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Return data and tensors for torch: long data is the last tensor, and empty itself."""
    if len(data) <= _ATTACHED:
        return data, [*tensors]
    return b"", [*tensors, torch.frombuffer(bytearray(data), dtype=torch.uint8)]


def detach(data: bytes, tensors: Sequence[Tensor]) -> tuple[bytes, Sequence[Tensor]]:
    """Return what `attach` was given."""
    if data:
        return data, tensors
    *rest, last = tensors
    return ctypes.string_at(last.data_ptr(), last.nbytes), rest
