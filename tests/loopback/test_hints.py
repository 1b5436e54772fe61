"""Errors of frequent mistakes say what to write instead."""

import asyncio
from typing import Any

import pytest
import torch

from aiorpc_torch import RRef, batched, call, members, remote
from aiorpc_torch.types import LocalWorker

pytestmark = pytest.mark.usefixtures("world")


class Model:
    size = 3

    def double(self, x: int) -> int:
        return 2 * x

    @batched(max_size=4)
    def relu(self, xs: Any) -> Any:
        return torch.relu(xs)

    @batched(max_size=4)
    def product(self, xs: Any) -> Any:
        return torch.ones(2) @ xs

    @batched(max_size=4)
    def best(self, xs: Any) -> Any:
        return xs.argmax(1)

    @batched(max_size=4)
    def broken(self, xs: Any) -> Any:
        raise TypeError("list")


def notes(error: pytest.ExceptionInfo[BaseException]) -> str:
    return "\n".join(error.value.__notes__)


async def test_a_method_that_is_not_called() -> None:
    model = RRef(Model())
    assert repr(remote(model).size) == "<remote method size>"
    with pytest.raises(TypeError, match=r"size was not called: write `await remote\(rref\).size"):
        await remote(model).size  # type: ignore[misc]


async def test_a_timeout_among_the_arguments() -> None:
    model = RRef(Model())
    with pytest.raises(TypeError) as error:
        await remote(model).double(1, timeout=5)
    assert "aiorpc_torch.timeout(5)" in notes(error)
    with pytest.raises(TypeError) as error:
        await call("main", int, 1, 2, 3)
    assert not hasattr(error.value, "__notes__")


@pytest.mark.parametrize("method", ["relu", "product", "best"])
async def test_a_batch_that_is_not_stacked(method: str) -> None:
    model = RRef(Model())
    with pytest.raises((TypeError, AttributeError)) as error:
        await getattr(remote(model), method)(torch.ones(2))
    assert "stack=True" in notes(error)


async def test_another_error_of_a_batch() -> None:
    with pytest.raises(TypeError) as error:
        await remote(RRef(Model())).broken(torch.ones(2))
    assert "stack=True" not in "".join(getattr(error.value, "__notes__", []))


async def test_a_task_is_named_by_its_call() -> None:
    task = asyncio.ensure_future(remote(RRef(Model())).double(1))
    assert "coro=<call of double()>" in repr(task)
    assert await task == 2


async def test_a_peer_that_is_no_name(world: LocalWorker) -> None:
    """Of a worker that is to be started, stopped or awaited: of another type, or unknown."""
    lists: Any = ["a"]
    with pytest.raises(TypeError, match="a worker's name must be a str, got"):
        await world.start(lists)
    with pytest.raises(TypeError, match="a worker's name must be a str, got"):
        await world.stop(lists)
    with pytest.raises(ValueError, match=r"peer must be one of \(no peer\), got \['a'\]"):
        await world.wait_for(lists)
    with pytest.raises(ValueError, match=r"until must be one of \(no peer\), got \['a'\]"):
        await world.serve(lists)
    with pytest.raises(TypeError, match="count must be an int, got 'a'"):
        await members("a").wait(lists[0])
