"""Messages of torch RPC: bytes and tensors, of which long bytes become one."""

from collections.abc import Sequence

from torch import Tensor

from .._torch.cuda import sendable
from .._torch.sendable import check_tensor
from .blocks import compact
from .buffers import memory_of, tensor_of

ATTACHED = 64 * 1024  # payloads with more bytes travel as a tensor, which torch does not pickle


def message_for_torch(data: bytes, tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Return data and tensors as torch sends them, to be read by `detach_data`.

    Call it on the streams from which the tensors are sent: some may have to be copied.

    Raises:
        ValueError: if torch cannot send one of the tensors any more, or these together.
    """
    for each in tensors:
        check_tensor(each)
    data, tensors = attach_data(data, tensors)
    return data, sendable([*map(compact, tensors)])


def attach_data(data: bytes, tensors: Sequence[Tensor]) -> tuple[bytes, Sequence[Tensor]]:
    """Return data and tensors; long data becomes b"" and one more tensor."""
    if len(data) <= ATTACHED:
        return data, tensors
    return b"", [*tensors, tensor_of(data)]


def detach_data(data: bytes, tensors: Sequence[Tensor]) -> tuple[bytes, Sequence[Tensor]]:
    """Return the arguments of `attach_data`."""
    if data:
        return data, tensors
    *rest, last = tensors
    return bytes(memory_of(last)), rest
