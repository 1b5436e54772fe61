"""The table of named objects."""

import threading
from typing import Any

import pytest

from aiorpc_torch._endpoint.names import NameTable

SOON = 30.0


class Env:
    """An object whose end removes a part of it from the table."""

    def __init__(self, table: NameTable) -> None:
        self.table = table
        part: Any = object()
        table.add("part", part)

    def __del__(self) -> None:
        if "part" in self.table.names():
            self.table.remove("part")


@pytest.mark.parametrize("way", ["remove", "clear"])
def test_an_object_whose_end_uses_the_table(way: str) -> None:
    """The table may hold the last reference to it."""
    table = NameTable()
    env: Any = Env(table)
    table.add("env", env)
    del env
    step = table.clear if way == "clear" else lambda: table.remove("env")
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()
    assert table.names() == ()
