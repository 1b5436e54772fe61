"""Runs of processes that several tests of a module wait for: some at once, in the tests' order."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

MOST = max(1, min(4, (os.cpu_count() or 1) // 4))


@contextlib.contextmanager
def runs_at_once(
    request: pytest.FixtureRequest,
    parameter: str,
    run: Callable[[str], str],
    most: int = MOST,
) -> Iterator[dict[str, Future[str]]]:
    """Start `run(value)` for each value of that parameter in the tests that are selected.

    At most `most` run at once.

    At the end of the block those that have not begun are cancelled.
    """
    module = request.module
    items = [item for item in request.session.items if getattr(item, "module", None) is module]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    values = [each[parameter] for each in params if parameter in each]
    with ThreadPoolExecutor(most) as pool:
        try:
            yield {value: pool.submit(run, value) for value in values}
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
