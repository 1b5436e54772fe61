"""Distributed autograd in coroutines: contexts that follow tasks, and optimizers on the owners."""

from ._contexts import Context as Context
from ._contexts import context as context
from ._optimizer import DistributedOptimizer as DistributedOptimizer
from ._optimizer import parameter_rrefs as parameter_rrefs

__all__ = ("Context", "DistributedOptimizer", "context", "parameter_rrefs")
