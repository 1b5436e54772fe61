"""Calls in: the listener, sessions of callers, dispatch to the loop and to threads."""
