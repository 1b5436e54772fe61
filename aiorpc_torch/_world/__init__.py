"""The life of a worker in its world: start, connection to the directory, shutdown."""
