"""Peers, as a worker knows them: records and their states, and the log of their changes."""
