"""The rendezvous: each worker registers at a store and waits until all others have.

The first worker that sees a failure writes a failure notice, which all waiting workers read. Such a
failure is a rank that is taken, for example, or a different world size. A worker that times out
writes which ranks are missing. This module does not know torch's RPC: addresses are opaque.

Every worker reads of every other. 64 processes asked one file store 21,655 questions, in 0.7 s: not
worth a change.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from ..errors import WorldTimeout
from .registration import Registration, assign_worker_ids
from .store import StoreClient

log = logging.getLogger("aiorpc_torch")

# Keys of the store. They are part of the wire format; most are followed by a rank.
_REGISTRATION = "registration"
_KEEPALIVE = "keepalive"  # counts while the worker waits
_ADDRESS = "address"
_REACHED = "reached"  # the worker reaches all others
_COMPLETE = "complete"  # all were registered; the highest worker id
_REJOINS = "rejoins"
_JOINS = "joins"  # ranks that were given to workers that join, of which some did not enter
_ENTRIES = "entries"  # rejoins and joins
_DEPARTURES = "departures"  # workers that have left while the others went on
_DEPARTED = "departed"  # the entry of the process of that rank that has
_NAME = "name"  # followed by a name: the rank of the worker that joins under it, or has joined
_NOTICE = "notice"  # the failure notice
_NOTICE_READ = "notice_read"
_EXITING = "exiting"
_EXITED = "exited"

_MIN_POLL, _MAX_POLL = 0.005, 0.1  # seconds between two reads of the store
_MAX_BARRIER_POLL = 0.03  # the same when the workers exit together
_KEEPALIVE_INTERVAL = 0.5  # seconds
_MAX_MISSED = 4  # keepalives without which a waiting worker counts as dead
_NOTICE_GRACE = 0.7  # seconds for the others to read the notice before rank 0 ends the store
_CLAIM_TIMEOUT = 10.0  # seconds after which a worker that has begun to join counts as dead
_LOG_INTERVAL = 10.0  # seconds between two log lines about missing ranks


class WorkerAddress(NamedTuple):
    """torch's id of a worker and the address of its agent."""

    worker_id: int
    address: str


class _WorldEnded(Exception):
    """The world of this epoch has ended."""


