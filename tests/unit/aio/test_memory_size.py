"""The memory of this process: the least of the machine's and its control groups'."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiorpc_torch._aio import host
from aiorpc_torch._aio.host import _limits

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for control groups in place of the system's."""
    controllers = {
        name: (tmp_path / (name or "unified"), file)
        for name, (_, file) in host._CONTROLLERS.items()
    }
    monkeypatch.setattr(host, "_CONTROLLERS", controllers)
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "self")
    host.memory_size.cache_clear()
    yield tmp_path
    host.memory_size.cache_clear()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_a_group(groups: Path, version: int) -> None:
    """The least one counts, of a group around it, too."""
    root = groups / ("memory" if version == 1 else "unified")
    file = "memory.limit_in_bytes" if version == 1 else "memory.max"
    write(groups / "self", "3:cpu,memory:/a/b\n1:cpuset:/\n" if version == 1 else "0::/a/b\n")
    write(root / "a" / "b" / file, "max\n" if version == 2 else f"{1 << 62}\n")
    assert host.memory_size() == MACHINE
    write(root / "a" / file, "4096\n")
    write(root / file, "8192\n")
    host.memory_size.cache_clear()
    assert host.memory_size() == 4096


def test_a_group_of_another_mount(groups: Path) -> None:
    """As in a container without a namespace for groups: its own limit is at the root."""
    write(groups / "self", "0::/docker/1234\n")
    write(groups / "unified" / "memory.max", "4096\n")
    assert host.memory_size() == 4096


def test_no_groups(groups: Path) -> None:
    assert [*_limits()] == [1 << 63]
    assert host.memory_size() == MACHINE
