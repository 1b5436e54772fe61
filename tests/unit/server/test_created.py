"""The classes of created objects: what their worker adds to them, and that it removes it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch._server.created import CreatedObjects

ended: list[str] = []


class Closes:
    async def aclose(self) -> None:
        ended.append("aclose")


class Inherits(Closes):
    """Uses the finalizer of its base, if that has one."""


class Deletes(Closes):
    def __del__(self) -> None:
        ended.append("del")


class InheritsDelete(Deletes):
    pass


class CallsBase(Deletes):
    def __del__(self) -> None:
        ended.append("first")
        super().__del__()


def made(created: CreatedObjects, cls: type[Closes]) -> Closes:
    created.add(found := cls())
    return found


CLASSES = [Closes, Inherits, Deletes, InheritsDelete, CallsBase]


@pytest.fixture
def steps() -> list[Callable[[], None]]:
    ended.clear()
    return []


@pytest.fixture
def created(steps: list[Callable[[], None]]) -> CreatedObjects:
    return CreatedObjects(steps.append)


@pytest.mark.parametrize("order", [1, -1])
async def test_classes_are_as_they_were(created: CreatedObjects, order: int) -> None:
    """After `close`, in whichever order related classes were created."""
    before = [vars(each).get("__del__") for each in CLASSES]
    kept = [made(created, cls) for cls in CLASSES[::order]]
    assert all("__del__" in vars(each) for each in CLASSES)
    await created.close(1.0)
    assert [vars(each).get("__del__") for each in CLASSES] == before
    assert ended == ["aclose"] * len(CLASSES)
    kept.clear()
    assert sorted(ended[5:]) == ["del", "del", "del", "first"]


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Closes, []),
        (Inherits, []),
        (Deletes, ["del"]),
        (InheritsDelete, ["del"]),
        (CallsBase, ["first", "del"]),
    ],
)
async def test_the_own_finalizer_is_called_once(
    created: CreatedObjects, cls: type[Closes], expected: list[str]
) -> None:
    """After the end of a created object, and at the release of others."""
    kept = [made(created, each) for each in CLASSES]
    cls()
    assert ended == expected
    ended.clear()
    created.add(kept_again := made(created, cls))
    del kept_again
    assert ended == []
    await created.close(1.0)
    assert [each for each in ended if each != "aclose"] == expected
    assert ended.count("aclose") == len(kept) + 1


async def test_an_object_that_was_released_just_before(
    created: CreatedObjects, steps: list[Callable[[], None]]
) -> None:
    """Its end has not begun when the worker leaves."""
    made(created, Closes)
    assert len(steps) == 1
    await created.close(1.0)
    assert ended == ["aclose"]
    steps[0]()
    assert ended == ["aclose"]


async def test_a_finalizer_that_replaced_ours_stays(created: CreatedObjects) -> None:
    class Patched(Closes):
        pass

    def finalizer(self: Any) -> None:
        ended.append("patched")

    kept = made(created, Patched)
    Patched.__del__ = finalizer  # type: ignore[attr-defined]
    await created.close(1.0)
    del kept
    assert vars(Patched)["__del__"] is finalizer


async def test_a_class_is_not_kept(created: CreatedObjects) -> None:
    """A factory may define one for each object."""

    def count() -> int:
        gc.collect()
        return len(Closes.__subclasses__())

    before = count()

    def make() -> Any:
        class Local(Closes):
            def __del__(self) -> None:
                super().__init__()

        return Local()

    created.add(make())
    created._released.clear()
    assert count() == before


async def test_after_the_close(created: CreatedObjects) -> None:
    """A thread that still runs may make an object: nothing is left to end it."""
    await created.close(1.0)
    made(created, Closes)
    assert "__del__" not in vars(Closes)
    assert ended == []
