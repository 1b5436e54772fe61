"""Unit tests collect garbage often: what is there before those of a file takes no part."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_old_objects() -> Iterator[None]:
    gc.freeze()  # torch, and thousands of tests: a collection would take a second
    yield
    gc.unfreeze()
