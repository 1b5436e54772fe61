"""Objects of this process whose numbers are metrics: `training` adds them, `observe` reads them.

Each has a method `_numbers` that returns them by the names of their metrics, in any thread.
"""

import contextlib
import threading
import weakref
from typing import Any

_names: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # a dict that grows cannot be iterated


def measure(measured: Any, name: str = "") -> None:
    """Add an object, which this does not keep alive; one that is registered has that name."""
    with _lock, contextlib.suppress(TypeError):  # a subclass of a user's has no hash
        _names[measured] = name


def measured_objects() -> dict[Any, str]:
    """Return the objects that are alive, with their names."""
    with _lock:
        return dict(_names)
