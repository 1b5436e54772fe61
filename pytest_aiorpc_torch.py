"""The pytest plugin: fixtures `world`, `workers` and `no_leaks`, as docs/testing.md describes them.

A module beside the package, since to import anything of the package is to import torch, and pytest
imports its plugins whether a test needs them or not. Its entry point has the module's own name, so
that `pytest_plugins = ["pytest_aiorpc_torch"]` and `-p` find it registered already.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aiorpc_torch import Worker
    from aiorpc_torch.testing import Workers


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test fails if it leaves a task, a call, a thread of ours, a process or a world behind."""
    from aiorpc_torch.testing import leaks

    before = leaks.Stock.take()
    if _is_async(request):
        request.getfixturevalue("_aiorpc_tasks")
    yield
    leaks.check(before.left())


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> "AsyncIterator[Worker]":
    """A world of one: this process, with real pickling and threads, in milliseconds."""
    from aiorpc_torch import testing

    async with testing.world() as me:
        async with _no_call_left(request):
            yield me


@pytest.fixture
async def workers(request: pytest.FixtureRequest) -> "AsyncIterator[Workers]":
    """Starts a world with workers in processes of their own, which ends when the test does."""
    from aiorpc_torch import testing

    here = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:

        async def start(workers: Any, **options: Any) -> "Worker":
            if asyncio.get_running_loop() is not here:
                raise RuntimeError(
                    "this test does not run on the loop of its fixtures: pytest-asyncio's "
                    "asyncio_default_fixture_loop_scope and the test's loop_scope must agree"
                )
            me = await stack.enter_async_context(testing.world(workers, **options))
            await stack.enter_async_context(_no_call_left(request))
            return me

        yield start


@pytest.fixture
async def _aiorpc_tasks() -> AsyncIterator[None]:
    from aiorpc_torch.testing import leaks

    before = asyncio.all_tasks()
    yield
    spared = {task for task in asyncio.all_tasks() if _is_anyios(task)}
    leaks.check(await leaks.tasks_left(before | spared))


@contextlib.asynccontextmanager
async def _no_call_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """For `no_leaks`: calls are looked for while their world is there."""
    from aiorpc_torch.testing import leaks

    before = leaks.Stock.take()
    yield
    if "no_leaks" in request.fixturenames:
        await leaks.turns()
        leaks.check(before.calls_left())


def _is_async(request: pytest.FixtureRequest) -> bool:
    marked = request.node.get_closest_marker("asyncio") is not None
    return marked or "anyio_backend" in request.fixturenames


# ── two plugins that run async fixtures ─────────────────────────────────────────────────────────


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Our fixtures run where the test does: with anyio's plugin, or else with pytest-asyncio."""
    if getattr(fixturedef.func, "__module__", None) == __name__:
        # What pytest_asyncio.fixture sets, which strict mode asks for. It cannot be set for good:
        # then pytest-asyncio would take fixtures of anyio's tests, which run on another loop.
        mark = "anyio_backend" not in request.fixturenames
        fixturedef.func.__dict__["_force_asyncio_fixture"] = mark
    return (yield)


def _is_anyios(task: "asyncio.Task[Any]") -> bool:
    """Whether anyio's plugin runs a test or a fixture in it."""
    return getattr(task.get_coro(), "__qualname__", "").startswith("TestRunner.")
