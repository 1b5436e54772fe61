"""Parts of the synchronization of CUDA that tests leave out, as patches of the library.

A test about an order is worth something only if it fails without that order (`test_left_out.py`).
AIORPC_TEST_WITHOUT names a part that this process and its workers leave out.
"""

import os
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorpc_torch._torch import cuda

# ── replacements: functions of what is replaced ─────────────────────────────────────────────────


class Unordered:
    """A fence that tells the allocator which streams use the tensors, but lets none wait."""

    def __init__(self, fence: cuda.StreamFence) -> None:
        self._fence = fence

        self.devices = fence.devices
        self.is_done = fence.is_done

    def wait(self) -> None:
        streams = [torch.cuda.current_stream(device) for device in self._fence._events]
        cuda.record_streams(self._fence._tensors, streams)


def unordered(fence_of: Callable[[Any], cuda.StreamFence | None]) -> Any:
    def found(value: Any) -> Unordered | None:
        fence = fence_of(value)
        return None if fence is None else Unordered(fence)

    return found


def ignored(_: Any) -> Any:
    return lambda *_: None


def without_event(on_stream: Any) -> Any:
    return lambda collator, after=None: on_stream(collator)


def without_devices(new_agent: Any) -> Any:
    return lambda *args: new_agent(*args[:-2], {}, [])


Replacement = tuple[str, Callable[[Any], Any]]
"""The path of a function or constant in the library, and what makes the one in its place."""

PARTS: dict[str, list[Replacement]] = {
    # The callee does not wait for arguments on their way.
    "arguments": [
        ("_server.server.fence_tensors", unordered),
        ("_server.server.fence_tree", unordered),
    ],
    # A result is sent without waiting for the kernels that make it.
    "results": [
        ("_wire.pickling.fence_tensors", unordered),
        ("_batching.function.fence_tree", unordered),
    ],
    # Tensors go through the host before they are computed there.
    "host": [("_torch.cuda.StreamFence.is_done", lambda _: lambda *_: True)],
    # The allocator is not told which streams use a tensor.
    "memory": [
        ("_torch.cuda.record_streams", ignored),
        ("_batching.cuda_collate.record_streams", ignored),
    ],
    # A reply in an autograd context does not wait for the kernels of its result.
    "deferred": [("_server.reply.fence_tensors", unordered)],
    # The stream of a batch does not wait for the event loop's stream.
    "batch": [("_batching.cuda_collate.CudaCollator.on_stream", without_event)],
    # A batch gets a stream that it shares with torch's transfers.
    "stream": [("_batching.cuda_collate.STREAM_PRIORITY", lambda _: 0)],
    # The stream of a coroutine's batch does not wait for results of its calls.
    "delivery": [
        (
            "_batching.cuda_collate.CudaCollator._behind_this_thread",
            lambda _: lambda collator: collator.on_stream(),
        )
    ],
    # Tensors that share memory are sent as such, beside tensors on other devices.
    "aliases": [("_torch.cuda.copy_of", lambda _: lambda tensor: tensor)],
    # CUDA tensors without elements are sent without memory.
    "empty": [("_torch.cuda._with_memory", lambda _: lambda tensor: tensor)],
    # CUDA is not initialized, and torch's agent has no devices, when it starts.
    "start": [
        ("_torch.agent._init_cuda", ignored),
        ("_torch.agent.TensorPipeAgent", without_devices),
    ],
}


def leave_out(part: str, patches: pytest.MonkeyPatch) -> None:
    """Leave out a part of the synchronization until the patches are undone."""
    for path, replacement in PARTS[part]:
        target = f"aiorpc_torch.{path}"
        patches.setattr(target, replacement(pkgutil.resolve_name(target)))


if part := os.environ.get("AIORPC_TEST_WITHOUT"):
    leave_out(part, pytest.MonkeyPatch())
