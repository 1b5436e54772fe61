"""Which tensors on devices go to the host, and when. CPU tensors stand for those on a device."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiorpc_torch._torch import cuda, staging
from aiorpc_torch._torch.cuda import StreamFence
from aiorpc_torch._torch.staging import PATIENCE, PAUSE, STAGED_BYTES, STAGED_TENSORS
from tests.support.cuda_doubles import ONE, ZERO, CudaTensor, Streams
from tests.support.device_stand_ins import stand_in

TICK = 10e-6  # of the clock: each look at it takes so many seconds


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += TICK
        return self.now


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    is_capturing = staging._is_capturing
    stand_in(monkeypatch)
    monkeypatch.setattr(staging, "_is_capturing", is_capturing)
    monkeypatch.setattr(staging, "fence_tensors", lambda _: fence())
    return Streams().install(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (staging, cuda):
        monkeypatch.setattr(module, "time", found)
    return found


def fence(*devices: torch.device) -> StreamFence:
    return StreamFence([CudaTensor.on(each) for each in devices or (ZERO,)])


def copies(*tensors: Tensor, of: StreamFence | None = None) -> list[Tensor] | None:
    return staging.copies_on_host(tensors, of or fence())


def queries(streams: Streams) -> int:
    return len([entry for entry in streams.log if entry[0] == "query"])


# ── when ────────────────────────────────────────────────────────────────────────────────────────


def test_ready_tensors_are_copied(streams: Streams) -> None:
    x = torch.arange(6.0).view(2, 3)
    found = copies(x, x.long())
    assert found is not None
    assert found[0].view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found[1].view(torch.long).tolist() == [0, 1, 2, 3, 4, 5]
    # The work that computes them, then their copies; each once.
    assert [entry[0] for entry in streams.log] == ["record", "query", "record", "query"]


def test_work_that_is_nearly_done_is_waited_for(streams: Streams, clock: Clock) -> None:
    streams.busy = 3
    assert copies(torch.ones(2)) is not None
    assert queries(streams) == 5
    assert clock.now < PATIENCE + 2 * TICK


def test_the_host_does_not_wait_for_a_long_kernel(streams: Streams, clock: Clock) -> None:
    """Nor at all soon after that, for that device; the next call after a pause tries again."""
    streams.busy = 1 << 20
    assert copies(torch.ones(2)) is None
    assert clock.now <= PATIENCE + 4 * TICK
    del streams.log[:]
    assert copies(torch.ones(2)) is None
    assert queries(streams) == 0
    streams.busy = 0
    assert copies(torch.ones(2), of=fence(ONE)) is not None
    assert copies(torch.ones(2), of=fence(ONE, ZERO)) is None
    clock.now += PAUSE
    assert copies(torch.ones(2)) is not None


def test_copies_that_are_late_are_dropped(streams: Streams, clock: Clock) -> None:
    """Work of other threads may be queued before them, on the same stream."""
    of = fence()
    busy = iter([0, 1 << 20])
    original = StreamFence.is_done

    def is_done(self: StreamFence, until: float) -> bool:
        streams.busy = next(busy)
        return original(self, until)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(StreamFence, "is_done", is_done)
        assert copies(torch.ones(2), of=of) is None
    assert clock.now <= 2 * PATIENCE + 6 * TICK
    assert copies(torch.ones(2)) is None


def test_a_capture_of_a_graph_is_left_alone(streams: Streams) -> None:
    of = fence()
    del streams.log[:]
    streams.is_capturing = True
    assert copies(torch.ones(2), of=of) is None
    assert streams.log == []


# ── which ───────────────────────────────────────────────────────────────────────────────────────


SHARED = torch.ones(2, 3)
LARGE = torch.ones(STAGED_BYTES // 4)
OTHERS: dict[str, list[Tensor]] = {
    "large": [torch.ones(STAGED_BYTES // 4 + 1)],
    "large together": [LARGE, torch.ones(1)],
    "many": [torch.ones(1) for _ in range(STAGED_TENSORS + 1)],
    "one storage": [SHARED, SHARED.T],
    "elsewhere": [torch.ones(1, device="meta")],
    "conjugated": [torch.ones(2, dtype=torch.complex64).conj()],
    "negated": [torch.ones(2, dtype=torch.complex64).conj().imag],
    "sparse": [torch.eye(2).to_sparse()],
}


@pytest.mark.parametrize("tensors", OTHERS.values(), ids=OTHERS)
def test_others_travel_by_torch(streams: Streams, tensors: Sequence[Tensor]) -> None:
    of = fence()
    del streams.log[:]
    assert copies(*tensors, of=of) is None
    assert streams.log == []


def test_the_limits(streams: Streams) -> None:
    assert copies(LARGE) is not None
    assert copies(*(torch.ones(1) for _ in range(STAGED_TENSORS))) is not None


def test_tensors_on_the_cpu_are_not_dense_ones_on_a_device() -> None:
    assert not staging._are_small([torch.ones(1)])


# ── to the device ───────────────────────────────────────────────────────────────────────────────


def forms() -> Any:
    """Shapes and strides over a small storage."""
    axes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=3)
    return st.tuples(axes, st.integers(0, 3), st.sampled_from([torch.float32, torch.bool]))


@given(forms())
def test_there_and_back(form: tuple[list[tuple[int, int]], int, torch.dtype]) -> None:
    """The same elements at the same places of a storage."""
    axes, offset, dtype = form
    shape, strides = [size for size, _ in axes], [stride for _, stride in axes]
    whole = torch.arange(64).to(dtype)
    x = whole.as_strided(shape, strides, offset)
    with pytest.MonkeyPatch.context() as patches:
        stand_in(patches)
        memory = bytearray(staging._start_copy(x).numpy())
        cpu = torch.device("cpu")
        found = staging.on_device(memory, cpu, dtype, shape, strides, offset)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    assert torch.equal(found, x)
    if x.numel():
        assert (found.stride(), found.storage_offset()) == (tuple(strides), offset)
    assert found.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or not x.numel()


def test_pinned_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default device is."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(staging, "torch", SimpleNamespace(empty=empty_into(asked), uint8="uint8"))
    staging._new_pinned(3)
    assert asked == [{"dtype": "uint8", "device": "cpu", "pin_memory": True}]


def empty_into(asked: list[dict[str, Any]]) -> Any:
    return lambda size, **options: asked.append(options)
