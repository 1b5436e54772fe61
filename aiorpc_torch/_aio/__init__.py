"""Primitives of asyncio and threads, without torch."""

from . import interpreter as interpreter  # raises if this Python cannot run the package
