"""Large CPU tensors of a connection: in shared memory, or on sockets of their own."""
