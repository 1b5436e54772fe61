"""The life of a worker: rendezvous, start, failure detection, rejoin, shutdown, children."""
