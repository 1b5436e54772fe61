"""One TCP port for a worker's connections with other hosts, TLS, the network interface."""
