"""The limit of open files is raised for the peers of a world."""

import resource

import pytest

from aiorpc_torch._aio.host import FILES_OF_PEER, OTHER_FILES, allow_files

EVERY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "peers", "expected"),
    [
        ((1024, 65536), 100, OTHER_FILES + 100 * FILES_OF_PEER),
        ((1024, 4096), 1000, 4096),
        ((1024, EVERY), 1000, OTHER_FILES + 1000 * FILES_OF_PEER),
        ((1024, 1024), 100, None),
        ((65536, 65536), 100, None),
        ((EVERY, EVERY), 100, None),
    ],
)
def test_the_soft_limit_follows_the_peers(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], peers: int, expected: int | None
) -> None:
    """Up to the hard limit, which stays."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: found.append(new))
    allow_files(peers)
    assert found == ([] if expected is None else [(expected, limits[1])])
