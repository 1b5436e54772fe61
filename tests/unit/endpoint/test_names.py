"""The table of named objects, without a world."""

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._endpoint import names
from aiorpc_torch._endpoint.names import NameTable, watch_name

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "clear"]), NAMES), max_size=30)


@given(STEPS)
def test_it_is_a_table(steps: list[tuple[str, str]]) -> None:
    """A taken name and an unknown name are ValueErrors that name it; the rest is as in a dict."""
    table, expected = NameTable(), dict[str, Any]()
    for number, (step, name) in enumerate(steps):
        changed = []
        table.watch(watcher := lambda changed=changed: changed.append(1))  # type: ignore[misc]
        if step == "clear":
            table.clear()
            expected.clear()
        elif (step == "add") == (name in expected):
            with pytest.raises(ValueError, match=repr(name)):
                table.add(name, number) if step == "add" else table.remove(name)  # type: ignore[arg-type]
            assert not changed
        else:
            table.add(name, number) if step == "add" else table.remove(name)  # type: ignore[arg-type]
            _ = expected.update({name: number}) if step == "add" else expected.pop(name)
            assert changed == [1]
        table.unwatch(watcher)
        assert table.names() == tuple(sorted(expected))
        assert {each: table.find(each) for each in table.names()} == expected


async def test_a_watcher_sees_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the names first and after each change, in whatever thread that is; then the RRef."""
    table = NameTable()
    monkeypatch.setattr(names, "_table", lambda: table)
    rref: Any = object()
    async with contextlib.aclosing(watch_name("ps")) as watch:  # type: ignore[type-var]
        assert await anext(watch) == ()
        for name in ("one", "two"):
            thread = threading.Thread(target=table.add, args=(name, object()))
            thread.start()
            assert name in await anext(watch)
            thread.join()
        table.remove("one")
        assert await anext(watch) == ("two",)
        waiting = asyncio.ensure_future(anext(watch))
        table.add("ps", rref)
        assert await waiting is rref
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
    assert not table._watchers


async def test_a_watcher_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not told any more."""
    table = NameTable()
    monkeypatch.setattr(names, "_table", lambda: table)
    watch: Any = watch_name("never")
    await anext(watch)
    await watch.aclose()
    assert not table._watchers
