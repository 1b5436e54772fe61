"""Asynchronous training: versioned weights, staleness and replay.

    from aiorpc_torch.training import Weights, follow

    weights = Weights(model.state_dict())  # at the learner
    register("policy", weights)
    policy = await follow("policy", on="learner", into=model)  # at an actor

This package is written on the public names of `aiorpc_torch` alone. Versions, tickets and ratios
are state machines without an event loop.
"""

from .follower import Hold as Hold, Policy as Policy, follow as follow
from .weights import Weights as Weights

__all__ = ("Hold", "Policy", "Weights", "follow")
