"""Asynchronous training: versioned weights, staleness and replay.

    from aiorpc_torch.training import Weights, follow

    weights = Weights(model.state_dict())  # at the learner
    aiorpc.register("policy", weights)
    policy = await follow("policy", on="learner", into=model)  # at an actor

This package is written on the public names of `aiorpc_torch` alone. Versions, tickets and ratios
are state machines without an event loop.
"""

from typing import TYPE_CHECKING

from .._names import attributes_of as _attributes_of
from .admission import Ticket as Ticket
from .follower import Follower as Follower, Hold as Hold, follow as follow
from .ratio import SampleLimit as SampleLimit
from .recovery import Recovered as Recovered, recover as recover
from .replay import Replay as Replay, Storage as Storage, Uniform as Uniform
from .staleness import StalenessLimit as StalenessLimit
from .weights import Weights as Weights

__all__ = (
    "Follower",
    "Hold",
    "Recovered",
    "Replay",
    "SampleLimit",
    "StalenessLimit",
    "Storage",
    "Ticket",
    "Uniform",
    "Weights",
    "follow",
    "recover",
)


if not TYPE_CHECKING:  # which would take every name for one of the module
    __getattr__ = _attributes_of(__name__)
