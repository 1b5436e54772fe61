"""Calls in: sessions, dispatch, executor, streams out, clients of plain torch."""
