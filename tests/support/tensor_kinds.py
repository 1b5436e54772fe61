"""Tensors of every kind that torch has on the CPU: those that can be sent, and those that cannot.

`SENDABLE` arrive equal; each of `UNSENDABLE` fails its own call. Each is made anew by its function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aiorpc_torch.testing.limits import INLINE_BYTES

LARGE = INLINE_BYTES // 4 + 3  # elements of float32 that no frame holds

WARNINGS = "ignore::UserWarning"
"""Filter of torch's warnings that layouts and dtypes are experimental, or will be removed."""

Make = Callable[[], Tensor]


class Labelled(Tensor):
    """A subclass that pickles its storage."""


class Pair(Tensor):
    """A wrapper subclass, without a storage, around two tensors."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> "Pair":
        found: Pair = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        found.first, found.second = first, second
        return found

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} of a Pair")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Pair, (self.first, self.second)


def freed(tensor: Tensor, left: int = 0) -> Tensor:
    """Return the tensor, of whose storage `left` bytes are left."""
    tensor.untyped_storage().resize_(left)
    return tensor


def without(tensor: Tensor, *parts: Tensor) -> Tensor:
    """Return the tensor, whose parts have no memory any more."""
    for part in parts:
        freed(part)
    return tensor


def inside(transform: Any) -> Tensor:
    """Return what a transform of `torch.func` passes to its function."""
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x.sum()

    transform(keep)(torch.ones(LARGE))
    return found[0]


def square() -> Tensor:
    """Return a matrix for the sparse layouts."""
    return torch.eye(200)


def inference(make: Make) -> Tensor:
    """Return a tensor made in inference mode."""
    with torch.inference_mode():
        return make()


def ramp(count: int = LARGE, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor whose elements differ."""
    return torch.arange(count).remainder(50).to(dtype)


def per_tensor() -> Tensor:
    return torch.quantize_per_tensor(ramp(), 0.5, 3, torch.qint8)


def per_channel(dtype: torch.dtype = torch.quint8) -> Tensor:
    rows = ramp(2 * LARGE).reshape(2, -1)
    zeros = torch.zeros(2, dtype=torch.float32 if dtype is torch.quint4x2 else torch.int64)
    return torch.quantize_per_channel(rows, torch.tensor([0.5, 1.0]), zeros, 0, dtype)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([ramp(3), ramp()], layout=torch.jagged)


def csr(needs: bool = False) -> Tensor:
    return square().to_sparse_csr().requires_grad_(needs)


def coo() -> Tensor:
    return square().to_sparse()


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(LARGE)


def hooked() -> Tensor:
    found = ramp().requires_grad_()
    found.register_hook(lambda gradient: gradient)
    return found


def masked() -> Tensor:
    return torch.masked.masked_tensor(ramp(), torch.ones(LARGE, dtype=torch.bool))


def _dtypes() -> dict[str, Make]:
    """Return a small and a large tensor of each dtype that can be made from numbers."""
    names = "float64 float16 bfloat16 complex32 complex64 complex128 uint8 int8 int16 int32 int64"
    names += " bool uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e8m0fnu"
    dtypes = [getattr(torch, name) for name in names.split()]
    return {
        f"{dtype} of {count}": lambda dtype=dtype, count=count: ramp(count, dtype)  # type: ignore[misc]
        for dtype in dtypes
        for count in (3, 4 * LARGE)
    }


SENDABLE: dict[str, Make] = {
    **_dtypes(),
    "small": lambda: ramp(3),
    "large": ramp,
    "scalar": lambda: torch.tensor(2.0),
    "empty": lambda: torch.ones(0, 5),
    "empty, of a freed storage": lambda: freed(torch.ones(5))[:0],
    "expanded": lambda: torch.ones(1).expand(LARGE),
    "rows expanded": lambda: ramp().expand(3, -1),
    "expanded beyond all memory": lambda: torch.ones(1).expand(1 << 45),
    "rows expanded beyond all memory": lambda: ramp().expand(1 << 30, -1),
    "empty, expanded": lambda: torch.ones(0, 1, 1).expand(0, 1 << 31, 1 << 40),
    "overlapping": lambda: ramp().as_strided((LARGE - 9, 10), (1, 1)),
    "part": lambda: ramp()[5:-5],
    "all that is left": lambda: freed(ramp(), 40)[2:10],
    "transposed": lambda: ramp(2 * LARGE).reshape(2, -1).t(),
    "every other": lambda: ramp(2 * LARGE)[::2],
    "conjugated": lambda: torch.complex(ramp(), ramp()).conj(),
    "negated": lambda: torch.complex(ramp(), ramp()).conj().imag,
    "small conjugated": lambda: torch.complex(ramp(3), ramp(3)).conj(),
    "quantised": per_tensor,
    "quantised by channel": per_channel,
    "needs gradient": lambda: ramp().requires_grad_(),
    "small needs gradient": lambda: ramp(3).requires_grad_(),
    "hooked": hooked,
    "inference": lambda: inference(ramp),
    "inference, sparse": lambda: inference(coo),
    "coo": coo,
    "coo, not coalesced": lambda: torch.sparse_coo_tensor(
        torch.zeros(1, 9, dtype=torch.int64), ramp(9), (9,)
    ),
    "coo, empty": lambda: torch.sparse_coo_tensor(size=(2, 3)),
    "coo, hybrid": lambda: ramp(60).reshape(3, 4, 5).to_sparse(1),
    "coo, needs gradient": lambda: coo().requires_grad_(),
    "csr": csr,
    "csr, needs gradient": lambda: csr(True),
    "csr of int32": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), ramp(2)
    ),
    "csr, batch": lambda: torch.stack([square(), square()]).to_sparse_csr(),
    "csc": lambda: square().to_sparse_csc(),
    "bsr": lambda: square().to_sparse_bsr((2, 2)),
    "bsc": lambda: square().to_sparse_bsc((2, 2)),
    "jagged": jagged,
    "parameter": lambda: nn.Parameter(ramp()),
    "buffer": lambda: nn.Buffer(ramp()),
    "uninitialized parameter": nn.UninitializedParameter,
    "uninitialized buffer": nn.UninitializedBuffer,
    "subclass": lambda: ramp().as_subclass(Labelled),
    "meta subclass": lambda: torch.empty(LARGE, device="meta").as_subclass(Labelled),
    "wrapper": lambda: Pair(ramp(), ramp(3)),
    "masked": masked,
}

