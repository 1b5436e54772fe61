"""What a `@batched` function asks of its batches: the two policies, and what is wrong with one.

Plain values, no behaviour: when a batch leaves by them is decided in `_batcher` and `_rounds`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Any

__all__ = ("Fill", "Policy", "Round")


def _shown(policy: Any) -> str:
    """What is not as it is by default."""
    given = [(each, getattr(policy, each.name)) for each in fields(policy)]
    shown = [f"{each.name}={value!r}" for each, value in given if value != each.default]
    return f"{type(policy).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False)
class Fill:
    """Any callers, together: a batch leaves when it is full or its oldest item has waited.

    `key` and `weight` are called once for each call, as it arrives, with its arguments in the
    order of the body's parameters; what they raise is that caller's alone.

    Args:
        max_size: most items in a batch.
        max_wait: seconds the oldest item waits for company while a slot is free. 0.0 never waits:
            batches form while the body is busy, and of what one turn of the loop brings.
        max_concurrency: how many batches run at once.
        max_pending: most items that wait, those in running batches aside; beyond it a call raises
            `QueueFull` at once. None: any number.
        key: items of one batch have equal keys; each key has a queue of its own, and of those that
            may leave the one whose oldest item came first does.
        weight: what an item counts in `max_weight`, at least 0; None: 1.
        max_weight: most weight in a batch; an item that weighs more goes alone. None: any.
    """

    max_size: int
    max_wait: float = 0.0
    max_concurrency: int = 1
    max_pending: int | None = None
    key: Callable[..., Hashable] | None = None
    weight: Callable[..., float] | None = None
    max_weight: float | None = None

    def __repr__(self) -> str:
        return _shown(self)

    def __post_init__(self) -> None:
        _check_count("max_size", self.max_size)
        _check_seconds("max_wait", self.max_wait)
        _check_count("max_concurrency", self.max_concurrency, "batches")
        if self.max_pending is not None:
            _check_count("max_pending", self.max_pending)
        _check_function("key", self.key)
        _check_function("weight", self.weight)
        if self.max_weight is not None and not 0 < self.max_weight < float("inf"):
            raise ValueError(f"max_weight is above 0 and finite, not {self.max_weight!r}")
        if self.weight is not None and self.max_weight is None:
            raise ValueError("weight counts in max_weight, which is not given")


@dataclass(frozen=True, slots=True, repr=False)
class Round:
    """Exactly `size` callers, together: a synchronous round, such as a parameter server's step.

    A contributor that is cancelled, or whose worker is lost, leaves the round that it waits in.
    The timeout begins with the oldest contribution that still waits, but not before the round
    that came before has ended.

    Args:
        size: contributions to a round.
        quorum: how many are enough once the timeout is over; None: all.
        timeout: seconds until the round goes ahead with its quorum or, without it, each of its
            contributors gets `RoundTimeout`. None: it waits for as long as it takes.
        member: called with a call's arguments, who it is: anything hashable. A member contributes
            once a round; what it sends beyond that waits for the next. None: every call counts,
            whoever makes it.
    """

    size: int
    quorum: int | None = None
    timeout: float | None = None
    member: Callable[..., Hashable] | None = None

    def __repr__(self) -> str:
        return _shown(self)

    def __post_init__(self) -> None:
        _check_count("size", self.size)
        _check_function("member", self.member)
        if self.timeout is not None:
            _check_seconds("timeout", self.timeout)
        if self.quorum is not None:
            _check_count("quorum", self.quorum)
            if self.quorum > self.size:
                raise ValueError(f"quorum is at most size, {self.size}, not {self.quorum}")
            if self.timeout is None:
                raise ValueError("quorum is enough once the timeout is over, which is not given")


Policy = Fill | Round


def _check_count(name: str, value: object, of: str = "callers") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a number of {of}, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} is at least 1, not {value}")


def _check_seconds(name: str, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} is seconds, at least 0 and finite, not {value!r}")


def _check_function(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} is a function of a call's arguments, not {value!r}")
