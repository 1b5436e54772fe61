"""Counters, calls in flight, stacks and snapshots of a running worker."""
