"""Plain, unmodified torch clients against our server methods, in a world of one."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from aiorpc_torch import RRef, async_execution, wrap_future
from tests.support import actors
from tests.support.actors import Batching
from tests.support.tensor_kinds import freed, is_alike, jagged

pytestmark = pytest.mark.usefixtures("world")


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` like a torch program: blocking, in a thread without a loop."""
    return await asyncio.to_thread(function, *args, **kwargs)


@pytest.mark.promise("torch_clients.async_execution")
async def test_rpc_sync_of_an_async_execution_function() -> None:
    """`rpc_sync` runs the coroutine on the callee's loop and returns its result."""
    assert await in_thread(rpc.rpc_sync, "main", actors.add_slowly, args=(2, 3)) == 5


async def test_rpc_async_future_is_awaitable() -> None:
    """A future of torch's `rpc_async` can be awaited."""
    future = rpc.rpc_async("main", torch.add, args=(torch.ones(2), 1))
    assert torch.equal(await wrap_future(future), torch.full((2,), 2.0))


@pytest.mark.promise("torch_clients.errors")
@pytest.mark.parametrize("text", ["plain", "größer als π", r"C:\users\xyz", "two\nlines"])
async def test_async_execution_errors_reach_torch_clients(text: str) -> None:
    """Errors raise as in torch, though torch itself garbles all but the first text."""
    with pytest.raises(ValueError, match="ValueError") as raised:
        await in_thread(rpc.rpc_sync, "main", actors.fail_slowly, args=(text,))
    assert repr(ValueError(text)) in str(raised.value)


@async_execution
async def give_freed() -> Any:
    """Return a tensor whose storage was freed: torch would end the process that sends it."""
    return {"x": freed(torch.ones(3))}


@async_execution
async def give_jagged() -> Any:
    """Return a tensor of a subclass, which torch pickles by its parts."""
    return jagged()


async def test_a_result_of_a_subclass() -> None:
    assert is_alike(await in_thread(rpc.rpc_sync, "main", give_jagged), jagged())


async def test_a_result_that_cannot_be_sent() -> None:
    """It is an error of that call, as it is for our own callers."""
    with pytest.raises(ValueError, match="its storage was freed or made smaller"):
        await in_thread(rpc.rpc_sync, "main", give_freed)
    assert await in_thread(rpc.rpc_sync, "main", actors.add_slowly, args=(2, 3)) == 5


@pytest.mark.promise("torch_clients.batched")
async def test_batched_through_an_rref() -> None:
    """`rref.rpc_sync().method(x)` and `rpc_async` share one batch."""
    batching = Batching()
    rref = RRef(batching)
    assert await in_thread(lambda: rref.rpc_sync().double(4)) == 8
    futures = [rref.rpc_async().double(n) for n in range(8)]
    assert [await wrap_future(future) for future in futures] == [2 * n for n in range(8)]


async def test_batched_by_function() -> None:
    """Call `rpc_sync(owner, PS.update, args=(rref, x))`, as in the PyTorch tutorials."""
    rref = RRef(Batching())
    assert await in_thread(rpc.rpc_sync, "main", Batching.double, args=(rref, 5)) == 10
    assert await in_thread(rpc.rpc_sync, "main", Batching.static_double, args=(6,)) == 12


async def test_a_round_of_torch_clients_and_ours() -> None:
    """Callers of both kinds complete one round."""
    batching = Batching()
    rref = RRef(batching)
    theirs = [wrap_future(rpc.rpc_async("main", Batching.total, args=(rref, n))) for n in (1, 2)]
    assert await asyncio.gather(*theirs, batching.total(3)) == [6, 6, 6]


@pytest.mark.promise("torch_clients.errors")
async def test_batched_errors_reach_torch_clients() -> None:
    """Errors raise as in torch: ValueError, TypeError, or RuntimeError with the text."""
    rref = RRef(Batching())
    with pytest.raises(RuntimeError, match=r"LookupError: .'the body', 1"):
        await in_thread(rpc.rpc_sync, "main", Batching.broken, args=(rref, 1))
