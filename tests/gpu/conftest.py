"""Where there is no device, the tests of this folder are skipped. They are plain functions.

A fault of the machine shows first: tests of torch alone run before those of the library.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import pytest

ORDER = [
    "raw_torch",
    "stream_order",
    "staging",
    "forkserver",
    "cuda_collate",
    "utilisation",
    "left_out",
    "programs",
    "sanitized",
]
MODULES = [f"{__package__}.test_{name}" for name in ORDER]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder; those of other folders stay where they are."""
    places = [at for at, item in enumerate(items) if module_of(item) in MODULES]
    ordered = sorted((items[at] for at in places), key=lambda it: MODULES.index(module_of(it)))
    for at, item in zip(places, ordered, strict=True):
        items[at] = item


def module_of(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "module", None), "__name__", ""))
