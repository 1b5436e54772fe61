"""Asynchronous training: versioned weights, staleness and replay.

    from aiorpc_torch.training import Weights, follow

    weights = Weights(model.state_dict())  # at the learner
    register("policy", weights)
    policy = await follow("policy", on="learner", into=model)  # at an actor

This package is written on the public names of `aiorpc_torch` alone. Versions, tickets and ratios
are state machines without an event loop.
"""

from .admission import Ticket as Ticket
from .follower import Hold as Hold, Policy as Policy, follow as follow
from .ratio import SampleLimit as SampleLimit
from .replay import Replay as Replay, Storage as Storage, Uniform as Uniform
from .staleness import StalenessLimit as StalenessLimit
from .weights import Weights as Weights

__all__ = (
    "Hold",
    "Policy",
    "Replay",
    "SampleLimit",
    "StalenessLimit",
    "Storage",
    "Ticket",
    "Uniform",
    "Weights",
    "follow",
)
