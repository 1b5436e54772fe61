"""Distributed autograd in coroutines: contexts that follow tasks, and distributed optimizers."""

from .context import Context as Context, context as context
from .optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    parameter_rrefs as parameter_rrefs,
)

__all__ = ("Context", "DistributedOptimizer", "context", "parameter_rrefs")
