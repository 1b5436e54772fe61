"""Distributed autograd in coroutines: contexts that follow tasks, and distributed optimizers."""

from .context import Context as Context
from .context import context as context
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .optimizer import parameter_rrefs as parameter_rrefs

__all__ = ("Context", "DistributedOptimizer", "context", "parameter_rrefs")
