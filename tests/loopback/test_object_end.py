"""The end of created objects: `aclose()` or `close()`, once, and errors in the log."""

import asyncio
import gc
import io
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, create, remote, testing
from tests.support.rref_releases import release

ended: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ended.clear()


class Closes:
    def __init__(self, name: str = "closes") -> None:
        self.name = name

    async def here(self) -> str:
        return self.name

    def close(self) -> None:
        assert threading.current_thread().name == "aiorpc-close"
        ended.append(("close", self.name))


class Acloses(Closes):
    async def aclose(self) -> None:
        await asyncio.sleep(0)
        ended.append(("aclose", self.name))


class AsyncClose(Closes):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        ended.append(("async close", self.name))


class Deletes(Closes):
    """Has a finalizer of its own, which runs after the end."""

    def __del__(self) -> None:
        ended.append(("del", self.name))


class Cyclic(Closes):
    def __init__(self, name: str = "cyclic") -> None:
        super().__init__(name)
        self.me = self


@aiorpc.exclusive
class Exclusive(Acloses):
    pass


class Fails(Closes):
    def close(self) -> None:
        raise LookupError("cannot close")


class NeedsArguments(Closes):
    def close(self, price: float) -> None:  # type: ignore[override]
        ended.append("never")


class Slotted:
    __slots__ = ("name",)

    def __init__(self) -> None:
        self.name = "slotted"

    async def here(self) -> str:
        return self.name

    def close(self) -> None:
        ended.append("never")


class Hangs(Closes):
    async def aclose(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise


async def until(count: int) -> list[Any]:
    """Wait until so many have ended; an RRef that torch counts is released in its threads."""
    for _ in range(1000):
        gc.collect()
        if len(ended) >= count:
            break
        await asyncio.sleep(0.005)
    return ended


# ── the last RRef ───────────────────────────────────────────────────────────────────────────────
#
# torch counts references in the first world of a process only, and this is a later one: `release`
# drops what the owner keeps in its place. (tests/integration/test_object_end.py: as torch counts)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Closes, [("close", "x")]),
        (Acloses, [("aclose", "x")]),
        (AsyncClose, [("async close", "x")]),
        (Deletes, [("close", "x"), ("del", "x")]),
        (Cyclic, [("close", "x")]),
    ],
)
@pytest.mark.usefixtures("world")
async def test_an_object_ends_with_its_last_rref(cls: type[Closes], expected: Any) -> None:
    """Once, whatever the class defines; the object itself, not a copy, and then it is freed."""
    made = await create("main", cls, "x")
    assert await remote(made).here() == "x"
    alive = weakref.ref(made.local_value())
    assert ended == []
    del made
    release()
    assert await until(len(expected)) == expected
    for _ in range(1000):
        gc.collect()
        if alive() is None:
            break
        await asyncio.sleep(0.005)
    assert alive() is None
    assert ended == expected


@pytest.mark.usefixtures("world")
async def test_another_reference_keeps_the_object() -> None:
    made = await create("main", Closes)
    kept = made.local_value()
    del made
    release()
    gc.collect()
    await asyncio.sleep(0.02)
    assert ended == []
    del kept
    assert await until(1) == [("close", "closes")]


@pytest.mark.usefixtures("world")
async def test_objects_that_the_library_did_not_make() -> None:
    """Those are the program's own, also of a class that has been created before."""
    made = await create("main", Closes, "made")
    own, by_torch = RRef(Closes("own")), rpc.remote("main", Closes, args=("torch",))
    assert await remote(own).here() == "own"
    assert await remote(by_torch).here() == "torch"
    loose = Closes("loose")
    del own, by_torch, loose, made
    release()
    assert await until(1) == [("close", "made")]
    await asyncio.sleep(0.02)
    assert ended == [("close", "made")]


@pytest.mark.usefixtures("world")
async def test_errors_of_an_end_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = await create("main", Fails)
    del made
    with caplog.at_level(logging.ERROR, "aiorpc_torch"):
        release()
        for _ in range(1000):
            gc.collect()
            if caplog.records:
                break
            await asyncio.sleep(0.005)
    assert "Fails.close of a created object failed" in caplog.text
    assert "cannot close" in caplog.text


@pytest.mark.usefixtures("world")
async def test_an_exclusive_object_ends_in_a_turn() -> None:
    made = await create("main", Exclusive, "x")
    assert await remote(made).here() == "x"
    del made
    release()
    assert await until(1) == [("aclose", "x")]


# ── the worker leaves ───────────────────────────────────────────────────────────────────────────


async def test_objects_end_when_their_worker_leaves(tmp_path: Path) -> None:
    """Once each; those that are held here too. Types of C and objects with cycles as well."""
    async with testing.world():
        made = [await create("main", cls, cls.__name__) for cls in (Closes, Acloses, Cyclic)]
        values = [each.local_value() for each in made]
        file = await create("main", open, str(tmp_path / "file"), "w")
        stream = file.local_value()
        assert isinstance(stream, io.TextIOWrapper)
        assert ended == []
    expected = [("close", "Closes"), ("aclose", "Acloses"), ("close", "Cyclic")]
    assert sorted(ended) == sorted(expected)
    assert not any("__del__" in vars(cls) for cls in (Closes, Acloses, Cyclic))
    assert stream.closed
    del values, made, file
    gc.collect()
    assert sorted(ended) == sorted(expected)


async def test_objects_end_when_the_block_fails() -> None:
    with pytest.raises(LookupError):
        await _fail_in_a_world()
    assert ended == [("aclose", "closes")]


async def _fail_in_a_world() -> None:
    async with testing.world():
        _held = await create("main", Acloses)
        raise LookupError


async def test_methods_that_end_nothing() -> None:
    """A `close` with parameters, and objects that cannot be referred to weakly."""
    async with testing.world():
        priced, slotted = await create("main", NeedsArguments), await create("main", Slotted)
        assert await remote(priced).here() == "closes"
        assert await remote(slotted).here() == "slotted"
    assert ended == []


async def test_an_end_that_hangs_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "aiorpc_torch"):
        async with testing.world(stop_timeout=0.05):
            _held = await create("main", Hangs)
    assert ended == ["cancelled"]
    assert "Hangs.aclose did not end within 0.05 s" in caplog.text
