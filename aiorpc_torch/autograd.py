"""Distributed autograd in coroutines: contexts that follow tasks, and optimizers on the owners."""

from ._contexts import Context as Context
from ._contexts import context as context

__all__ = ("Context", "context")
