"""Calls out: the public functions, the pool of connections, pending calls, streams in."""
