"""One TCP port for all connections of a worker with other hosts, and TLS on them."""
