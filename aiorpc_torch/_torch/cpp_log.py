"""torch's C++ log, without the lines that repeat what this library reports.

If a peer dies, or a worker leaves after an error, torch's RPC logs a warning for each broken pipe
and for each RRef. Every process does so (2.13, 2.15). This library raises or logs each of these
events once, in its own words; the C++ lines would bury the program's own error.
"""

import contextlib
import os
from collections.abc import Iterator

from .compat import cpp_log_level

WARNING, ERROR = 1, 2


@contextlib.contextmanager
def hide_in_cpp_log(least: int) -> Iterator[None]:
    """Log nothing of the level `least` inside the block, if it is the least that is logged.

    Another one was chosen by the environment or the program, and stays.
    """
    level = cpp_log_level
    if level is None or "TORCH_CPP_LOG_LEVEL" in os.environ or level.value != least:
        yield
        return
    level.value = least + 1
    try:
        yield
    finally:
        level.value = least
