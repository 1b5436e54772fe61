"""The pytest plugin: fixtures `world`, `workers` and `no_leaks`. (docs/testing.md)

pytest imports every plugin, and an import from the package imports torch; so the plugin is a module
beside the package. Its entry point has the name of the module: `-p` and `pytest_plugins =
["pytest_aiorpc_torch"]` then find it registered.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aiorpc_torch.testing import Workers
    from aiorpc_torch.types import LocalWorker


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaks a task, a call, a thread of the library, a process or a world."""
    from aiorpc_torch.testing import leaks

    before = leaks.Snapshot.take()
    if _is_async(request):
        request.getfixturevalue("_aiorpc_tasks")
    yield
    leaks.assert_no_leaks(before.leftovers())


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> "AsyncIterator[LocalWorker]":
    """Enter a world of this process alone, with real pickling and threads, in milliseconds."""
    from aiorpc_torch import testing

    async with testing.world() as me:
        async with _no_call_left(request):
            yield me


@pytest.fixture
async def workers(request: pytest.FixtureRequest) -> "AsyncIterator[Workers]":
    """Return a function that starts a world with workers in processes; it ends with the test."""
    from aiorpc_torch import testing

    here = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:

        async def start(workers: Any, **options: Any) -> "LocalWorker":
            if asyncio.get_running_loop() is not here:
                raise RuntimeError(
                    "the test and its fixtures run on different event loops: pytest-asyncio's "
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
    anyios = {task for task in asyncio.all_tasks() if _is_anyios(task)}
    leaks.assert_no_leaks(await leaks.leftover_tasks(before | anyios))


@contextlib.asynccontextmanager
async def _no_call_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Check for pending calls before their world ends, if the test uses `no_leaks`."""
    from aiorpc_torch.testing import leaks

    before = leaks.Snapshot.take()
    yield
    if "no_leaks" in request.fixturenames:
        await leaks.run_due_callbacks()
        leaks.assert_no_leaks(before.leftover_calls())


def _is_async(request: pytest.FixtureRequest) -> bool:
    marked = request.node.get_closest_marker("asyncio") is not None
    return marked or "anyio_backend" in request.fixturenames


# ── two plugins that run async fixtures ─────────────────────────────────────────────────────────


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Run our fixtures with the plugin that runs the test: anyio's or else pytest-asyncio."""
    if getattr(fixturedef.func, "__module__", None) == __name__:
        # A private mark of pytest-asyncio, required in strict mode. In tests that anyio runs, on
        # another loop, the mark must not be set. (tests/integration/test_plugin.py)
        mark = "anyio_backend" not in request.fixturenames
        fixturedef.func.__dict__["_force_asyncio_fixture"] = mark
    return (yield)


def _is_anyios(task: "asyncio.Task[Any]") -> bool:
    """Return whether the task is the one in which anyio's plugin runs tests and fixtures."""
    return getattr(task.get_coro(), "__qualname__", "").startswith("TestRunner.")
