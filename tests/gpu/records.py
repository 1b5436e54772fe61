"""A pytest plugin that writes a line for each test, as it begins and as it ends.

What is written stays if the process hangs or dies, unlike pytest's own reports. The plugin also
ends the process if a test takes too long: `python -m tests.gpu` goes on with the next one.
"""

import faulthandler
import json
import os
from collections.abc import Generator
from typing import Any

import pytest

from .stages import RECORDS, SECONDS

DEFAULT_SECONDS = 60.0  # for a test, unless its mark `timeout` or the environment says otherwise


def note(test: str, state: str, **more: Any) -> None:
    with open(os.environ[RECORDS], "a") as file:
        file.write(json.dumps({"test": test, "state": state, **more}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    global _stderr
    _stderr = os.dup(2)  # before a test's output is captured


def pytest_runtest_logstart(nodeid: str) -> None:
    note(nodeid, "began")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        note(report.nodeid, report.outcome, seconds=report.duration, reason=reason_of(report))


def reason_of(report: pytest.TestReport) -> str:
    """Return one line on why a test has not passed."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.split("\n")[0] if crash else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    mark = item.get_closest_marker("timeout")
    limit = float(os.environ.get(SECONDS) or (mark.args[0] if mark else DEFAULT_SECONDS))
    faulthandler.dump_traceback_later(limit, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


_stderr = 2
