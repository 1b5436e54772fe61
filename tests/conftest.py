"""What every test of ours gets beside the plugin's fixtures: hypothesis's profiles, and no leak."""

import asyncio
import os
import signal
from collections.abc import Callable
from importlib import import_module, util
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores, and several workers

import pytest
from hypothesis import HealthCheck, Phase, settings

from aiorpc_torch import testing
from aiorpc_torch._aio import tasks
from aiorpc_torch._aio.slow_steps import SlowSteps
from aiorpc_torch._children import forkserver
from aiorpc_torch.testing import leaks
from tests.support.gated_batches import gated as gated, skip as skip
from tests.support.tensor_ways import set_way

# No property fails since the machine is busy: neither its examples nor their making has a time.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", untimed, max_examples=100)
settings.register_profile("brief", untimed, max_examples=20)
settings.register_profile("thorough", untimed, max_examples=200)
settings.register_profile("long", untimed, max_examples=20_000)
settings.register_profile(
    "mutation",  # the same examples each time, and no search for a smaller one: mutants fail often
    untimed,
    max_examples=50,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# Ours by name too: from a source tree that is only on the path, nothing is installed.
pytest_plugins = ["pytest_aiorpc_torch", "pytester"]


TIERS = {
    "integration": "worlds",
    "network": "network",
    "cluster": "cluster",
    "gpu": "gpu",
    "examples": "examples",
}
SLOW = {"network"}

UVLOOP = {  # files that run on both event loops
    "loopback/test_backpressure.py",
    "loopback/test_connections.py",
    "loopback/test_connections_internals.py",
    "loopback/test_group_map.py",
    "loopback/test_groups.py",
    "loopback/test_lone_calls.py",
    "loopback/test_lone_calls_internals.py",
    "loopback/test_streams.py",
    "loopback/test_supervised.py",
    "integration/test_connections.py",
    "integration/test_failure_detection.py",
    "integration/test_failure_detection_internals.py",
    "integration/test_groups.py",
    "integration/test_shared_memory.py",
    "integration/test_streams.py",
    "integration/test_supervised.py",
    "unit/port/test_dialer.py",
}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the tests of `UVLOOP` on uvloop too, where it is installed."""
    factories = {"asyncio": asyncio.new_event_loop}
    if relative_path(item).as_posix() in UVLOOP and util.find_spec("uvloop"):
        factories["uvloop"] = import_module("uvloop").new_event_loop
    return factories


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the tier of its folder, and as slow where a whole folder is.

    What `make test-rest` leaves out is slow too, so that `make test` need not know of it.
    """
    for item in items:
        folder = relative_path(item).parts[0]
        if folder in TIERS:
            item.add_marker(TIERS[folder])
        if folder in SLOW or "uvloop" in item.name or item.get_closest_marker("exhaustive"):
            item.add_marker("slow")


def relative_path(item: pytest.Item) -> Path:
    """Return the path of its file below this folder; of any other file the whole path."""
    here = Path(__file__).parent
    return item.path.relative_to(here) if item.path.is_relative_to(here) else item.path


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server that forks children, if tests need it: it imports torch meanwhile.

    The first world of this process has the usual name, whichever tests run first: `rref.rpc_sync()`
    asks its agent for names in all later worlds too. (tests/loopback/test_torch_clients.py)
    """
    if session.config.option.collectonly:
        return
    tiers = {mark.name for item in session.items for mark in item.iter_markers()}
    if tiers & {"worlds", "examples"}:
        forkserver.obtain(["tests.support.preloaded"])
    if any(relative_path(item).parts[0] == "loopback" for item in session.items):
        asyncio.run(_enter_and_leave())


async def _enter_and_leave() -> None:
    async with testing.world():
        pass


# What ends on a busy machine may take its time; tests of leaks themselves set less.
leaks.THREADS = leaks.PROCESSES = 30.0


def _note_nothing(*_: object) -> None:
    pass


# There any step may be slow: its warning would be a line that a test does not expect.
tasks.note_slow_step = _note_nothing

# A suite that a script started in the background has Ctrl-C ignored, and so would what it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_leaks(no_leaks: None) -> None:
    """No test leaves anything behind."""


@pytest.fixture
def warn_of_slow_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which slow steps are warned of, and none of before is known."""
    return lambda: monkeypatch.setattr(tasks, "note_slow_step", SlowSteps().note)


@pytest.fixture
def over_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors travel by torch RPC. Request it before the world."""
    set_way(monkeypatch, "torch")


@pytest.fixture
def over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors travel on tensor sockets, as between hosts. Request it before the world."""
    set_way(monkeypatch, "sockets")
