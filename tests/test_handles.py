"""Numbers in place of RRefs: what is sent for which call, and how long an object is held."""

import asyncio
import gc
import weakref
from typing import Any

import pytest
from actors import Counter

from aiorpc_torch import RRef, create, remote
from aiorpc_torch._handles import Handles, Objects, Offer


class Slotted:
    """Cannot be held weakly."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[int] = []

    def push(self, item: int) -> None:
        self.items.append(item)

    async def total(self) -> int:
        return sum(self.items)


class FakeRRef:
    """What the room needs of an RRef: identity, weak references and the local value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def local_value(self) -> Any:
        return self.value


def test_itself_then_an_offer_then_a_number() -> None:
    """Most RRefs are used once, so the first call says nothing of numbers."""
    handles, objects, rref = Handles(), Objects(), FakeRRef(Counter(7))
    assert handles.name(rref) is rref
    offer = handles.name(rref)
    assert offer == Offer(rref, 0)
    assert handles.name(rref) == offer, "until the owner has answered"
    assert objects.learn(rref, rref.value) is None
    assert objects.learn(offer, rref.value) == 0
    handles.learned([0])
    assert handles.name(rref) == 0
    assert objects.find(0) is rref.value


def test_the_owner_holds_weakly_and_the_caller_too() -> None:
    """An object that is gone is an error, an RRef that is gone is forgotten."""
    handles, objects, rref = Handles(), Objects(), FakeRRef(Counter())
    handles.name(rref)
    objects.learn(handles.name(rref), rref.value)
    handles.learned([0])
    gone = weakref.ref(rref)
    del rref
    gc.collect()
    assert gone() is None
    with pytest.raises(ReferenceError, match="gone"):
        objects.find(0)
    handles.learned([0])  # an answer that comes late


def test_what_cannot_be_held_weakly_is_not_learned() -> None:
    """It keeps travelling as an RRef."""
    rref = FakeRRef(Slotted())
    assert Objects().learn(Offer(rref, 3), rref.value) is None


@pytest.mark.usefixtures("world")
async def test_calls_on_every_kind_of_object() -> None:
    """One, two and many calls, at once and in turn, on objects with and without weak references."""
    counter, numbers = await create("main", Counter), await create("main", Slotted)
    for expected in range(1, 6):
        assert await remote(counter).aadd() == expected
        await remote(numbers).push(expected)
    await asyncio.gather(*(remote(counter).aadd() for _ in range(50)))
    assert await remote(counter).add(0) == 55
    assert await remote(numbers).total() == 15


@pytest.mark.usefixtures("world")
async def test_numbers_do_not_keep_objects_alive() -> None:
    """After many calls, dropping the RRef frees the object."""
    counter = Counter()
    alive, rref = weakref.ref(counter), RRef(counter)
    del counter
    for _ in range(5):
        await remote(rref).aadd()
    del rref
    for _ in range(100):
        gc.collect()
        if alive() is None:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the object is still alive")
