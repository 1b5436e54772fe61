"""Switches of torch that hold for a thread: calls do not carry them, coroutines do not keep them.

(tests/loopback/test_torch_switches.py)
"""

import warnings
from typing import Any

import torch


def _function() -> None:
    pass


_DECORATED = {torch.no_grad()(_function).__code__, torch.autocast("cpu")(_function).__code__}
"""Code of the functions that torch's decorators make; inference_mode's is that of no_grad."""


def has_switch(function: Any) -> bool:
    """Return whether a decorator of torch made this function, as `@torch.no_grad()`."""
    return getattr(function, "__code__", None) in _DECORATED


def warn_of_autocast() -> None:
    """Warn, once in a process, if autocast is on in this thread."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        warnings.warn(
            "torch.autocast holds for this thread only: remote methods compute without it. Write "
            "`with torch.autocast(...):` in the method",
            stacklevel=2,
        )
