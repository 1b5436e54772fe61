"""Switches of torch that hold for a thread: calls do not carry them, coroutines do not keep them.

(tests/loopback/test_torch_switches.py)
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch


def _function() -> None:
    pass


_DECORATED = {torch.no_grad()(_function).__code__, torch.autocast("cpu")(_function).__code__}
"""Code of the functions that torch's decorators make; inference_mode's is that of no_grad."""


def warn_if_decorator_is_void(function: Callable[..., Any]) -> None:
    """Warn if a decorator of torch surrounds only the making of a coroutine, not its steps."""
    inner = inspect.unwrap(function)
    if not (inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)):
        return
    each: Any = function
    while each is not inner:
        if getattr(each, "__code__", None) in _DECORATED:
            warnings.warn(
                f"{inner.__qualname__} is an `async def`, on which torch's decorators no_grad, "
                "inference_mode and autocast have no effect: write `with torch.no_grad():` around "
                "the lines that compute, without an `await` among them",
                stacklevel=2,
            )
        each = each.__wrapped__


def warn_of_autocast() -> None:
    """Warn, once in a process, if autocast is on in this thread."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        warnings.warn(
            "torch.autocast holds for this thread only: remote methods compute without it. Write "
            "`with torch.autocast(...):` in the method",
            stacklevel=2,
        )
