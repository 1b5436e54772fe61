"""Versions in their places: all tensors or none."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from aiorpc_torch.training.holds import PATIENCE, Holds
from aiorpc_torch.training.placing import ForwardHolds, needed_by, place
from aiorpc_torch.training.shards import Box
from aiorpc_torch.training.snapshots import Taking
from tests.support.slack import SLACK


def filled(value: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for each in model.state_dict().values():
        each.fill_(value)
    return model


def test_a_module_gets_parameters_and_buffers() -> None:
    model = filled(0)
    parameter = model[0].weight
    place(Taking(filled(3).state_dict()).take().load(), model)
    assert all((each == 3).all() for each in model.state_dict().values())
    assert model[0].weight is parameter
    assert parameter.requires_grad


def test_other_dtypes_are_converted() -> None:
    model = filled(0).to(torch.float64)
    place(Taking(filled(3).state_dict()).take().load(), model)
    assert model[0].weight.dtype == torch.float64
    assert (model[0].weight == 3).all()


def test_a_graph_of_the_old_version_stays_valid() -> None:
    model = filled(1)
    loss = model[0](torch.ones(1, 2)).pow(2).sum()
    place(Taking(filled(3).state_dict()).take().load(), model)
    loss.backward()
    assert model[0].weight.grad is not None


@pytest.mark.promise("training.in_place")
@pytest.mark.parametrize("way", ["copy", "shared", "new memory"])
def test_who_else_sees_the_values(way: str) -> None:
    """A detached parameter and a NumPy view do if values are copied, or the memory is shared."""
    model = filled(1)
    if way == "shared":
        model.share_memory()
    others = model[0].weight.detach(), model[0].bias.detach().numpy(), model[1].running_mean
    place(Taking(filled(3).state_dict()).take().load(), model, copy=way == "copy")
    assert (model[0].weight == 3).all()
    for other in others[:2]:
        assert (other == (1 if way == "new memory" else 3)).all()
    assert model[1].running_mean is others[2]
    tensors = {"a": torch.zeros(2)}
    view = tensors["a"].numpy()
    place({"a": torch.ones(2)}, tensors, copy=way == "copy")
    assert view.tolist() == ([1, 1] if way == "copy" else [0, 0])


def test_a_graph_of_values_that_were_copied_over_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    place(Taking(model.state_dict()).take().load(), model, copy=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_values_are_copied_into_inference_tensors() -> None:
    with torch.inference_mode():
        tensors = {"a": torch.zeros(2)}
    place({"a": torch.ones(2)}, tensors, copy=True)
    assert tensors["a"].tolist() == [1, 1]


@pytest.mark.promise("training.shards")
def test_a_dtensor_keeps_its_memory(sharded: torch.Tensor) -> None:
    for each in (sharded, nn.Parameter(sharded)):
        assert needed_by({"a": each, "b": torch.ones(2)}) == {"['a']": Box((0,), (8,))}
        place({"a": torch.full((8,), 5.0)}, {"a": each})
        assert sharded.to_local().tolist() == [5.0] * 8  # type: ignore[attr-defined]
        sharded.to_local().zero_()  # type: ignore[attr-defined]
        found = Taking([each]).take().load()[0]
        assert torch.equal(found, torch.zeros(8))
    with pytest.raises(ValueError, match=r"\(2,\) in the version, \(8,\) in"):
        place({"a": torch.ones(2)}, {"a": sharded})


@pytest.mark.promise("training.shards")
def test_sums_that_are_pending_are_refused(sharded: torch.Tensor) -> None:
    mesh = sharded.device_mesh  # type: ignore[attr-defined]
    pending = DTensor.from_local(torch.ones(8), mesh, [Partial()])
    with pytest.raises(TypeError, match=r"of Shard and Replicate, got .*call `redistribute\(\)`"):
        Taking([pending]).take()


@pytest.fixture
def sharded() -> Iterator[torch.Tensor]:
    """A DTensor of a mesh of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


def test_modules_with_state_of_their_own() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    one, other = Counting(2, 2), Counting(2, 2)
    one.count = 5
    place(Taking(one.state_dict()).take().load(), other)
    assert other.count == 5
    assert torch.equal(one.weight, other.weight)


def test_dicts_and_functions() -> None:
    tensors, got = {"a": torch.zeros(2)}, list[Any]()
    place({"a": torch.ones(2)}, tensors)
    assert tensors["a"].tolist() == [1, 1]
    place([1], got.append)
    assert got == [[1]]
    place([1], None)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"a": torch.ones(2)}, "different names: the version lacks b; if several"),
        (
            {"a": torch.ones(2), "b": torch.ones(3)},
            r"'b' has the shape \(3,\) in the version, \(2,\)",
        ),
        ([torch.ones(2)], "takes dicts of tensors, .*, got list"),
    ],
)
def test_what_does_not_fit_changes_nothing(tree: Any, text: str) -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(ValueError, match=text):
        place(tree, tensors)
    assert not tensors["a"].any()


def test_an_expanded_tensor_changes_nothing() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(1).expand(3)}
    with pytest.raises(ValueError, match="'b' of `into` is expanded: nothing can be copied"):
        place({"a": torch.ones(2), "b": torch.ones(3)}, tensors, copy=True)
    assert not tensors["a"].any()
    place({"a": torch.ones(2), "b": torch.ones(3)}, tensors)
    assert tensors["b"].tolist() == [1, 1, 1]


async def test_a_forward_in_a_thread_sees_one_version() -> None:
    entered, leave, log = threading.Event(), threading.Event(), list[str]()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            entered.set()
            leave.wait()
            log.append("read")
            return x

    model, holds = Slow(), Holds()
    hooks = ForwardHolds(model, holds)
    forward = asyncio.create_task(asyncio.to_thread(model, torch.ones(1)))
    await asyncio.to_thread(entered.wait)

    async def write() -> None:
        async with holds.writing():
            log.append("written")

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    leave.set()
    await asyncio.gather(forward, writer)
    assert log == ["read", "written"]
    hooks.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


async def test_a_forward_that_raises_holds_nothing() -> None:
    model, holds = nn.Linear(2, 2), Holds()
    ForwardHolds(model, holds)
    with pytest.raises(RuntimeError):
        await asyncio.to_thread(model, torch.ones(3))
    async with holds.writing():
        pass


async def test_a_forward_that_is_interrupted_holds_nothing() -> None:
    """By Ctrl-C, of which torch tells no hook. One that still runs holds its version."""

    class Slow(nn.Module):
        def forward(self, entered: threading.Event, leave: threading.Event | None) -> None:
            entered.set()
            if leave is None:
                raise KeyboardInterrupt
            leave.wait()

    model, holds, leave = Slow(), Holds(), threading.Event()
    ForwardHolds(model, holds)
    entered = threading.Event()

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            model(threading.Event(), None)

    await asyncio.to_thread(interrupted)
    forward = asyncio.create_task(asyncio.to_thread(model, entered, leave))
    await asyncio.to_thread(entered.wait)

    async def write() -> None:
        async with holds.writing():
            assert leave.is_set()

    writer = asyncio.create_task(write())
    await asyncio.wait([writer], timeout=1.5 * PATIENCE)
    assert not writer.done()
    leave.set()
    async with asyncio.timeout(SLACK):
        await asyncio.gather(forward, writer)
        await asyncio.to_thread(interrupted)
        async with holds.writing():
            pass
