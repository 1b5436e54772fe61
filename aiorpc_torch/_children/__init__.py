"""Child processes that are workers: local worlds, and the start and end of children."""
