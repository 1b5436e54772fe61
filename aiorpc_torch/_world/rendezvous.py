"""How the workers of a world find each other: each takes its seat at a store, and sees the others.

What is wrong is said by whoever sees it first, on a board that all who wait read: a seat that is
taken, a world size that differs. Whose time is up knows which ranks are missing, and tells the
others too. Knows nothing of torch's RPC: what a worker's address is, it is told.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from ..errors import WorldTimeout
from .registration import Seat, numbers
from .store import Store

log = logging.getLogger("aiorpc_torch")

# Seconds between two looks at the store: the first, and the longest.
_LOOK, _LOOKS = 0.005, 0.1
_BEAT = 0.5  # seconds between two signs of life of those who wait
_SILENCE = 4  # beats that a seat's holder may miss before somebody else may have it
_LINGER = 0.7  # seconds for the others to read why rank 0 takes the store away
_NEWS = 10.0  # seconds between two words in the log on who is missing


class Location(NamedTuple):
    """Where a worker is reached."""

    number: int
    address: str


class _Over(Exception):
    """The world that was to be entered here has ended."""


class Meeting:
    """Where `world_size` workers meet. Its methods block, in one thread at a time."""

    def __init__(self, init_method: str, seat: Seat, timeout: float) -> None:
        self.seat = seat
        self._init_method = init_method
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._left = threading.Event()
        self._held = ""  # what was written at the seat before
        # Kept for the life of the world: rank 0's is the server.
        self._store = Store(init_method, seat, timeout)

    def __repr__(self) -> str:
        return f"<Meeting of {self.seat} at {self._init_method}>"

    # ── a worker comes ──────────────────────────────────────────────────────────────────────────

    @property
    def host(self) -> str | None:
        """Where rank 0's machine is, None if nobody can say."""
        return self._store.host

    def remaining(self) -> float:
        """Seconds until the time to start is up."""
        return max(0.0, self._end - time.monotonic())

    def sign_in(self) -> list[Seat]:
        """Take the seat; everybody's, in rank order, once all are there.

        A worker whose seat is that of one that died comes back: the world was complete already.

        Raises:
            WorldTimeout: naming the ranks that did not come in time.
            ValueError: if somebody has this rank or this name, or another idea of the world.
        """
        while True:
            self._store.open(self._left, self.remaining())
            try:
                return self._enter_a_world()
            except WorldTimeout:
                # Who enters one world after another may be quicker than rank 0, and meet at the
                # store of the last one, which then closes.
                if not self._store.was_of_the_past:
                    raise

    def number(self, seats: Sequence[Seat]) -> int:
        """torch's number of this worker."""
        if self.seat.comeback:
            return int(self._store.get("complete")) + self.seat.comeback
        return numbers(seats)[self.seat.rank]

    def publish(self, here: Location) -> None:
        """Let the others know where this worker is."""
        self._store.set(f"place/{self.seat.rank}", json.dumps(here))

    def wait_for_places(self) -> None:
        """Until everybody has published.

        Raises:
            WorldTimeout: naming the ranks that came and did not start.
        """
        self._wait_for("place", "start", lambda _: None)

    def members(self, here: Location) -> list[tuple[Seat, Location]]:
        """Who they are and where, as of now, in rank order; this worker is `here`."""
        return [(seat, self._location(seat.rank, here)) for seat in self._seats()]

    def _location(self, rank: int, here: Location) -> Location:
        if rank == self.seat.rank:
            return here
        return Location(*json.loads(self._store.get(f"place/{rank}")))

    def withdraw(self) -> None:
        """Leave the seat to whom it was taken from: that one lives."""
        self._store.swap(f"seat/{self.seat.rank}", self.seat.dump(), self._held)

    def agree(self, missing: Sequence[int], text: str) -> None:
        """Say that this worker reaches all others, or why not; wait until all have said so.

        Raises:
            WorldTimeout: if somebody does not reach all, or does not say in time.
        """
        if missing:
            self._post({"text": f"{self.seat}: {text}", "missing": [*missing]})
            raise WorldTimeout(text, missing)
        self._store.set(f"reached/{self.seat.rank}", "")
        self._wait_for("reached", "reach the others", lambda _: None)

    def bury(self) -> None:
        """Nobody of this world lives: whoever comes next begins another."""
        self._store.set(f"gone/{self.seat.rank}", "")

    def leave(self) -> None:
        """Nobody waits here any more. From any thread."""
        self._left.set()

    def close(self) -> None:
        """This worker has no more to do with it; another may keep a store at that address."""
        self._store.close()

    # ── a worker goes ───────────────────────────────────────────────────────────────────────────

    def leave_block(self) -> None:
        """Say that this worker's block has ended in order; it serves until all have said so."""
        self._store.set(f"left/{self.seat.rank}", "")

    def have_left(self, ranks: Sequence[int]) -> set[int]:
        """Return those whose blocks have ended in order."""
        if self._store.has(*(f"left/{rank}" for rank in ranks)):
            return {*ranks}
        return {rank for rank in ranks if self._store.has(f"left/{rank}")}

    def part(self, others: Sequence[int], seconds: float) -> None:
        """Say that this worker is ready to go; wait for those, for that long."""
        end = time.monotonic() + seconds
        self._store.set(f"gone/{self.seat.rank}", "")
        self._watch([f"gone/{rank}" for rank in others], end)
        if self._store.is_here:
            # The store goes with this process, and the others may not have seen it all.
            self._watch([f"parted/{rank}" for rank in others], end)
        else:
            self._store.set(f"parted/{self.seat.rank}", "")

    def _watch(self, keys: list[str], end: float) -> None:
        while time.monotonic() < end and not self._store.has(*keys):
            time.sleep(_LOOK)

    # ── seats ───────────────────────────────────────────────────────────────────────────────────

    def _enter_a_world(self) -> list[Seat]:
        while True:
            try:
                return self._enter()
            except _Over:
                self._store.turn()

    def _enter(self) -> list[Seat]:
        # First: those who signed in may have failed all the same, before they were a world.
        if self._has_failed():
            raise _Over
        if self._store.has("complete"):
            return self._come_back()
        self._take_seat(self.seat.dump())
        seats: dict[int, Seat] = {}
        self._wait_for("seat", "come", lambda rank: self._check(seats, rank))
        # Read again: somebody may have taken the seat of one that died meanwhile.
        found = self._seats()
        self._store.set("complete", str(max(numbers(found))))
        return found

    def _has_failed(self) -> bool:
        """Whether what was tried here is over for who comes now: it is another attempt."""
        board = self._store.read("board")
        # Who is late to a world that cannot be hears why, once.
        return board is not None and (
            "missing" in json.loads(board) or self._store.has(f"seat/{self.seat.rank}")
        )

    def _take_seat(self, mine: str) -> None:
        key = f"seat/{self.seat.rank}"
        held = ""
        while (found := self._store.swap(key, held, mine)) != mine:
            if self._lives(self.seat.rank):
                self._refuse(
                    f"two workers have rank {self.seat.rank}: {Seat.load(found)} and {self.seat}"
                )
            held = found  # of one that died while it waited

    def _lives(self, rank: int) -> bool:
        before = self._store.add(f"beat/{rank}", 0)
        return any(
            self._left.wait(_BEAT) or self._store.add(f"beat/{rank}", 0) != before
            for _ in range(_SILENCE)
        )

    def _come_back(self) -> list[Seat]:
        if any(self._store.has(f"gone/{rank}") for rank in self._ranks()):
            raise _Over  # they are leaving, and this one is early for what comes next
        held = self._store.get(f"seat/{self.seat.rank}")
        comeback = self._store.add("comebacks", 1)
        self.seat = replace(self.seat, comeback=comeback)
        mine, self._held = self.seat.dump(), held
        if self._store.swap(f"seat/{self.seat.rank}", held, mine) != mine:
            raise ValueError(f"two workers come back as rank {self.seat.rank}; one: {self.seat}")
        seats: dict[int, Seat] = {}
        for rank in self._ranks():
            self._check(seats, rank)
        return [seats[rank] for rank in self._ranks()]

    def _seats(self) -> list[Seat]:
        return [Seat.load(self._store.get(f"seat/{rank}")) for rank in self._ranks()]

    def _check(self, seats: dict[int, Seat], rank: int) -> None:
        """Whoever sits there agrees with those who were looked at before."""
        seat = seats[rank] = Seat.load(self._store.get(f"seat/{rank}"))
        for other in (self.seat, *seats.values()):
            if quarrel := other.quarrel(seat):
                self._refuse(quarrel)

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────

    def _wait_for(self, what: str, do: str, take: Callable[[int], None]) -> None:
        """Look until every rank has written `what`; `take` each as it comes."""
        missing, look, news, beat = self._ranks(), _LOOK, time.monotonic() + _NEWS, 0.0
        while not self._store.has(*(f"{what}/{rank}" for rank in missing)):
            now = time.monotonic()
            if now >= beat:
                beat = now + _BEAT
                self._store.add(f"beat/{self.seat.rank}", 1)
                self._look_at_the_board()
                missing = self._still(missing, what, take)
            if now >= news:
                news = now + _NEWS
                log.warning("%s waits for rank %s to %s", self.seat, _listed(missing), do)
            if now > self._end or self._left.wait(look):
                self._give_up(missing, do)
            look = min(look * 1.5, _LOOKS)
        for rank in missing:
            take(rank)
        if self._left.is_set():
            self._give_up([], do)

    def _still(self, missing: list[int], what: str, take: Callable[[int], None]) -> list[int]:
        here = [rank for rank in missing if self._store.has(f"{what}/{rank}")]
        for rank in here:
            take(rank)
            log.info("%s: rank %d is here", self.seat, rank)
        return [rank for rank in missing if rank not in here]

    # ── the board ───────────────────────────────────────────────────────────────────────────────

    def _give_up(self, missing: list[int], do: str) -> NoReturn:
        who = f"{len(missing)} of {self.seat.world_size} workers did not {do}"
        when = "before it was stopped" if self._left.is_set() else f"within {self._timeout:g} s"
        text = f"{who} {when}: rank {_listed(missing)}"
        self._post({"text": f"{self.seat} has given up: {text}", "missing": missing})
        raise WorldTimeout(text, missing)

    def _refuse(self, text: str) -> NoReturn:
        self._post({"text": text})
        raise ValueError(text)

    def _post(self, news: dict[str, Any]) -> None:
        if self.seat.comeback:
            return  # it is this worker's failure, not that of a world that lives
        self._store.swap("board", "", json.dumps(news))
        if self._store.is_here and self.remaining():
            # The store goes with this process, and those who wait may not have read it.
            here = [rank for rank in self._ranks() if self._store.has(f"seat/{rank}")]
            readers = [f"read/{rank}" for rank in here if rank != self.seat.rank]
            self._watch(readers, time.monotonic() + _LINGER)

    def _look_at_the_board(self) -> None:
        if (text := self._store.read("board")) is None:
            return
        self._store.set(f"read/{self.seat.rank}", "")
        news = json.loads(text)
        if "missing" in news:
            raise WorldTimeout(news["text"], news["missing"])
        raise ValueError(news["text"])

    def _ranks(self) -> list[int]:
        return [*range(self.seat.world_size)]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
