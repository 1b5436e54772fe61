"""The ways of large CPU tensors: in shared memory, on tensor sockets, by torch RPC."""

import pytest

from aiorpc_torch._aio import segments
from aiorpc_torch._sockets import socket_link

TENSOR_WAYS = ("shared", "sockets", "torch")


def set_way(patch: pytest.MonkeyPatch, way: str) -> None:
    """Let worlds that start from now on use this way."""
    patch.setenv(segments.SWITCH, "1" if way == "shared" else "0")
    patch.setenv(socket_link.SWITCH, "0" if way == "torch" else "1")
