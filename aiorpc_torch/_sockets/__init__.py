"""Tensors on sockets of their own, between processes that share no memory."""
