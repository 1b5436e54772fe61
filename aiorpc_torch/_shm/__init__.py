"""Shared memory between processes of one host: its segments, and what each end holds of them."""
