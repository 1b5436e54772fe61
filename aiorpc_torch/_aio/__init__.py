"""Primitives of asyncio and threads, without torch."""
