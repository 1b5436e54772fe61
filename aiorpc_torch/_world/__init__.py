"""The life of a worker: rendezvous, startup, failure detection, rejoin, shutdown, children."""
