"""Turns on exclusive objects, for calls, batches and local coroutines."""
