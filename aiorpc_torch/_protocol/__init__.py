"""Parts of both ends: the driver of a connection, members, names, turns, entry points."""