UNSENDABLE: dict[str, Make] = {
    "freed": lambda: freed(ramp()),
    "freed, small": lambda: freed(ramp(3)),
    "freed, transposed": lambda: freed(ramp(6).reshape(2, 3).t()),
    "freed, expanded": lambda: freed(torch.ones(1).expand(LARGE)),
    "freed, needs gradient": lambda: freed(ramp().requires_grad_().mul(2)[1:]),
    "freed, parameter": lambda: nn.Parameter(freed(ramp())),
    "freed, subclass": lambda: freed(ramp()).as_subclass(Labelled),
    "freed, wrapper": lambda: Pair(ramp(3), freed(ramp())),
    "freed, masked": lambda: without(found := masked(), found.get_data()),
    "freed, conjugated": lambda: freed(torch.complex(ramp(), ramp()).conj()),
    "freed, quantised": lambda: freed(per_tensor()),
    "freed, scales": lambda: without(found := per_channel(), found.q_per_channel_scales()),
    "freed, inference": lambda: freed(inference(ramp)),
    "freed, jagged": lambda: without(found := jagged(), found.values()),
    "expanded beyond counting": lambda: torch.ones(1).expand(1 << 62),
    "expanded a little beyond counting": lambda: torch.ones(1).expand((1 << 62) + 1),
    "shrunk": lambda: freed(ramp(), 4 * LARGE - 4),
    "shrunk, small": lambda: freed(ramp(5), 12),
    "shrunk, part": lambda: freed(ramp(9)[4:7], 20),
    "shrunk, every other": lambda: freed(ramp(2 * LARGE)[::2], 4 * LARGE),
    "coo, values freed": lambda: without(found := coo(), found._values()),
    "coo, indices freed": lambda: without(found := coo(), found._indices()),
    "csr, values freed": lambda: without(found := csr(), found.values()),
    "csr, indices freed": lambda: without(found := csr(), found.crow_indices()),
    "bsc, values freed": lambda: without(found := square().to_sparse_bsc((2, 2)), found.values()),
    "mkldnn": lambda: ramp().to_mkldnn(),
    "mkldnn, small": lambda: ramp(3).to_mkldnn(),
    "meta": lambda: torch.empty(LARGE, device="meta"),
    "meta, sparse": lambda: torch.sparse_coo_tensor(size=(2, 3), device="meta"),
    "meta, parameter": lambda: nn.Parameter(torch.empty(3, device="meta")),
    "nested": lambda: torch.nested.nested_tensor([ramp(3), ramp()]),
    "packed": lambda: per_channel(torch.quint4x2),
    "zeros without memory": lambda: torch._efficientzerotensor((LARGE,)),
    "functional": lambda: torch._to_functional_tensor(ramp()),
    "functional, small": lambda: torch._to_functional_tensor(ramp(3)),
    "in vmap": lambda: inside(lambda keep: torch.vmap(keep, in_dims=0)),
    "in grad": lambda: inside(torch.func.grad),
    "fake": fake,
}

KINDS = {**SENDABLE, **UNSENDABLE}


def make(kind: str) -> Tensor:
    """Return a new tensor of a kind."""
    return KINDS[kind]()


def is_alike(found: Any, tensor: Tensor) -> bool:
    """Return whether a tensor that arrived is equal to one that was sent."""
    if isinstance(tensor, Pair):
        return is_alike(found.first, tensor.first) and is_alike(found.second, tensor.second)
    if type(found) is not type(tensor) or found.dtype != tensor.dtype:
        return False
    if found.layout != tensor.layout or found.requires_grad != tensor.requires_grad:
        return False
    return isinstance(tensor, nn.parameter.UninitializedTensorMixin) or _has_equal_elements(
        found.detach(), tensor.detach()
    )


def _has_equal_elements(found: Tensor, tensor: Tensor) -> bool:
    if tensor.layout is torch.jagged:
        pairs = zip(found.unbind(), tensor.unbind(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)
    if found.shape != tensor.shape:
        return False
    if tensor.is_meta:
        return found.is_meta
    if isinstance(tensor, torch.masked.MaskedTensor):
        return torch.equal(found.get_data(), tensor.get_data())
    if tensor.layout is torch.sparse_coo:
        indices = torch.equal(found._indices(), tensor._indices())  # torch drops is_coalesced()
        return indices and torch.equal(found._values(), tensor._values())
    if tensor.layout is not torch.strided:
        return torch.equal(found.to_dense(), tensor.to_dense())
    if tensor.is_quantized:
        return torch.equal(found.dequantize(), tensor.dequantize())
    if tensor.numel() > 1 << 30:
        parts = [each.as_strided((1, *each.shape[1:]), each.stride()) for each in (found, tensor)]
        parts = [each[..., :LARGE] for each in parts]
        return found.stride() == tensor.stride() and torch.equal(*parts)
    return torch.equal(_bytes(found), _bytes(tensor))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
