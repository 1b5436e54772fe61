"""RRefs between workers, in a process's first world and in later ones, and as a world ends."""

import contextlib
from pathlib import Path

import pytest

from aiorpc_torch import NotInWorld, RRef, WorkerLeft, create, remote
from aiorpc_torch.testing import world
from tests.support.actors import Counter, Holder, Slotted
from tests.support.scripts import program, started


class Plain(Slotted):
    """An object with weak references."""

    __slots__ = ("__weakref__",)


KINDS = pytest.mark.parametrize("kind", [Plain, Slotted])


# ── as a world ends ─────────────────────────────────────────────────────────────────────────────


# ── in this process, which has been in many ─────────────────────────────────────────────────────


@KINDS
@pytest.mark.usefixtures("world")
async def test_of_ones_own_object(kind: type[Slotted]) -> None:
    """Make an RRef here or by a call, call its object, send the RRef to the object."""
    for rref in (RRef(kind()), await create("main", kind)):
        assert [await remote(rref).add(2), await remote(rref).add(2)] == [2, 4]
        assert await remote(rref).me(rref)


@pytest.mark.promise("calls.not_in_world")
async def test_of_a_world_that_was_left() -> None:
    """Any use raises, whichever its owner; RRefs of own objects still work."""
    async with world(["a"]):
        there, here = await create("a", Counter), await create("main", Counter)
        assert [await remote(there).add(2), await remote(here).add(2)] == [2, 2]
    async with world(["a"]):
        with pytest.raises(ReferenceError, match="of a world that this process has left"):
            await remote(there).add(2)
        with pytest.raises(ReferenceError, match="of a world that this process has left"):
            await remote(await create("a", Counter)).add(there)
        assert await remote(here).add(2) == 4
        holder = await create("a", Holder)
        await remote(holder).take(here)
        assert await remote(holder).add(2) == 6
        assert (await remote(holder).given()).local_value() is here.local_value()
    with pytest.raises(NotInWorld):
        await remote(there).add(2)


async def test_of_a_larger_world_that_was_left() -> None:
    """No worker of the later world has the owner's number."""
    async with world(["a"]):
        there = await create("a", Counter)
    async with world([]):
        with pytest.raises(WorkerLeft, match="of an earlier world"):
            await remote(there).add(2)


@pytest.mark.promise("worlds.rrefs")
@KINDS
async def test_of_ours_among_fresh_processes(kind: type[Slotted]) -> None:
    """An object of this process, which is in a later world, is called and passed on by others."""
    async with world([]):
        pass
    async with world(["a", "b"]):
        rref = RRef(kind())
        first, second = [await create(name, Holder) for name in ("a", "b")]
        await remote(first).take(rref)
        await remote(second).take_from(first)
        assert [await remote(holder).add(1) for holder in (first, second, first)] == [1, 2, 3]
        assert await remote(second).given() is rref


@pytest.mark.promise("worlds.rrefs")
async def test_of_theirs_passed_on_among_them_and_to_us(capfd: pytest.CaptureFixture[str]) -> None:
    """Any owner, any path to the user of the RRef; the world ends without output."""
    async with world([]):
        pass
    async with world(["a", "b"]):
        rref, holder = await create("a", Counter), await create("b", Holder)
        await remote(holder).take(rref)
        found = await remote(holder).given()
        assert [await remote(each).add(1) for each in (rref, found)] == [1, 2]
        assert await remote(holder).add(1) == 3
    # torch would wait for holders that do not report, and say so.
    assert "Timed out" not in capfd.readouterr().err


@pytest.mark.promise("worlds.rrefs")
async def test_of_theirs_in_a_plain_torch_call() -> None:
    """Between processes in their first world, torch finds the object until this world ends."""
    async with world([]):
        pass
    async with world(["a", "b"]):
        rref = await create("a", Counter)
        first, second = [await create("b", Holder) for _ in range(2)]
        for holder in (first, second):
            await remote(holder).take(rref)
        await remote(first).take(None)  # torch of b tells that of a
        assert await remote(second).add_by_torch(2) == 2


# ── the same processes in one world after another ───────────────────────────────────────────────

AGAIN = """
    from tests.support.actors import Counter, Holder

    async def main(rank, where):
        for round in range(3):
            async with aiorpc.worker(rank=rank, world_size=3, init_method=f"{where}{round}"):
                after, last = (f"worker{(rank + step) % 3}" for step in (1, 2))
                counter, holder, other = [
                    await aiorpc.create(*each)
                    for each in ((after, Counter), (after, Holder), (last, Holder))
                ]
                await aiorpc.remote(holder).take(holder)
                assert await aiorpc.remote(holder).is_its_own()
                await aiorpc.remote(holder).take(counter)
                await aiorpc.remote(other).take_from(holder)
                own = aiorpc.RRef([rank])
                await aiorpc.remote(holder).take(own)
                found = [
                    await aiorpc.remote(counter).add(1),
                    await aiorpc.remote(other).add(1),
                    await aiorpc.fetch(own),
                    (await asyncio.to_thread(counter.to_here, 60.0)).value,
                ]
                assert found == [1, 2, [rank], 2], found
            print("left", flush=True)

    if __name__ == "__main__":
        asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.slow
def test_objects_of_workers_that_enter_again(tmp_path: Path) -> None:
    """They are made, called, passed on and sent back, in the third world as in the first."""
    path, where = program(tmp_path, AGAIN), f"file://{tmp_path}/store"
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(started(path, str(rank), where)) for rank in range(3)]
        said = [process.communicate(timeout=500) for process in found]
    assert said == [("left\n" * 3, "")] * 3
    assert [process.returncode for process in found] == [0, 0, 0]
