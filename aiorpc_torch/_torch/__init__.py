"""The adapter to torch: its RPC agent, futures, RRefs and private interfaces."""
