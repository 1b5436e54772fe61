"""The end of created objects in other processes, where torch counts references."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, os, sys, time
import aiorpc_torch as aiorpc
from aiorpc_torch import call, create, local_world, remote

class Env:
    def __init__(self, name):
        self.name = name
        self.me = self if name == "cyclic" else None

    async def step(self):
        return self.name

    def close(self):
        with open(sys.argv[1], "a") as file:
            print(self.name, os.getpid(), file=file)

def read():
    with open(sys.argv[1]) as file:
        return sorted(line.split()[0] for line in file)

def collect():
    import gc
    gc.collect()

async def keep(rref):
    global kept
    kept = rref

async def drop():
    global kept
    del kept

async def main():
    open(sys.argv[1], "w").close()
    async with local_world(["a", "b"]):
        envs = [await create("a", Env, name) for name in ("first", "cyclic", "left")]
        passed = await create("a", Env, "passed")
        await call("b", keep, passed)
        assert [await remote(each).step() for each in envs] == ["first", "cyclic", "left"]
        del envs[:2], passed
        while read() != ["cyclic", "first"]:
            await call("a", collect)
            await asyncio.sleep(0.01)
        await call("b", drop)
        while read() != ["cyclic", "first", "passed"]:
            await asyncio.sleep(0.01)
        assert await remote(envs[0]).step() == "left"
    assert read() == ["cyclic", "first", "left", "passed"]
    print("done")

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.worlds
def test_objects_end_where_torch_counts(tmp_path: Path) -> None:
    """With the last RRef, on any worker, or when their worker leaves; each once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "ended")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Traceback" not in done.stderr
