"""A replay buffer whose inserts and samples wait for each other: `Replay`."""

import functools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .._gauges import measure
from .admission import Ticket
from .numbers import is_count
from .ratio import SampleLimit
from .staleness import parked
from .waiting import Line, ends_at_leave


class Storage(Protocol):
    """The items of a `Replay`, such as a replay buffer of torchrl.

    If it has `add(item)` too, that is called for each item.
    """

    def extend(self, items: Sequence[Any], /) -> object:
        """Add items."""

    def sample(self, size: int, /) -> Any:
        """Return a sample of items."""


class Uniform:
    """A storage of the newest `capacity` items, which samples uniformly with replacement.

    Args:
        capacity: maximum number of items.
        seed: seed of its random numbers (default: of the system).

    Raises:
        ValueError: if `capacity` is not positive.
    """

    def __init__(self, capacity: int = 100_000, seed: int | None = None) -> None:
        if not is_count(capacity, 1):
            raise ValueError(f"capacity must be at least 1, got {capacity!r}")
        self._capacity = capacity
        self._random = random.Random(seed)
        self._items: list[Any] = []
        self._oldest = 0  # index that the next item gets, once all are in use

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def extend(self, items: Iterable[Any], /) -> None:
        """Add items in place of the oldest ones."""
        for item in items:
            if len(self._items) < self._capacity:
                self._items.append(item)
            else:
                self._items[self._oldest] = item
                self._oldest = (self._oldest + 1) % self._capacity

    def sample(self, size: int, /) -> list[Any]:
        """Return `size` items."""
        return self._random.choices(self._items, k=size)


class Replay:
    """A replay buffer that keeps a ratio of samples to inserts.

        replay = Replay(Uniform(50_000), SampleLimit(8, min_size=1_000, slack=512))
        await aiorpc.remote(replay).insert(transition, ticket)  # at an actor, `replay` an RRef
        batch = await replay.sample(64)  # at the learner: 64 items

    Inserts and samples wait until the limit admits them, each in the order of arrival. A wait that
    is cancelled or late changes nothing. Use it on the event loop of its worker, or through an
    RRef.

    Args:
        storage: anything with `extend(items)` and `sample(size)` (default: `Uniform()`). A method
            `add(item)` is preferred to `extend`.
        limit: limit of samples for each insert (default: a sample waits for the first item alone).

    Raises:
        TypeError: if `storage` has no such methods, or if `limit` is no `SampleLimit`.
    """

    def __init__(self, storage: Storage | None = None, limit: SampleLimit | None = None) -> None:
        self.storage = Uniform() if storage is None else storage
        if not (hasattr(self.storage, "extend") and hasattr(self.storage, "sample")):
            raise TypeError(f"storage must have extend(items) and sample(size), got {storage!r}")
        if not (limit is None or isinstance(limit, SampleLimit)):
            raise TypeError(f"limit must be a SampleLimit, got {limit!r}")
        self._has_limit = limit is not None
        self._limit = SampleLimit(1, min_size=1, slack=math.inf) if limit is None else limit
        self._inserts, self._samples = Line(), Line()
        self._inserted = self._sampled = 0
        self._version: int | None = None
        measure(self)

    def __repr__(self) -> str:
        waiting = f"{len(self._inserts)} inserts and {len(self._samples)} samples waiting"
        limit = f", {self._limit!r}" if self._has_limit else ""
        return f"<Replay {self._inserted} in, {self._sampled} out, {waiting}{limit}>"

    @property
    def inserted(self) -> int:
        """Return the number of items inserted."""
        return self._inserted

    @property
    def sampled(self) -> int:
        """Return the number of items sampled."""
        return self._sampled

    @property
    def version(self) -> int | None:
        """Return the newest version of a ticket that came with an item, None without one."""
        return self._version

    @ends_at_leave
    async def insert(self, item: Any, ticket: Ticket | None = None) -> None:
        """Insert an item, once the limit admits it.

        Args:
            item: anything that the storage takes.
            ticket: ticket of the rollout that the item is from. While the insert waits, no version
                waits for that rollout, if the ticket's limit is in the same process.

        Raises:
            CallTimeout: if the deadline passes; the item was not inserted.
        """
        with parked(ticket):  # the learner, which samples, may wait for this rollout in `advance`
            await self._inserts.turn(self._limit.may_insert, "the insert", self.__repr__)
        # `extend` of torchrl's TensorDictReplayBuffer takes no list.
        if (add := getattr(self.storage, "add", None)) is not None:
            add(item)
        else:
            self.storage.extend([item])
        self._inserted += 1
        self._limit.insert()
        if ticket is not None:
            self._version = max(ticket.version, self._version or 0)
        self._notify()

    @ends_at_leave
    async def sample(self, size: int) -> Any:
        """Return a sample of items, as the storage returns it, once the limit admits it.

        Args:
            size: number of items.

        Raises:
            CallTimeout: if the deadline passes.
            ValueError: if `size` is not positive.
        """
        if not is_count(size, 1):
            raise ValueError(f"a sample must have at least 1 item, got {size!r}")
        is_ready = functools.partial(self._limit.may_sample, size)
        await self._samples.turn(is_ready, "the sample", self.__repr__)
        found = self.storage.sample(size)
        self._sampled += size
        self._limit.sample(size)
        self._notify()
        return found

    def _numbers(self) -> dict[str, float]:
        inserted, sampled = self._inserted, self._sampled
        found = {
            "aiorpc_replay_inserted": inserted,
            "aiorpc_replay_sampled": sampled,
            "aiorpc_replay_samples_per_insert": sampled / inserted if inserted else 0.0,
            "aiorpc_replay_waiting_inserts": len(self._inserts),
            "aiorpc_replay_waiting_samples": len(self._samples),
        }
        storage: Any = self.storage
        if hasattr(storage, "__len__"):
            found["aiorpc_replay_items"] = len(storage)
        return found

    def _notify(self) -> None:
        self._inserts.notify()
        self._samples.notify()
