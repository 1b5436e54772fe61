"""Messages between workers: codecs, frames, flow control, entry points for torch RPC."""
