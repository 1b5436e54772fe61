"""torch's C++ log, without the lines that repeat what this library reports.

If a peer dies, or a worker leaves after an error, torch's RPC logs a warning for each broken pipe
and for each RRef. Every process does so (2.13, 2.15). This library raises or logs each of these
events once, in its own words; the C++ lines would bury the program's own error.
"""

import contextlib
import os
from collections.abc import Iterator

from .compat import cpp_log_level

_WARNING, _ERROR, _FATAL = 1, 2, 3


@contextlib.contextmanager
def cpp_warnings_hidden() -> Iterator[None]:
    """Log C++ errors only inside the block, unless the environment or the program chose a level."""
    with _level(_WARNING, _ERROR):
        yield


@contextlib.contextmanager
def cpp_errors_hidden() -> Iterator[None]:
    """Log no C++ errors inside the block, which is inside `cpp_warnings_hidden`."""
    with _level(_ERROR, _FATAL):
        yield


@contextlib.contextmanager
def _level(present: int, inside: int) -> Iterator[None]:
    level = cpp_log_level
    if level is None or "TORCH_CPP_LOG_LEVEL" in os.environ or level.value != present:
        yield
        return
    level.value = inside
    try:
        yield
    finally:
        level.value = present
