"""The one item that a remote context manager sends: what it has returned at its entry.

(tests/loopback/test_context_managers.py)
"""

from typing import Any, NamedTuple


class Entered(NamedTuple):
    """The value of an `async with` whose context manager is at the callee."""

    value: Any
