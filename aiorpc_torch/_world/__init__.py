"""The life of a worker: directory, start, failure detection, shutdown, children."""
