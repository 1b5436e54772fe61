"""The deadline of the anyio scopes around a call, which travels with it as that of `timeout` does.

On the caller the scope enforces it by cancelling, so it never is the call's own deadline.
"""

import asyncio
import math
import sys
import time

import anyio

# The first scope of a process imports anyio's private asyncio backend. While it is not imported
# there is no scope, and no need to ask, which takes 2.5 µs.
# (tests/loopback/test_deadlines.py::test_callee_sees_the_time_left)
ANYIO_BACKEND = "anyio._backends._asyncio"


def anyio_scope_deadline() -> float | None:
    """Return when the scopes around this task end as a `time.monotonic()`, None if never."""
    if ANYIO_BACKEND not in sys.modules:
        return None
    deadline = anyio.current_effective_deadline()
    if not math.isfinite(deadline):  # no deadline, or a scope that is cancelled already
        return None
    return time.monotonic() + deadline - asyncio.get_running_loop().time()