class Rendezvous:
    """One worker's view of the rendezvous. Methods block, and run in one thread at a time."""

    def __init__(self, init_method: str, registration: Registration, timeout: float) -> None:
        self.registration = registration
        self._rank = registration.rank
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._cancelled = threading.Event()
        self._predecessor = ""  # the registration that this worker's replaces
        # Kept for the life of the world: rank 0's is the server.
        self._store = StoreClient(init_method, registration, timeout)

    # ── start ───────────────────────────────────────────────────────────────────────────────────

    @property
    def host(self) -> str | None:
        """Return the host of rank 0, None if it is unknown."""
        return self._store.host

    def remaining(self) -> float:
        """Return the seconds that are left of the timeout."""
        return max(0.0, self._end - time.monotonic())

    def register(self) -> list[Registration]:
        """Register this worker, and return all registrations in rank order once they are there.

        If the world is complete, this worker rejoins it in place of the process of its rank. A
        worker that joins waits until it is complete, and gets the next rank.

        Raises:
            WorldTimeout: if ranks are missing at the timeout; it names them.
            ValueError: if two workers have one rank or one name, or the workers disagree.
        """
        while True:
            self._store.open(self._cancelled, self.remaining())
            try:
                return self._enter_world()
            except WorldTimeout:
                # In worlds in a row, a worker may be quicker than rank 0: it meets the store of
                # the last world, which then closes.
                if not self._store.is_stale:
                    raise

    def worker_id(self, registrations: Sequence[Registration]) -> int:
        """Return torch's id of this worker."""
        if self.registration.entry:
            return int(self._store.get(_COMPLETE)) + self.registration.entry
        return assign_worker_ids(registrations)[self._rank]

    def publish(self, own: WorkerAddress) -> None:
        """Write this worker's address; if it joins, it is registered from now on.

        Raises:
            ValueError: if another process has taken the name of a worker that took long to join.
        """
        self._store.set(_key(_ADDRESS, self._rank), json.dumps(own))
        if self.registration.joined:
            if self._store.read(self._name_key()) != str(self._rank):
                raise ValueError(f"another worker joins as {self.registration.name!r}")
            self._store.set(_key(_REGISTRATION, self._rank), self.registration.dump())

    def wait_for_addresses(self) -> None:
        """Wait until every worker has published its address.

        Raises:
            WorldTimeout: if registered ranks did not start in time; it names them.
        """
        self._wait_for_all(_ADDRESS, "start")

    def members(self, own: WorkerAddress) -> list[tuple[Registration, WorkerAddress]]:
        """Return the current registrations and addresses in rank order, `own` for this worker."""
        return [(each, self._address(each.rank, own)) for each in self._registrations()]

    def predecessor(self) -> tuple[Registration, WorkerAddress] | None:
        """Return the worker, dead or not, whose name this worker joins under; None if none is."""
        if not self._predecessor:
            return None
        found = Registration.load(self._predecessor)
        return found, self._address(found.rank, WorkerAddress(-1, ""))

    def _address(self, rank: int, own: WorkerAddress) -> WorkerAddress:
        if rank == self._rank:
            return own
        return WorkerAddress(*json.loads(self._store.get(_key(_ADDRESS, rank))))

    def withdraw(self) -> None:
        """Withdraw the registration of a worker that does not enter.

        If it was to replace another one, that is restored: its process is alive.
        """
        key = _key(_REGISTRATION, self._rank)
        if self.registration.joined:
            self._store.set(key, "")
        else:
            self._store.compare_set(key, self.registration.dump(), self._predecessor)

    def confirm_reachable(self, unreachable: Sequence[int], text: str) -> None:
        """Confirm that this worker reaches all others, and wait until all have confirmed.

        Raises:
            WorldTimeout: with `text` if ranks are unreachable; if a worker does not confirm.
        """
        if unreachable:
            notice = {"text": f"{self.registration}: {text}", "missing": [*unreachable]}
            self._write_notice(notice)
            raise WorldTimeout(text, unreachable)
        self._store.set(_key(_REACHED, self._rank), "")
        self._wait_for_all(_REACHED, "reach the others")

    def mark_world_dead(self) -> None:
        """Mark this world as ended: workers that register from now on begin another."""
        self._store.set(_key(_EXITING, self._rank), "")

    def cancel(self) -> None:
        """End every wait of this worker. Thread-safe."""
        self._cancelled.set()

    def close(self) -> None:
        """Close the store; another may open at its address."""
        self._store.close()

    def depart(self) -> None:
        """Note that this worker leaves and the others go on: none that enters later meets it."""
        self._store.set(_key(_DEPARTED, self._rank), str(self.registration.entry))
        self._store.add(_DEPARTURES, 1)

    def _has_departed(self, found: Registration) -> bool:
        return self._store.read(_key(_DEPARTED, found.rank)) == str(found.entry)

    # ── exit ────────────────────────────────────────────────────────────────────────────────────

    def exit_barrier(self, others: Sequence[int], seconds: float) -> None:
        """Wait until `others` are here too, for at most `seconds`."""
        end = time.monotonic() + seconds
        self._store.set(_key(_EXITING, self._rank), "")
        if self._store.read(_DEPARTURES):
            others = [rank for rank in others if not self._store.has(_key(_DEPARTED, rank))]
        self._wait_for_keys(_keys(_EXITING, others), end)
        if self._store.is_server:
            # The store ends with this process, so the others must have read all of it.
            self._wait_for_keys(_keys(_EXITED, others), end)
        else:
            self._store.set(_key(_EXITED, self._rank), "")

    def _wait_for_keys(self, keys: list[str], end: float) -> None:
        poll = _MIN_POLL
        while time.monotonic() < end and not self._store.has(*keys):
            time.sleep(poll)
            poll = min(poll * 1.5, _MAX_BARRIER_POLL)

    # ── registrations ───────────────────────────────────────────────────────────────────────────

    def _enter_world(self) -> list[Registration]:
        while True:
            try:
                return self._enter_epoch()
            except _WorldEnded:
                self._store.next_epoch()

    def _enter_epoch(self) -> list[Registration]:
        # First: registered workers may have failed before they were a world.
        if self._epoch_failed():
            raise _WorldEnded
        if self.registration.joined:
            return self._join()
        if self._store.has(_COMPLETE):
            return self._rejoin()
        self._claim_rank()
        seen: dict[int, Registration] = {}
        self._wait_for_all(_REGISTRATION, "register", lambda rank: self._check(seen, rank))
        # Read again: a new process may have replaced one that died meanwhile.
        found = self._registrations()
        self._store.set(_COMPLETE, str(max(assign_worker_ids(found))))
        return found

    def _epoch_failed(self) -> bool:
        """Return whether the attempt of this epoch failed, and this worker belongs to the next."""
        notice = self._store.read(_NOTICE)
        # A worker that is late to a world with a conflict learns of the conflict, once.
        return notice is not None and (
            "missing" in json.loads(notice) or self._store.has(_key(_REGISTRATION, self._rank))
        )

    def _claim_rank(self) -> None:
        key, mine, replaced = _key(_REGISTRATION, self._rank), self.registration.dump(), ""
        while (found := self._store.compare_set(key, replaced, mine)) != mine:
            if self._is_alive(self._rank):
                holder = Registration.load(found)
                self._reject(
                    f"two workers have rank {self._rank}: {holder} and {self.registration}"
                )
            replaced = found  # by a process that died while it waited

    def _is_alive(self, rank: int) -> bool:
        key = _key(_KEEPALIVE, rank)
        before = self._store.add(key, 0)
        return any(
            self._cancelled.wait(_KEEPALIVE_INTERVAL) or self._store.add(key, 0) != before
            for _ in range(_MAX_MISSED)
        )

    def _check_running(self, ranks: list[int]) -> None:
        if any(self._store.has(key) for key in _keys(_EXITING, ranks)):
            raise _WorldEnded  # its workers are exiting; this worker belongs to the next world

    def _rejoin(self) -> list[Registration]:
        self._check_running(self._ranks())
        # Before anything is written: the world goes on without this worker. A rank of another world
        # size may have no predecessor. (test_a_rank_beyond_the_world)
        first = Registration.load(self._store.get(_key(_REGISTRATION, 0)))
        if conflict := first.conflict_with(self.registration):
            raise ValueError(conflict)
        key = _key(_REGISTRATION, self._rank)
        self._predecessor = self._store.get(key)
        comeback, entry = (self._store.add(each, 1) for each in (_REJOINS, _ENTRIES))
        self.registration = replace(self.registration, comeback=comeback, entry=entry)
        mine = self.registration.dump()
        if self._store.compare_set(key, self._predecessor, mine) != mine:
            raise ValueError(
                f"{self.registration} cannot rejoin: another process rejoins as rank "
                f"{self._rank}. Run one process for each rank"
            )
        seen: dict[int, Registration] = {}
        for rank in self._ranks():
            self._check(seen, rank)
        for other in (found := self._published()):
            if other.name == self.registration.name and other.joined:
                self.withdraw()
                raise ValueError(f"{self.registration} cannot rejoin: {other} has joined")
        return found

    def _join(self) -> list[Registration]:
        """Take the next rank, and the name if no worker that joins now has it."""
        self._wait_for_world(_COMPLETE)
        first = Registration.load(self._store.get(_key(_REGISTRATION, 0)))
        self._wait_for_world(*_keys(_ADDRESS, range(first.world_size)))
        self._check_running([*range(first.world_size)])
        mine = replace(self.registration, world_size=first.world_size)
        if conflict := first.conflict_with(mine):  # its name may be rank 0's
            raise ValueError(conflict)
        number, entry = (self._store.add(each, 1) for each in (_JOINS, _ENTRIES))
        self._rank = first.world_size + number - 1
        self.registration = replace(mine, rank=self._rank, entry=entry)
        try:
            self._claim_name()
            for each in self._published():
                if each.name == mine.name:
                    self._predecessor = each.dump()
        except BaseException:
            self.withdraw()
            raise
        return self._registrations()

    def _wait_for_world(self, *keys: str) -> None:
        """Wait until all keys exist that its first workers write as they start."""
        poll = _MIN_POLL
        while not self._store.has(*keys):
            if self._epoch_failed():
                raise _WorldEnded
            if time.monotonic() > self._end or self._cancelled.wait(poll):
                raise WorldTimeout(
                    f"{self.registration.name!r} joins a running world, and none is complete "
                    f"within {self._timeout:g} s. Start its first workers without join=",
                    [],
                )
            poll = min(poll * 1.5, _MAX_POLL)

    def _claim_name(self) -> None:
        """Take the name among those that join; its members are asked later."""
        mine, holder = str(self._rank), ""
        while (found := self._store.compare_set(self._name_key(), holder, mine)) != mine:
            end = min(self._end, time.monotonic() + _CLAIM_TIMEOUT)
            # It enters, or gives up. If it does neither, it has died.
            while not self._store.has(_key(_REGISTRATION, int(found))) and time.monotonic() < end:
                if self._cancelled.wait(_MAX_BARRIER_POLL):
                    raise WorldTimeout(f"{self.registration} was stopped", [])
            holder = found

    def _name_key(self) -> str:
        return f"{_NAME}/{self.registration.name}"

    def _registrations(self) -> list[Registration]:
        """Return the registrations in rank order, this worker's too; of each name the last one."""
        joins = [self.registration] if self.registration.joined else []
        found = {each.name: each for each in (*self._published(), *joins)}
        return sorted(found.values(), key=lambda each: each.rank)

    def _published(self) -> list[Registration]:
        """Return the registrations of those that have not departed."""
        keys = _keys(_REGISTRATION, self._ranks())
        found = [*(Registration.load(self._store.get(key)) for key in keys), *self._joined()]
        if self._store.read(_DEPARTURES):
            found = [each for each in found if not self._has_departed(each)]
        return found

    def _joined(self) -> list[Registration]:
        """Return the registrations of those that have joined."""
        size, number = self.registration.world_size, int(self._store.read(_JOINS) or 0)
        keys = _keys(_REGISTRATION, range(size, size + number))
        return [Registration.load(text) for key in keys if (text := self._store.read(key))]

    def _check(self, seen: dict[int, Registration], rank: int) -> None:
        """Read the registration of `rank` into `seen`; reject it if it conflicts with another."""
        found = Registration.load(self._store.get(_key(_REGISTRATION, rank)))
        seen[rank] = found
        if rank != self._rank:
            log.info("%s: %s has registered", self.registration, found)
        for other in (self.registration, *seen.values()):
            if conflict := other.conflict_with(found):
                self._reject(conflict)

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────

    def _wait_for_all(
        self, key: str, action: str, arrived: Callable[[int], None] = lambda _: None
    ) -> None:
        """Wait until every rank has written `key`; call `arrived` with each.

        Texts say which action the missing ranks have to take.
        """
        missing, poll = self._ranks(), _MIN_POLL
        next_keepalive, next_log = 0.0, time.monotonic() + _LOG_INTERVAL
        while not self._store.has(*_keys(key, missing)):
            now = time.monotonic()
            if now >= next_keepalive:
                next_keepalive = now + _KEEPALIVE_INTERVAL
                self._store.add(_key(_KEEPALIVE, self._rank), 1)
                self._raise_notice()
                here = [rank for rank in missing if self._store.has(_key(key, rank))]
                for rank in here:
                    arrived(rank)
                missing = [rank for rank in missing if rank not in here]
            if now >= next_log:
                next_log = now + _LOG_INTERVAL
                log.warning(
                    "%s waits for rank %s to %s", self.registration, _listed(missing), action
                )
            if now > self._end or self._cancelled.wait(poll):
                self._give_up(missing, action)
            poll = min(poll * 1.5, _MAX_POLL)
        for rank in missing:
            arrived(rank)
        if self._cancelled.is_set():
            self._give_up([], action)

    # ── failure notice ──────────────────────────────────────────────────────────────────────────

    def _give_up(self, missing: list[int], action: str) -> NoReturn:
        count = f"{len(missing)} of {self.registration.world_size} workers"
        is_cancelled = self._cancelled.is_set()
        when = "before it was stopped" if is_cancelled else f"within {self._timeout:g} s"
        text = f"{count} did not {action} {when}: rank {_listed(missing)}"
        notice = {"text": f"{self.registration} has given up: {text}", "missing": missing}
        self._write_notice(notice)
        raise WorldTimeout(text, missing)

    def _reject(self, text: str) -> NoReturn:
        self._write_notice({"text": text})
        raise ValueError(text)

    def _write_notice(self, notice: dict[str, Any]) -> None:
        if self.registration.entry:
            return  # only this worker's failure: the world that it would rejoin goes on
        self._store.compare_set(_NOTICE, "", json.dumps(notice))
        if self._store.is_server and self.remaining():
            # The store ends with this process: let the waiting workers read the notice first.
            others = [rank for rank in self._ranks() if rank != self._rank]
            here = [rank for rank in others if self._store.has(_key(_REGISTRATION, rank))]
            self._wait_for_keys(_keys(_NOTICE_READ, here), time.monotonic() + _NOTICE_GRACE)

    def _raise_notice(self) -> None:
        if (text := self._store.read(_NOTICE)) is None:
            return
        self._store.set(_key(_NOTICE_READ, self._rank), "")
        notice = json.loads(text)
        if "missing" in notice:
            raise WorldTimeout(notice["text"], notice["missing"])
        raise ValueError(notice["text"])

    def _ranks(self) -> list[int]:
        return [*range(self.registration.world_size)]


def _key(name: str, rank: int) -> str:
    return f"{name}/{rank}"


def _keys(name: str, ranks: Sequence[int]) -> list[str]:
    return [_key(name, rank) for rank in ranks]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
