"""Programs without a file, as a notebook and a prompt are: their functions and classes travel."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("cloudpickle")

ROOT = Path(__file__).parents[2]

CELLS = textwrap.dedent(
    """
    import asyncio, enum, os, sys
    import torch
    import aiorpc_torch as aiorpc
    from aiorpc_torch import batched, call, create, fetch, remote

    class Lost(Exception):
        def __init__(self, code):
            super().__init__(f"code {code}")
            self.code = code

    class Color(enum.Enum):
        RED = 1

    class PS:
        made = 0

        def __init__(self, total):
            self.total = total
            PS.made += 1

        async def add(self, amount):
            self.total += amount
            return self.total

        def plain(self):
            return self.total

        async def fail(self):
            raise Lost(self.total)

        async def count(self, to):
            for number in range(to):
                yield Color.RED, number

        @batched(max_size=4)
        async def double(self, xs):
            return [2 * x for x in xs]

        def knows(self, other):
            return type(other) is PS and PS.made

    class Loud(PS):
        async def add(self, amount):
            return "loud"

    base = 10

    def f(x):
        return base + x, os.getpid() == here

    async def main(worker):
        global base
        base = 10
        ps, loud = await create(worker, PS, 5), await create(worker, Loud, 0)
        assert (await call(worker, f, 1))[0] == 11
        base = 20
        assert await call(worker, f, 1) == (21, worker == "main"), "as it is now"
        assert await call(worker, lambda x: x.sum().item(), torch.ones(50_000)) == 50_000
        assert await remote(ps).add(2) == 7
        assert await call(ps, PS.add, 1) == 8
        assert await call(loud, PS.add, 1) == "loud", "the override"
        assert await remote(ps).plain() == 8
        assert [item async for item in remote(ps).count(2)] == [(Color.RED, 0), (Color.RED, 1)]
        doubled = await asyncio.gather(*(remote(ps).double(x) for x in range(3)))
        assert doubled == [0, 2, 4]
        try:
            await remote(ps).fail()
        except Lost as lost:
            assert lost.code == 8
            assert type(lost.__cause__) is aiorpc.types.RemoteTraceback
        own = PS.add
        got = await fetch(ps)
        assert type(got) is PS and got.total == 8
        assert PS.add is own and PS.add.__globals__ is globals(), "nothing was replaced"
        first = await remote(ps).knows(PS(0))
        assert await remote(ps).knows(PS(0)) == first + (worker == "main")
        assert await call(worker, lambda g: g, f) is f
        assert "add" in dir(remote(ps)) and "made" not in dir(remote(ps))
        print("done", worker)

    async def world():
        async with aiorpc.local_world(["far"]):
            await main("main")
            await main("far")

    here = os.getpid()
    """
)


def run(*args: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *args],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("-c", marks=pytest.mark.exhaustive), "stdin"])
def test_a_program_without_a_file(way: str) -> None:
    """In its own process, and with a child: by `python -c` and from the standard input."""
    program = CELLS + "asyncio.run(world())\n"
    done = run("-c", program) if way == "-c" else run("-", input=program)
    assert (done.returncode, done.stdout) == (0, "done main\ndone far\n"), done.stderr


WITHOUT = """
sys.modules["cloudpickle"] = None

async def refuse():
    async with aiorpc.local_world(["far"]):
        assert (await call("main", f, 1))[0] == 11, "this process knows it by name"
        for make in (lambda: call("far", f, 1), lambda: call("far", lambda: 0)):
            try:
                await make()
            except Exception as exc:
                print(type(exc).__name__, "pip install 'aiorpc_torch[cloudpickle]'" in str(exc))

asyncio.run(refuse())
"""


@pytest.mark.slow
def test_a_program_without_a_file_and_without_cloudpickle() -> None:
    """The error of a call names the extra, and the world goes on."""
    done = run("-c", CELLS + WITHOUT)
    assert (done.returncode, done.stdout) == (0, "AttributeError True\nPicklingError True\n"), (
        done.stderr
    )


PRINTS = """
import asyncio, os
import aiorpc_torch as aiorpc

async def die():
    print("last", "words")
    os._exit(3)

async def main():
    async with aiorpc.local_world(["far"]) as me:
        await aiorpc.call("far", print, "a", "line")
        try:
            await aiorpc.call("far", die)
        except aiorpc.WorkerLost:
            await me.restart("far")

asyncio.run(main())
"""


@pytest.mark.slow
def test_prints_of_a_child_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is written at its end, also to a pipe."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    done = run("-c", PRINTS)
    assert (done.returncode, done.stdout) == (0, "a line\nlast words\n"), done.stderr


OPEN = """
import asyncio, sys
import aiorpc_torch as aiorpc

async def main():
    me = await aiorpc.local_world(["far"]).__aenter__()
    print(await aiorpc.call("far", abs, -1))

if sys.argv[1] == "a thread":
    me = aiorpc.in_thread(aiorpc.local_world(["far"])).__enter__()
    print(me.run(aiorpc.call("far", abs, -1)))
elif sys.argv[1] == "asyncio.run":
    asyncio.run(main())
else:
    asyncio.new_event_loop().run_until_complete(main())
"""


@pytest.mark.slow
@pytest.mark.promise("worlds.open")
@pytest.mark.parametrize(
    "way",
    [
        "asyncio.run",
        "a loop that is not closed",
        pytest.param("a thread", marks=pytest.mark.exhaustive),
    ],
)
def test_a_program_that_leaves_its_world_open(way: str) -> None:
    """It ends as any other: nothing is printed, and no process stays."""
    done = run("-c", OPEN, way)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


RELOADED = """
import asyncio, importlib, pathlib
import aiorpc_torch as aiorpc

async def main():
    async with aiorpc.local_world(["far"]) as me:
        file = pathlib.Path("helper.py")
        file.write_text("def f(): return 'old'")
        import helper
        print(await aiorpc.call("far", helper.f))
        file.write_text("def f(): return 'new, and longer'")
        importlib.reload(helper)
        print(helper.f(), await aiorpc.call("far", helper.f))
        await me.restart("far")
        print(await aiorpc.call("far", helper.f))

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_module_that_was_reloaded(tmp_path: Path) -> None:
    """Children keep what they have imported, until they are restarted."""
    done = run("-c", RELOADED, cwd=str(tmp_path))
    printed = ["old", "new, and longer old", "new, and longer"]
    assert (done.returncode, done.stdout.splitlines()) == (0, printed), done.stderr


EXPORTS = """
async def refuse():
    try:
        async with aiorpc.local_world(["far"], exports=[PS]):
            pass
    except TypeError as exc:
        print(exc)

asyncio.run(refuse())
"""


def test_exports_of_children_can_be_imported() -> None:
    """A class of a notebook has no name in a child, so no child exports it."""
    done = run("-c", CELLS + EXPORTS)
    assert done.stdout.startswith("exports must hold what child processes can import, got "), (
        done.stderr
    )
