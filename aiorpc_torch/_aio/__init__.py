"""Primitives of asyncio and threads. Imports neither torch nor another package of ours."""
