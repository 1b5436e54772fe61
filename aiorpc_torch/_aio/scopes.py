"""The deadline of the anyio scopes around a call, which travels with it as `timeout`'s does.

Here it is enforced by the scope itself, which cancels; so it is never a call's own deadline.
"""

import asyncio
import math
import sys
import time

import anyio

_BACKEND = "anyio._backends._asyncio"  # imported by the first scope that a process enters


def scope_deadline() -> float | None:
    """When the scopes around this task end, as a `time.monotonic()`; None: they do not."""
    if _BACKEND not in sys.modules:  # nobody has entered a scope, and asking costs 2.5 µs
        return None
    deadline = anyio.current_effective_deadline()
    if not math.isfinite(deadline):  # none, or a scope that is cancelled already
        return None
    return time.monotonic() + deadline - asyncio.get_running_loop().time()
