"""Methods see the context variables of the start of their worker, not those of their caller."""

from contextvars import ContextVar

import pytest

from aiorpc_torch import RRef, batched, remote, testing

VARIABLE = ContextVar("VARIABLE", default="never set")


class Seer:
    async def on_loop(self) -> str:
        return VARIABLE.get()

    def in_thread(self) -> str:
        return VARIABLE.get()


@pytest.mark.promise("calls.context")
async def test_methods_see_the_context_of_the_start() -> None:
    """Whatever a caller sets, and in whichever thread a method runs."""
    VARIABLE.set("at the start")
    async with testing.world():
        VARIABLE.set("in the caller")
        seer = remote(RRef(Seer()))
        assert (await seer.on_loop(), await seer.in_thread()) == ("at the start", "at the start")


seen: list[str] = []


def key_of(number: int) -> int:
    """Set a variable, as a logging library may."""
    seen.append(VARIABLE.get())
    VARIABLE.set("in a key function")
    return number


class Doubler:
    @batched(max_size=1, key=key_of)
    async def doubled(self, numbers: list[int]) -> list[int]:
        return [2 * each for each in numbers]


async def test_what_a_key_function_sets_is_its_own() -> None:
    """Later calls do not see it."""
    seen.clear()
    async with testing.world():
        doubler = remote(RRef(Doubler()))
        assert [await doubler.doubled(each) for each in range(2)] == [0, 2]
    assert seen == ["never set", "never set"]
