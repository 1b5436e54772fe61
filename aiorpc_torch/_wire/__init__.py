"""Formats and rules of what travels: frames, codec, state machines of both ends, handshake."""
