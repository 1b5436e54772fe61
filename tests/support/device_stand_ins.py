"""CPU tensors that stand for tensors on a device, for machines without one.

All of `DTYPE` are: they stay outside of pickles, have fences, and may go through the host.
"""

import functools
import operator
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from aiorpc_torch._client import call_encoder, connection
from aiorpc_torch._server import calls, dispatch
from aiorpc_torch._torch import staging
from aiorpc_torch._torch.sendable import PLAIN_KEYS
from aiorpc_torch._wire import columns, messages, pickling, shared_arguments, staged, tensors
from aiorpc_torch._wire.pickling import PickledValue
from aiorpc_torch._wire.tensors import small_tensor

DTYPE = torch.float64
CPU = torch.device("cpu")


class Fence:
    """A fence of stand-ins."""

    devices = frozenset({CPU})

    def __init__(self, found: "StandIns", tensors: list[Tensor]) -> None:
        self._found = found
        self.tensors = tensors

    def is_done(self, until: float) -> bool:
        return not self._found.is_busy

    def wait(self) -> None:
        self._found.waits.append((threading.get_ident(), self.tensors))


class StandIns:
    """What became of the stand-ins.

    Attributes:
        is_busy: whether their device still computes them.
        ways: for each value with stand-ins, "host" or "torch".
        waits: thread and tensors of each wait for a fence.
    """

    def __init__(self) -> None:
        self.is_busy = False
        self.ways: list[str] = []
        self.waits: list[tuple[int, list[Tensor]]] = []

    def fence(self, tensors: Iterable[Tensor]) -> Fence | None:
        found = [tensor for tensor in tensors if is_stand_in(tensor)]
        return Fence(self, found) if found else None

    def stage(self, packed: PickledValue, _: Any) -> PickledValue:
        found = staged.stage(packed, {CPU: CPU})
        if packed.fence is not None:
            self.ways.append("torch" if found is packed else "host")
        return found

    def install(self, patches: pytest.MonkeyPatch) -> "StandIns":
        """Let the library take the stand-ins for tensors on a device."""
        for module in (columns, messages, shared_arguments, calls):
            patches.setattr(module, "direct_cell", direct_cell)
        for module in (tensors, connection, calls, pickling):
            patches.setattr(module, "small_tensor", small)
        for module in (pickling, dispatch):
            patches.setattr(module, "fence_tensors", self.fence)
        for module in (call_encoder, calls):
            patches.setattr(module, "stage", self.stage)
        patches.setattr(PickledValue, "check_sendable", lambda *_: None)
        stand_in(patches)
        return self


def stand_in(patches: pytest.MonkeyPatch) -> None:
    """Let plain CPU tensors stand for those on a device in `staging`."""
    patches.setattr(staging, "_DENSE", functools.reduce(operator.or_, PLAIN_KEYS))
    patches.setattr(staging, "_pauses", {})
    patches.setattr(staging, "_is_capturing", lambda _: False)
    patches.setattr(staging, "fence_tensors", lambda _: None)
    patches.setattr(staging, "_new_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    patches.setattr(staging, "_pinned", lambda host: host.clone())


def is_stand_in(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is DTYPE


def small(tensor: Tensor) -> Any:
    return None if is_stand_in(tensor) else small_tensor(tensor)


_direct_cell = columns.direct_cell


def direct_cell(value: Any) -> Any:
    return None if is_stand_in(value) else _direct_cell(value)
