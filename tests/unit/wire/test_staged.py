"""Values whose tensors on devices travel as bytes. CPU tensors stand for those on a device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from aiorpc_torch._torch import staging
from aiorpc_torch._torch.sendable import has_memory
from aiorpc_torch._wire import pickling, staged
from aiorpc_torch._wire.columns import PACKED
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.messages import decode_reply, encode_reply
from aiorpc_torch._wire.pickling import PickledValue, pack, unpack
from aiorpc_torch._wire.staged import OnDevice, stage
from aiorpc_torch._wire.tensors import INLINE_BYTES
from tests.support.tensor_kinds import KINDS

CPU = torch.device("cpu")
MAPPED = {CPU: CPU}


def bytes_of(tensors: Sequence[Tensor], _: Any) -> list[Tensor]:
    """What `copies_on_host` returns for tensors that are ready."""
    empty = torch.empty(0, dtype=torch.uint8)
    return [empty.new_empty(0).set_(each.untyped_storage()).clone() for each in tensors]


@pytest.fixture(autouse=True)
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors stay outside of pickles, as those on devices do."""
    monkeypatch.setattr(pickling, "small_tensor", lambda _: None)
    monkeypatch.setattr(pickling, "fence_tensors", lambda tensors: tensors or None)
    monkeypatch.setattr(staged, "copies_on_host", bytes_of)
    monkeypatch.setattr(staging, "_pinned", lambda host: host.clone())


def received(value: Any) -> Any:
    """The value as its receiver has it."""
    packed = stage(pack(value), MAPPED)
    found = unpack(*arguments_of(packed))
    assert type(found) is OnDevice
    return found.value


def arguments_of(packed: PickledValue) -> Any:
    return packed.data, packed.tensors, packed.outside


def test_no_tensor_is_left_outside() -> None:
    packed = pack({"x": torch.ones(3)})
    assert len(packed.tensors) == 1
    found = stage(packed, MAPPED)
    assert (found.tensors, found.fence) == ([], None)
    assert received({"x": torch.ones(3)})["x"].tolist() == [1.0] * 3


def test_more_bytes_than_a_frame_takes_are_carried_as_others() -> None:
    tensors = [torch.full((INLINE_BYTES // 8,), float(n)) for n in range(4)]
    packed = stage(pack(tensors), MAPPED)
    assert packed.tensors
    assert all(torch.equal(*each) for each in zip(received(tensors), tensors, strict=True))


class Pair(NamedTuple):
    x: Tensor
    other: Any


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.half,
        torch.bool,
        torch.complex64,
        torch.int8,
        torch.long,
    ],
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2]).to(dtype)
    found = received(Pair(x, [3, x]))
    assert found.x is found.other[1]  # one object arrives as one
    assert found.x.dtype is dtype
    assert torch.equal(found.x, x)


SHAPES = st.lists(st.integers(0, 3), max_size=4)


@given(st.data(), SHAPES, st.booleans())
def test_forms(data: st.DataObject, shape: list[int], needs_grad: bool) -> None:
    """Shape, strides and `requires_grad` of whatever view, as torch would send it."""
    whole = torch.randn(shape)
    x = whole.permute(data.draw(st.permutations(range(len(shape)))))
    if data.draw(st.booleans()):
        x = x.expand(2, *x.shape)
    x = x.detach().requires_grad_(needs_grad)
    found = received([x])[0]
    assert (found.shape, found.requires_grad, found.is_leaf) == (x.shape, needs_grad, True)
    assert torch.equal(found, x)
    if x.numel():
        assert found.stride() == x.stride()
    assert has_memory(found, found.nbytes)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_what_holds_tensors() -> None:
    """Parameters, modules, compressed tensors, and a result of computing with a gradient."""
    weight = nn.Parameter(torch.ones(2))
    net, sparse = nn.Linear(2, 2), KINDS["csr"]()
    found = received([weight, net, sparse, weight * 2])
    assert type(found[0]) is nn.Parameter
    assert found[0].requires_grad
    assert torch.equal(found[1].weight, net.weight)
    assert found[2].layout is torch.sparse_csr
    assert torch.equal(found[2].to_dense(), sparse.to_dense())
    assert (found[3].requires_grad, found[3].is_leaf) == (True, True)


def test_each_receiver_has_its_own_device_and_memory() -> None:
    packed = pack([torch.ones(2)])
    first, second = stage(packed, MAPPED), stage(packed, {CPU: torch.device("cuda:7")})
    one, other = unpack(*arguments_of(first)).value[0], unpack(*arguments_of(first)).value[0]
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert type(unpack(*arguments_of(second))) is RemoteFailure  # of that receiver alone


def test_all_receivers_get_it_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks once whether the tensors are ready, not once for each receiver."""
    looks: list[Any] = []
    monkeypatch.setattr(staged, "copies_on_host", lambda *_: looks.append(_))
    packed = pack([torch.ones(2)])
    assert stage(packed, MAPPED) is packed
    assert stage(packed, MAPPED) is packed
    assert len(looks) == 1


def test_values_that_stay_as_they_are() -> None:
    """Those without tensors on devices, and those with large arrays or bytes."""
    number, array = pack(3), pack([torch.ones(2), np.zeros(INLINE_BYTES)])
    assert stage(number, MAPPED) is number
    assert stage(array, MAPPED) is array


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("unreadable",)


def test_a_value_that_cannot_be_unpickled() -> None:
    found = unpack(*arguments_of(stage(pack([torch.ones(1), Unreadable()]), MAPPED)))
    assert type(found) is RemoteFailure
    assert "unreadable" in found.text


def test_a_result_is_delivered_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the streams of coroutines that wait may use it."""
    noted: list[Any] = []
    monkeypatch.setattr(staged, "note_delivered", noted.append)
    packed = stage(pack({"x": torch.ones(2)}), MAPPED)
    other = pack({"y": 3})
    found = decode_reply(*encode_reply([(1, PACKED, packed), (2, PACKED, other)]))
    assert [key for key, _ in found] == [1, 2]
    assert found[0][1]["x"].tolist() == [1.0, 1.0]
    assert found[1][1] == {"y": 3}
    assert [[each.tolist() for each in tensors] for tensors in noted] == [[[1.0, 1.0]]]
