"""Calls and results with small tensors on a device, which go through the host.

CPU tensors stand for those on a device, and there is no torch RPC.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiorpc_torch import batched, call
from tests.support.device_stand_ins import DTYPE, StandIns
from tests.support.two_ends import TwoEnds, two_ends


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns().install(monkeypatch)


@pytest.fixture
async def ends(found: StandIns) -> AsyncIterator[TwoEnds]:
    async with two_ends() as ends:
        yield ends


def here(*values: float) -> Tensor:
    """A tensor that stands for one on a device."""
    return torch.tensor(values, dtype=DTYPE)


THREADS: list[int] = []
"""Those that have run `double`."""


def double(x: Tensor) -> Tensor:
    THREADS.append(threading.get_ident())
    return x * 2


async def adouble(x: Tensor) -> Tensor:
    return double(x)


@pytest.mark.parametrize("function", [double, adouble])
@pytest.mark.usefixtures("ends")
async def test_the_thread_that_uses_an_argument_waits_for_its_copy(
    found: StandIns, function: Any
) -> None:
    assert (await call("far", function, here(1.0, 2.0))).tolist() == [2.0, 4.0]
    assert found.ways == ["host", "host"]
    ((thread, tensors),) = found.waits
    assert thread == THREADS[-1]
    assert [each.tolist() for each in tensors] == [[1.0, 2.0]]


def many(x: Any, scale: float, other: Tensor) -> dict[str, Any]:
    return {"x": [each * scale for each in x], "other": other}


@pytest.mark.usefixtures("ends")
async def test_values_that_hold_tensors(found: StandIns) -> None:
    """Beside numbers and tensors on the CPU, by name or not."""
    on_cpu = torch.ones(3)
    sent = {"scale": 2.0, "other": on_cpu}
    answer = await call("far", many, (here(1.0), here(2.0, 3.0)), **sent)
    assert [each.tolist() for each in answer["x"]] == [[2.0], [4.0, 6.0]]
    assert torch.equal(answer["other"], on_cpu)
    assert found.ways == ["host", "host"]


def items(count: int) -> Iterator[Tensor]:
    buffer = here(0.0)
    for index in range(count):
        yield buffer.fill_(index)


async def aitems(count: int) -> AsyncIterator[Tensor]:
    for item in items(count):
        yield item


@pytest.mark.parametrize("generator", [items, aitems])
@pytest.mark.usefixtures("ends")
async def test_items_of_a_stream(found: StandIns, generator: Any) -> None:
    """Each is what it was when it was yielded."""
    assert [float(item) async for item in call("far", generator, 5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found.ways == ["host"] * 5


@pytest.mark.usefixtures("ends")
async def test_a_group(found: StandIns) -> None:
    """The device is asked once for the tensors that all members get."""
    answers = await call(["far", "far", "far"], double, here(1.0))
    assert [each.tolist() for each in answers] == [[2.0]] * 3
    assert found.ways == ["host"] * 6
    assert len({each.untyped_storage().data_ptr() for each in answers}) == 3


@batched(max_size=4)
def doubled(rows: list[Tensor]) -> list[Tensor]:
    return [row * 2 for row in rows]


@pytest.mark.usefixtures("ends")
async def test_a_batch(found: StandIns) -> None:
    answers = await asyncio.gather(*(call("far", doubled, here(float(n))) for n in range(6)))
    assert [each.tolist() for each in answers] == [[2.0 * n] for n in range(6)]
    assert set(found.ways) == {"host"}
    assert len(found.waits) == 6


def unreadable(x: Tensor) -> Any:
    return [x, Unreadable()]


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("unreadable",)


@pytest.mark.usefixtures("ends")
async def test_a_value_that_cannot_be_read(found: StandIns) -> None:
    """It fails its own call."""
    others = [call("far", double, here(1.0)) for _ in range(2)]
    with pytest.raises(ValueError, match="unreadable"):
        await call("far", double, [here(1.0), Unreadable()])
    with pytest.raises(ValueError, match="unreadable"):
        await call("far", unreadable, here(1.0))
    assert [each.tolist() for each in await asyncio.gather(*others)] == [[2.0]] * 2


# ── by torch ────────────────────────────────────────────────────────────────────────────────────


def form(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.requires_grad, x


WHOLE = torch.arange(24, dtype=DTYPE).view(4, 6)


@pytest.mark.parametrize(
    "x",
    [
        WHOLE.T,
        WHOLE[:, 2:4],
        WHOLE[1],
        WHOLE[:0],
        here(3.0).expand(2, 5),
        here(1.0).requires_grad_(),
        nn.Parameter(here(1.0)),
        here(*range(13_107)),  # near the 128 KiB up to which bytes ride in the message
    ],
    ids=["transposed", "part", "row", "empty", "expanded", "leaf", "parameter", "long"],
)
@pytest.mark.usefixtures("ends")
async def test_forms(found: StandIns, x: Tensor) -> None:
    """Both ways; a view arrives without the rest of its storage."""
    kind, shape, strides, needs_grad, back = await call("far", form, x)
    assert (kind, shape, needs_grad) == (type(x), x.shape, x.requires_grad)
    assert torch.equal(back, x)
    assert (back.shape, back.requires_grad, type(back)) == (x.shape, x.requires_grad, type(x))
    if x.numel() and x.untyped_storage().nbytes() <= x.nbytes:
        assert strides == back.stride() == x.stride()
    assert found.ways == ["host", "host"]


@pytest.mark.usefixtures("ends")
async def test_tensors_that_are_still_computed(found: StandIns) -> None:
    """They stay outside of the bytes. What is done later goes through the host again."""
    await call("far", double, torch.ones(1))
    found.is_busy = True
    assert (await call("far", here, 1.0)).tolist() == [1.0]
    assert found.ways == ["torch"]
    found.is_busy = False
    await asyncio.sleep(0.004)  # longer than a busy device is left alone
    assert (await call("far", here, 1.0)).tolist() == [1.0]
    assert found.ways == ["torch", "host"]
