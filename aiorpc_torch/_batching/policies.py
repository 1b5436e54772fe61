"""The policies of `@batched` functions: plain values, checked as they are made.

A number of a policy may be a function of the object whose method is batched. `numbers_of` calls it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

Count = int | Callable[[Any], int]
"""A number, or a function of the object that returns it."""

Seconds = float | Callable[[Any], float]
"""Seconds, or a function of the object that returns them."""


def _repr(policy: Any) -> str:
    """Return the constructor call without the arguments that have their default."""
    given = [(each, getattr(policy, each.name)) for each in fields(policy)]
    shown = [f"{each.name}={value!r}" for each, value in given if value != each.default]
    return f"{type(policy).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False)
class Fill:
    """A policy: a batch of any callers starts when it is full or its oldest call has waited.

    `key` and `weight` are called once per call, as it arrives, with its arguments in the order of
    the function's parameters. An exception they raise reaches only the caller of that call.

    A number may be a function of the object: `Fill(lambda self: self.batch_size)`. It is called
    as each call arrives, and its last value counts.

    Args:
        max_size: Most calls in a batch.
        max_wait: Seconds that the oldest call waits for others while a slot is free (default: 0.0,
            no wait: a batch holds the calls of one loop iteration, or those that arrived while the
            function was busy).
        max_concurrent_batches: Batches that run at once (default: 1).
        max_pending: Most calls that wait, without those in running batches; a further call raises
            `QueueFull` at once (default: None, no limit).
        key: Function that returns a call's key. Calls with equal keys share a batch; the key whose
            oldest call arrived first goes first (default: None, one key for all).
        weight: Function that returns a call's weight, at least 0 (default: None, each weighs 1).
        max_weight: Most weight in a batch; a heavier call runs alone (default: None, no limit).
    """

    NUMBERS: ClassVar[tuple[str, ...]] = (
        "max_size",
        "max_wait",
        "max_concurrent_batches",
        "max_pending",
        "max_weight",
    )

    max_size: Count
    max_wait: Seconds = 0.0
    max_concurrent_batches: Count = 1
    max_pending: Count | None = None
    key: Callable[..., Hashable] | None = None
    weight: Callable[..., float] | None = None
    max_weight: float | Callable[[Any], float] | None = None

    def __repr__(self) -> str:
        return _repr(self)

    def __post_init__(self) -> None:
        _check_count("max_size", self.max_size)
        _check_seconds("max_wait", self.max_wait)
        _check_count("max_concurrent_batches", self.max_concurrent_batches)
        if self.max_pending is not None:
            _check_count("max_pending", self.max_pending)
        _check_function("key", self.key)
        _check_function("weight", self.weight)
        limit = self.max_weight
        if not (limit is None or callable(limit) or 0 < limit < float("inf")):
            raise ValueError(f"max_weight must be above 0 and finite, got {self.max_weight!r}")
        if self.weight is not None and self.max_weight is None:
            raise ValueError("weight= requires max_weight=")


@dataclass(frozen=True, slots=True, repr=False)
class Round:
    """A policy: a batch of exactly `size` calls, such as a parameter server's synchronous step.

    What the function returns is the result of every contributor, whatever it is: None makes a
    barrier. `return each(rows)` gives one of several results to each, in order of arrival.

    A contributor that is cancelled, or whose worker is lost, leaves the round that it waits in.
    The timeout begins with the oldest waiting contribution, but not before the previous round ends.
    A number may be a function of the object: `Round(lambda self: self.trainers)`. It is called as
    each contribution arrives, and its last value counts.

    Args:
        size: Contributions to a round.
        quorum: Contributions that are enough at the timeout (default: None, all).
        timeout: Seconds until the round starts with its quorum; without a quorum each of its
            contributors gets `RoundTimeout` (default: None, no limit).
        member: Function that returns a call's member, any hashable value. A member contributes once
            a round; its further calls wait for the next (default: None, every call counts).
    """

    NUMBERS: ClassVar[tuple[str, ...]] = ("size", "quorum", "timeout")

    size: Count
    quorum: Count | None = None
    timeout: Seconds | None = None
    member: Callable[..., Hashable] | None = None

    def __repr__(self) -> str:
        return _repr(self)

    def __post_init__(self) -> None:
        _check_count("size", self.size)
        _check_function("member", self.member)
        if self.timeout is not None:
            _check_seconds("timeout", self.timeout)
        if self.quorum is not None:
            _check_count("quorum", self.quorum)
            is_known = isinstance(self.quorum, int) and isinstance(self.size, int)
            if is_known and self.quorum > self.size:  # type: ignore[operator]
                raise ValueError(f"quorum must be at most size, {self.size}, got {self.quorum}")
            if self.timeout is None:
                raise ValueError("quorum= requires timeout=")


Policy = Fill | Round


def has_functions(policy: Policy) -> bool:
    """Return whether a number of the policy is a function of the object."""
    return any(callable(getattr(policy, name)) for name in policy.NUMBERS)


def numbers_of(policy: Any, instance: Any) -> Any:
    """Return the policy with the numbers that its functions return for an object."""
    given = {name: getattr(policy, name) for name in policy.NUMBERS}
    found = {name: number(instance) for name, number in given.items() if callable(number)}
    for name, number in found.items():
        if callable(number):
            raise TypeError(f"the function of {name} returned a function, {number!r}: call it")
    return replace(policy, **found)


def _check_count(name: str, value: object) -> None:
    if callable(value):  # it is checked when it is called
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_seconds(name: str, value: Seconds) -> None:
    if not callable(value) and not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} must be seconds, at least 0 and finite, got {value!r}")


def _check_function(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function of a call's arguments, got {value!r}")
