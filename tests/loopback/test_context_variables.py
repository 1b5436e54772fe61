"""Methods see the context variables of the start of their worker, not those of their caller."""

from contextvars import ContextVar

import pytest

from aiorpc_torch import RRef, remote, testing

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
