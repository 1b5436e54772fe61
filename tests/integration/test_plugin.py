"""The pytest plugin, in pytest runs of its own: both async plugins, leaks, failures, its start."""

import os
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ACTORS = """
import asyncio

class Counter:
    def __init__(self):
        self.value = 0
    async def add(self, amount):
        self.value += amount
        return self.value
    async def sleep(self):
        await asyncio.Event().wait()
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs pytest on a file of tests, in a process of its own, and returns what came of it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makepyfile(actors=ACTORS)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")

    def run(tests: str, *args: str, plugin: bool = True) -> pytest.RunResult:
        pytester.makepyfile(test_them=tests)
        named = ["-p", "pytest_aiorpc_torch"] if plugin else []
        return pytester.runpytest_subprocess(
            *named, "-p", "no:cacheprovider", "-W", "error", "--timeout=500", *args
        )

    return run


# ── who runs the tests ──────────────────────────────────────────────────────────────────────────

BOTH_FIXTURES = """
import pytest
from actors import Counter
from aiorpc_torch import call, create, remote

{mark}
async def test_world(world, no_leaks):
    counter = await create(world.name, Counter)
    assert await remote(counter).add(2) == 2

{mark}
async def test_workers(no_leaks, workers):
    me = await workers(["a", "b"])
    assert (me.name, me.peers) == ("main", ("a", "b"))
    counter = await create("a", Counter)
    assert await remote(counter).add(2) == 2

{mark}
async def test_workers_again(workers):
    assert (await workers(1)).peers == ("worker1",)

{mark}
async def test_workers_that_do_not_start(no_leaks, workers):
    assert workers

def test_without_a_loop(no_leaks):
    pass
"""

ANYIO = """
@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.asyncio
async def test_the_other_plugin_beside_it(no_leaks, world):
    counter = await create(world.name, Counter)
    assert await remote(counter).add(2) == 2
"""


@pytest.mark.promise("testing.fixtures")
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("auto", marks=pytest.mark.exhaustive),  # all tests here run so
        "strict",
    ],
)
def test_with_pytest_asyncio(run, mode: str) -> None:
    """Whether fixtures have to be marked for it or not."""
    mark = {"auto": "", "strict": "@pytest.mark.asyncio"}[mode]
    done = run(BOTH_FIXTURES.format(mark=mark), f"--asyncio-mode={mode}")
    done.assert_outcomes(passed=5)


@pytest.mark.promise("testing.fixtures")
@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [pytest.param("anyio first", marks=pytest.mark.exhaustive), "anyio last", "anyio alone"],
)
def test_with_anyio(run, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pytest-asyncio beside it, in whichever order they are loaded, or without."""
    tests = BOTH_FIXTURES.format(mark="@pytest.mark.anyio") + ANYIO
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    plugins = {
        "anyio first": ["anyio.pytest_plugin", "pytest_asyncio.plugin", "pytest_timeout"],
        "anyio last": ["pytest_asyncio.plugin", "anyio.pytest_plugin", "pytest_timeout"],
        "anyio alone": ["anyio.pytest_plugin", "pytest_timeout"],
    }[order]
    named = [word for plugin in plugins for word in ("-p", plugin)]
    if order == "anyio alone":
        done = run(tests, *named, "-k", "not other_plugin", "-W", "default")
        done.assert_outcomes(passed=5, deselected=1, warnings=2)  # of what pytest-asyncio knows
    else:
        done = run(tests, *named)
        done.assert_outcomes(passed=6)


@pytest.mark.slow
def test_a_loop_that_is_not_that_of_the_fixtures(run) -> None:
    """It raises, and does not hang."""
    done = run(
        """
        import pytest

        @pytest.mark.asyncio(loop_scope="module")
        async def test_elsewhere(workers):
            with pytest.raises(RuntimeError, match="asyncio_default_fixture_loop_scope"):
                await workers(1)
        """
    )
    done.assert_outcomes(passed=1)


# ── what is left behind ─────────────────────────────────────────────────────────────────────────

LEAKS = """
import asyncio, os, subprocess, threading
import pytest
from actors import Counter
from aiorpc_torch import create, remote, testing

pytestmark = pytest.mark.usefixtures("no_leaks")
kept = []

async def test_task():
    kept.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))

async def test_call(world):
    counter = await create("main", Counter)
    kept.append(asyncio.create_task(remote(counter).sleep()))
    await asyncio.sleep(0)

async def test_call_to_a_worker(workers):
    await workers(["a"])
    counter = await create("a", Counter)
    kept.append(asyncio.create_task(remote(counter).sleep()))
    await asyncio.sleep(0)

def test_thread():
    kept.append(threading.Thread(target=threading.Event().wait, name="aiorpc-x", daemon=True))
    kept[-1].start()

def test_process():
    kept.append(subprocess.Popen(["sleep", "20"]))

async def test_nothing(world):
    counter = await create("main", Counter)
    await remote(counter).add(1)

async def test_failing(workers):
    await workers(["a"])
    print("pid:", os.getpid())
    counter = await create("a", Counter)
    kept.append(asyncio.create_task(remote(counter).sleep()))
    assert await remote(counter).add(1) == 2

async def test_after_it(workers):
    assert (await workers(["b"])).peers == ("b",)

async def test_world_left_open():
    kept.append(testing.world())
    await kept[-1].__aenter__()
"""


@pytest.mark.slow
@pytest.mark.promise("testing.leaks")
def test_leaks_fail_the_test_that_left_them(run) -> None:
    """Each test is named at its end, and the next one starts without leaks."""
    done = run(LEAKS, "--asyncio-mode=auto", "-rE", "-v")
    done.assert_outcomes(passed=8, failed=1, errors=7)
    told = {
        line.split("::")[1].split(" ")[0]: line.split("left behind: ")[1]
        for line in done.outlines
        if line.startswith("ERROR") and "left behind: " in line
    }
    assert told.keys() == {
        "test_task",
        "test_call",
        "test_call_to_a_worker",
        "test_thread",
        "test_process",
        "test_world_left_open",
        "test_failing",
    }
    done.stdout.fnmatch_lines_random(
        [
            "E*left behind: the task forgotten in <coroutine object Event.wait *",
            "E*left behind: 1 pending call (sleep of 'main')",
            "E*left behind: the thread aiorpc-x",
            "E*left behind: the process sleep (pid *)",
            "E*left behind: a world that was not left",
        ]
    )
    assert told["test_call"].startswith("1 pending call")
    assert told["test_call_to_a_worker"].startswith("1 pending call")


# ── how it is found ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("testing.import")
def test_it_does_not_slow_pytest_down(run) -> None:
    """To have the library installed is not to import torch in each run of pytest."""
    tests = """
    import sys

    def test_no_torch():
        assert "pytest_aiorpc_torch" in sys.modules
        assert not {"torch", "aiorpc_torch"} & sys.modules.keys()
    """
    run(tests).assert_outcomes(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_installed(run, pytester: pytest.Pytester, named: bool) -> None:
    """Its entry point is enough, and a second mention of the plugin is harmless."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, module)] = project["entry-points"]["pytest11"].items()
    assert name == module, "or pytest would register it twice"
    info = pytester.mkdir("aiorpc_torch-0.dist-info")  # as an installer writes it, in sys.path
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiorpc-torch\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n")
    pytester.syspathinsert()
    if named:
        pytester.makeconftest(f"pytest_plugins = [{module!r}]")
    tests = "async def test_world(world): assert world.name == 'main'"
    path = os.pathsep.join((str(pytester.path), str(ROOT)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        run(tests, "--asyncio-mode=auto", plugin=False).assert_outcomes(passed=1)
