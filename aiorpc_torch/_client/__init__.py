"""Calls out: connections of an event loop to its peers."""
