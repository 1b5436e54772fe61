"""Tensors that can be sent: as bytes, in shared memory, or by torch RPC.

torch sends what it is given. A tensor that it cannot write or read ends a process, the sender's or
the receiver's (2.13, 2.15): one without memory, for example. So every tensor is checked when its
call or result is encoded, which fails that one alone. It is checked again when its message is made,
since its storage may have been freed in between. A check takes 0.3 to 2 µs.
(tests/unit/torch/test_sendable.py, tests/loopback/test_unsendable_tensors.py)
"""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .compat import (
    DisableTorchFunctionSubclass,
    DispatchKey,
    DispatchKeySet,
    FakeTensor,
    dispatch_keys,
)

# ── kinds of tensors ────────────────────────────────────────────────────────────────────────────


def key_bits(*names: str) -> int:
    """Return dispatch keys as bits."""
    keys = (DispatchKeySet(getattr(DispatchKey, name)).raw_repr() for name in names)
    return functools.reduce(operator.or_, keys)


with torch.inference_mode():
    _inference = torch.empty(0)

PLAIN_KEYS = frozenset(dispatch_keys(each).raw_repr() for each in (torch.empty(0), _inference))
"""Dispatch keys of tensors that `is_plain` accepts, as bits."""

_KINDS = "", "Sparse", "SparseCsr", "Quantized", "Autograd", "Autocast"
_FOR_TORCH = key_bits(
    *(f"{kind}{device}" for device in ("CPU", "CUDA") for kind in _KINDS),
    *("Conjugate", "Negative", "ADInplaceOrView"),
)
"""Dispatch keys that torch RPC sends, as bits; all other kinds are refused."""

_PACKED = {torch.quint4x2, torch.quint2x4}  # several elements a byte: torch reads one a byte

COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
"""Layouts whose parts are sent: torch RPC takes CSR as an argument only, and no other of them."""

_BY_ROW = {torch.sparse_csr, torch.sparse_bsr}
_PER_CHANNEL = {torch.per_channel_affine, torch.per_channel_affine_float_qparams}


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain, dense CPU tensor, whose bytes are all of it.

    Frames and shared memory take only these.
    """
    # Sparse, quantised, conjugated, negated, wrapped and device tensors have other dispatch keys.
    # is_conj() and is_neg() release the GIL, which costs 20 µs in a busy process.
    return dispatch_keys(tensor).raw_repr() in PLAIN_KEYS


def has_memory(tensor: Tensor, size: int) -> bool:
    """Return whether all elements of a strided tensor of `size` bytes are in its storage.

    It may have been freed, or made smaller: `untyped_storage().resize_(0)`. Of an expanded tensor,
    torch's own number of bytes may have overflowed: such a tensor has no memory.
    """
    if not size:
        return not tensor.numel()
    if not tensor.is_contiguous():
        if tensor.numel() * tensor.itemsize != size:
            return False
        size = last_element(tensor.shape, tensor.stride()) * tensor.itemsize
    offset: Any = tensor.storage_offset()
    if offset:
        size += offset * tensor.itemsize
    # A freed storage has 0 bytes, or no address.
    return size <= tensor.untyped_storage().nbytes() and bool(tensor.data_ptr())


def clone(tensor: Tensor) -> Tensor:
    """Return a copy. Elements that share memory share it there: all may be more than any memory."""
    if tensor.requires_grad or not is_plain(tensor):
        return tensor.clone()
    storage: Any = tensor.untyped_storage()
    if storage.nbytes() >= tensor.nbytes:
        return tensor.clone()
    offset: Any = tensor.storage_offset()
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return made.set_(storage.clone(), offset, tensor.shape, tensor.stride())


def last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements of a storage from the first one of a tensor up to its last one."""
    last = 1
    for count, stride in zip(shape, strides, strict=True):
        last += (count - 1) * stride
    return last


# ── the check ───────────────────────────────────────────────────────────────────────────────────


def check_tensor(tensor: Tensor) -> None:
    """Raise ValueError for a tensor that cannot be sent at all, on whatever device."""
    keys = dispatch_keys(tensor).raw_repr()
    if keys & ~_FOR_TORCH or tensor.dtype in _PACKED:
        _refuse_kind(tensor)
    for part in (tensor,) if keys in PLAIN_KEYS else _parts(tensor):
        if not has_memory(part, part.nbytes):
            _refuse_storage(tensor, part)


def check_tensors(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError unless every tensor can be sent. Call it when their message is made."""
    for tensor in tensors:
        if type(tensor) is Tensor:
            check_tensor(tensor)
        else:
            check_subclass(tensor)


def check_subclass(tensor: Tensor) -> None:
    """Raise ValueError for a tensor of a subclass without elements.

    It is a fake tensor, or its storage is pickled and has no memory.
    """
    if isinstance(tensor, FakeTensor):
        _refuse_kind(tensor)
    with DisableTorchFunctionSubclass():
        if is_plain(tensor) and not has_memory(tensor, tensor.nbytes):
            _refuse_storage(tensor, tensor)


def compressed_parts(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices and values of a tensor of one of the layouts `COMPRESSED`."""
    if tensor.layout in _BY_ROW:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the strided tensors of which a tensor consists."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is not torch.strided:
        return compressed_parts(tensor)
    if tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL:
        return tensor, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return (tensor,)


def _refuse_storage(tensor: Tensor, part: Tensor) -> NoReturn:
    needed = math.prod(part.shape) * part.itemsize
    if needed != part.nbytes:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} cannot be sent: its bytes "
            "cannot be counted. Send the part that is stored, and expand() it there"
        )
    raise ValueError(
        f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} cannot be sent: its storage "
        f"was freed or made smaller (resize_), to {part.untyped_storage().nbytes()} bytes for "
        f"{needed} bytes of elements. Send it while it has its memory"
    )


def _refuse_kind(tensor: Tensor) -> NoReturn:
    if isinstance(tensor, FakeTensor):
        what, remedy = "a FakeTensor", "it has no elements. Send its shape and dtype"
    elif tensor.is_nested:
        what, remedy = "a nested tensor of layout torch.strided", "send one of layout=torch.jagged"
    elif tensor.is_mkldnn:
        what, remedy = f"a tensor of layout {tensor.layout}", "send its to_dense()"
    elif tensor.dtype in _PACKED:
        what, remedy = f"a tensor of {tensor.dtype}", "send its dequantize()"
    elif tensor.is_meta:
        what, remedy = "a tensor on meta", "it has no elements. Send its shape and dtype"
    elif tensor.device.type not in ("cpu", "cuda"):
        what, remedy = f"a tensor on {tensor.device}", "move it to the CPU"
    else:
        what = f"a tensor without elements of its own ({dispatch_keys(tensor)})"
        remedy = "send it from outside of transforms such as torch.func.vmap and grad"
    raise ValueError(f"{what} cannot be sent: {remedy}")
