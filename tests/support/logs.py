"""What the library has logged."""

import logging

import pytest


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return its records, without what asyncio logs of an earlier test's garbage."""
    return [each for each in caplog.records if each.name.startswith("aiorpc_torch")]
