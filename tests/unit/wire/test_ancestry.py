"""Which batches a call waits for, here and as another worker names them."""

import contextvars
from typing import Any

from hypothesis import given, strategies as st

from aiorpc_torch._wire.ancestry import (
    HERE,
    BatchScope,
    ancestor_batches,
    current_scopes,
    enter_scopes,
    from_wire,
    new_batch,
    to_wire,
)

# ── which batches wait ──────────────────────────────────────────────────────────────────────────

BATCHES = st.frozensets(st.tuples(st.sampled_from([HERE, "b", "c"]), st.integers(0, 9)))


@given(st.lists(st.tuples(BATCHES, st.booleans()), max_size=5))
def test_only_open_scopes_count(found: list[Any]) -> None:
    """A context has the batches of its open scopes, and sends and passes on no others."""
    on = {BatchScope(batches, lambda is_open=is_open: is_open) for batches, is_open in found}  # type: ignore[misc]
    wait = {batch for batches, is_open in found if is_open for batch in batches}

    def look() -> None:
        enter_scopes(on)
        assert ancestor_batches() == wait
        assert current_scopes() == {scope for scope in on if scope.is_open()}
        assert to_wire("a") == tuple(sorted((where or "a", number) for where, number in wait))

    contextvars.Context().run(look)
    assert (ancestor_batches(), current_scopes(), to_wire("a")) == (frozenset(), frozenset(), ())


@given(BATCHES)
def test_a_batch_is_the_same_on_every_worker(batches: frozenset[Any]) -> None:
    """A batch keeps its identity over any path; no worker takes it for one of its own."""

    def pass_on(by: str, to: str, known: frozenset[Any]) -> frozenset[Any]:
        def send() -> tuple[Any, ...]:
            enter_scopes(frozenset([BatchScope(known, lambda: True)]))
            return to_wire(by)

        return from_wire(to, contextvars.Context().run(send))

    at_b = pass_on("a", "b", batches)
    assert len(at_b) == len(batches)
    assert {n for where, n in at_b if where == HERE} == {n for where, n in batches if where == "b"}
    assert pass_on("c", "a", pass_on("b", "c", at_b)) == batches


def test_batches_have_numbers_of_their_own() -> None:
    """In this process."""
    assert new_batch() != new_batch()
    assert new_batch()[0] == HERE
