"""The ways of large CPU tensors: in shared memory, on tensor sockets, by torch RPC."""

import pytest

from aiorpc_torch._aio import segments
from aiorpc_torch._carrier import tensor_sockets

TENSOR_WAYS = ("shared", "sockets", "torch")


def set_way(patch: pytest.MonkeyPatch, way: str) -> None:
    """Let worlds that start from now on use this way."""
    patch.setenv(segments.SWITCH, "1" if way == "shared" else "0")
    patch.setenv(tensor_sockets.SWITCH, "0" if way == "torch" else "1")
