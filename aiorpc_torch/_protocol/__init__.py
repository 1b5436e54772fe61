"""Parts of both ends: the driver of a connection, names, turns, entry points."""
