"""What travels between workers: frames, the handshake, the state of a connection, payloads."""
