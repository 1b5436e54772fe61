"""Departures: what the peers of a worker do, and waits until they serve or have left.

The workers of a world report to one of them, the coordinator, which keeps the directory. One that
waits sends one request, and the coordinator answers it when the goal is reached: no request is sent
while nothing happens, and their number is linear in the workers. The coordinator alone watches
those that are awaited; the others watch the coordinator.

Without a coordinator (in a world of `init_rpc`, and until another worker keeps the directory) the
workers ask each other, every second. There two rounds of answers must agree: a peer that served
with the same report in both also did so between them, and so did all others. (`Waits` has the rule
and its reason.) A lost peer is not waited for; its replacement process is, as any live one.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._aio.loops import await_on
from .._aio.waiting import WaitReport
from .._client.pool import ConnectionPool
from .._endpoint import entry_points
from .._peers.peers import Activity, Peers, Report, reason_of
from .._text import printable
from .._torch.agent import is_running
from .._torch.transport import send, wrap_future
from .._wire.exceptions import RemoteFailure
from .._wire.plain import dump, reader, wire_text
from ..errors import NotInWorld
from .waits import Wait, Waits

log = logging.getLogger("aiorpc_torch")

# All in seconds.
PROBE_INTERVAL = 1.0  # between two probes of a peer, and two rounds of questions
LOG_INTERVAL = 10.0  # between two log lines about the peers that are awaited
MESSAGE_TIMEOUT = 0.3  # for peers to take a leave message
MAX_PATIENCE = 3600.0  # for which a request waits
ANSWER_MARGIN = 5.0  # beyond the time at which a request is answered at the latest

_POLLS = 4  # looks at what peers have told between two rounds of questions


class Request(NamedTuple):
    """A report, and a question that is answered when `goal` is reached or `patience` is over."""

    name: str
    report: Report
    token: int
    goal: Activity
    among: Sequence[str]
    patience: float  # seconds; 0 asks for an answer at once, and ends the wait `token`


class Answer(NamedTuple):
    """The answer to a request: the report of the process that answers, and what it knows."""

    is_reached: bool
    is_open: bool  # whether the process answers requests later than at once
    report: Report
    missing: Sequence[str]
    done: Sequence[tuple[str, int]]  # names and processes of workers whose blocks ended in order
    lost: Mapping[str, str]  # the reasons of the lost workers


_read_plain_request = reader(Request)
_read_plain_answer = reader(Answer)


@dataclass(eq=False)
class Departures:
    """The departures of one worker's peers, on the loop that it was made on."""

    members: Peers
    pool: ConnectionPool
    linked: Callable[[], set[str]]  # returns the peers with an open connection
    probe: Callable[[str], None]  # asks whether a peer lives

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waits = Waits(self.members)
        self._tokens = itertools.count()
        self._serving = 0  # waits in `serve` for all peers
        self._is_leaving = self._is_closed = False
        self._has_ended = False  # all have left
        self._exclusion = ""  # why this worker is in its world no more
        self._attendant: asyncio.Task[None] | None = None
        self._asked: set[asyncio.Future[Any]] = set()  # requests that wait for a goal

    @property
    def coordinator(self) -> str | None:
        """Return the name of the coordinator, None without one: `init_rpc` started the world."""
        return None if self.members.is_attached else self.members.coordinator

    def move(self, coordinator: str) -> None:
        """Let another worker be the coordinator. All that wait ask there, with what they do."""
        self.members.coordinator = coordinator
        if (peer := self.members.peers.get(coordinator)) is not None:
            peer.is_open = True
        for each in self.members.peers.values():
            each.loss_there = ""
        if coordinator != self.members.name:
            self._waits.end_all()
        for future in [*self._asked]:
            _fail(future, LookupError("another worker is the coordinator"))

    def exclude(self, reason: str) -> None:
        """End all waits: this worker is in its world no more, and its peers do not answer it."""
        self._exclusion = reason
        self._waits.end_all()
        for future in [*self._asked]:
            _fail(future, LookupError(reason))

    def left(self) -> set[str]:
        """Return the peers that have left, as far as this worker knows."""
        peers = [*self.members.peers.values()]
        return {each.name for each in peers if each.is_done or each.has_told}

    def lost(self) -> dict[str, str]:
        """Return the peers that are lost, here or for the coordinator, with the reasons."""
        here = self.members.lost().items()
        there = {each.name: each.loss_there for each in self.members.peers.values()}
        reasons = {peer: reason_of(error) for peer, error in here}
        return {name: reason for name, reason in {**there, **reasons}.items() if reason}

    async def is_done(self, peer: str) -> bool:
        """Return whether a peer's block has ended in order, as far as this worker can know."""
        if peer not in self.left():
            await self.refresh()
        found = self.members.peers.get(peer)
        return (found is not None and found.is_done) or self.members.told().get(peer) == ""

    async def failure_of(self, peer: str) -> str:
        """Return in one line why a peer has ended, "" if it has left in order or is alive."""
        reason = self.members.told().get(peer, "") or self.lost().get(peer, "")
        return "" if reason and await self.is_done(peer) else reason

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────

    async def serve(self, until: str | None = None) -> None:
        """Wait until that peer has left, or every live peer serves too or has left."""
        goal, among = (Activity.SERVING, ()) if until is None else (Activity.DONE, (until,))
        await await_on(self._loop, self._wait(goal, among, logging.INFO))

    def begin_to_leave(self) -> None:
        """Note that this worker's block has ended in order: the next report says so."""
        self._is_leaving = True
        self._report()

    async def leave(self) -> None:
        """Report that this worker's block has ended in order; wait until all live peers' have."""
        self.begin_to_leave()
        with contextlib.suppress(NotInWorld):  # then nobody waits for it
            await self._wait(Activity.DONE, (), logging.WARNING)
        self._has_ended = True

    async def _wait(self, goal: Activity, among: Sequence[str], level: int) -> None:
        """Wait until the peers `among` (default: all) reach `goal`, or raise NotInWorld."""
        token, is_reached = next(self._tokens), not self.members.peers
        self._serving += goal is Activity.SERVING
        self._report()
        try:
            with WaitReport(level, LOG_INTERVAL) as waiting:
                while not is_reached:
                    if self._exclusion:
                        raise NotInWorld(self._exclusion)
                    patience = waiting.pause
                    is_reached, missing = await self._wait_once(token, goal, among, patience)
                    if not is_reached:
                        names, verb = ", ".join(missing), "leaves" if len(missing) == 1 else "leave"
                        waiting.tell(f"{self.members.name} is serving until {names} {verb}")
        finally:
            self._serving -= goal is Activity.SERVING
            self._report()
            if not is_reached:
                self._withdraw(token)

    async def _wait_once(
        self, token: int, goal: Activity, among: Sequence[str], patience: float
    ) -> tuple[bool, Sequence[str]]:
        """Wait for `patience` seconds; return whether the goal is reached, and who has not."""
        coordinator = self._coordinator()
        if goal is Activity.SERVING and coordinator not in (None, self.members.name):
            self._renew_report()
        request = self._request(token, goal, among, patience)
        if coordinator is None:
            return await self._ask_all(request)
        if coordinator == self.members.name:
            answered: asyncio.Future[Answer] = self._loop.create_future()
            self._open_wait(request, functools.partial(_complete, answered))
            answer: Answer | None = await answered
        else:
            answer = await self._ask(coordinator, request)
        if answer is not None:
            return answer.is_reached, answer.missing
        self.probe(coordinator)
        await asyncio.sleep(PROBE_INTERVAL / _POLLS)
        return False, self._waits.missing(self.members.name, goal, among)

    def _withdraw(self, token: int) -> None:
        """End a wait that is cancelled, here and at the coordinator, whose answer is ignored."""
        self._waits.end(self.members.name, self.members.me.worker_id, token)
        coordinator = self._coordinator()
        if coordinator is not None and coordinator != self.members.name:
            with contextlib.suppress(Exception):  # torch does not reach it
                self._send(coordinator, self._request(token, Activity.DONE, (), 0.0)).cancel()

    async def refresh(self) -> None:
        """Ask the coordinator which peers have left, unless all have."""
        coordinator = None if self._has_ended else self._coordinator()
        if coordinator is not None and coordinator != self.members.name:
            await self._ask(coordinator, self._request(-1, Activity.DONE, (), 0.0))

    def _coordinator(self) -> str | None:
        """Return the name of the coordinator, None if there is none or it is lost or gone."""
        name = self.coordinator
        if name == self.members.name:
            return None if self._is_closed else name
        peer = None if name is None else self.members.peers.get(name)
        is_open = peer is not None and peer.is_open and not (peer.is_lost or peer.has_told)
        return name if is_open else None

    def _report(self) -> None:
        """Record what this worker does, under the next number if it has changed."""
        activity = Activity.SERVING if self._serving else Activity.ACTIVE
        if self._is_leaving:
            activity = Activity.DONE
        if activity is not self.members.own.activity:
            self._renew_report(activity)

    def _renew_report(self, activity: Activity | None = None) -> None:
        """Record what this worker does (default: as before) under the next number.

        The coordinator counts this worker as active from the answer to one call of `serve` on. So a
        request for another call, sent before that answer is here, must be a later report.
        (tests/unit/node/test_departures.py)
        """
        last = self.members.own.report
        activity = last.activity if activity is None else activity
        self.members.own.record(last._replace(sequence=last.sequence + 1, activity=activity))

    # ── requests ────────────────────────────────────────────────────────────────────────────────

    def _request(
        self, token: int, goal: Activity, among: Sequence[str], patience: float
    ) -> Request:
        return Request(self.members.name, self.members.own.report, token, goal, among, patience)

    def _send(self, peer: str, request: Request) -> "asyncio.Future[Any]":
        info = self.members.peers[peer].member.info
        return wrap_future(send(info, entry_points.departure, dump(request)))

    async def _ask(self, peer: str, request: Request) -> Answer | None:
        """Return a peer's answer; None if it does not answer or is lost."""
        timeout = request.patience + (ANSWER_MARGIN if request.patience else MESSAGE_TIMEOUT)
        try:
            future = self._send(peer, request)
            if request.patience:
                self._asked.add(future)
                future.add_done_callback(self._asked.discard)
            with self.pool.watching_peers({peer}, functools.partial(_fail, future)):
                async with asyncio.timeout(timeout):
                    data = await future
            data = data.raise_() if isinstance(data, RemoteFailure) else data
            answer: Answer = _read_plain_answer(data)
            self._record(peer, answer.report)
            if peer != self.coordinator:
                return answer
            done = {*answer.done}
            for each in self.members.peers.values():
                each.is_done_there |= (each.name, each.worker_id) in done
                each.loss_there = printable(answer.lost.get(each.name, ""))
            if (answering := self.members.get(peer, answer.report.worker_id)) is not None:
                answering.is_open &= answer.is_open
            return answer
        except Exception as exc:  # torch does not reach it, or it leaves
            log.debug("%s: no answer from worker %r: %r", self.members.name, peer, exc)
            return None

    def _record(self, name: str, report: Report) -> None:
        if (known := self.members.get(name, report.worker_id)) is not None:
            known.record(report)

    # ── without a coordinator ───────────────────────────────────────────────────────────────────

    async def _ask_all(self, request: Request) -> tuple[bool, Sequence[str]]:
        """Ask the peers in rounds; return whether the goal is reached, and of whom it is not."""
        request, goal, among = request._replace(patience=0.0), request.goal, request.among
        awaited = {*(among or self.members.peers)} - self.left()
        with self.pool.watching_peers(awaited, lambda _: None):  # a frozen one is lost in time
            before = await self._round(request)
            missing = self._waits.missing(self.members.name, goal, among)
            if not missing:
                # A peer that has left stays so; one that serves may stop.
                return goal is Activity.DONE or before == await self._round(request), ()
            for _ in range(_POLLS):
                await asyncio.sleep(PROBE_INTERVAL / _POLLS)
                if self._waits.missing(self.members.name, goal, among) != missing:
                    break
        return False, missing

    async def _round(self, request: Request) -> dict[str, Report]:
        """Ask the live peers that have not left; return their reports."""
        awaited = [peer for peer in request.among or self.members.peers if peer not in self.left()]
        asked = [peer for peer in awaited if peer not in self.members.lost()]
        answers = await asyncio.gather(*(self._ask(peer, request) for peer in asked))
        for peer, answer in zip(asked, answers, strict=True):
            if answer is None:
                self.probe(peer)
        found = [self.members.peers[peer] for peer in asked if peer in self.members.peers]
        return {each.name: each.report for each in found if not (each.is_lost or each.has_told)}

    # ── answering ───────────────────────────────────────────────────────────────────────────────

    def handle(self, data: bytes, reply: Any) -> None:
        """Answer a peer's request on the loop: complete the torch future `reply`."""

        def complete(answer: Answer) -> None:
            if is_running():  # see `Agent.release`
                reply.set_result(dump(answer))

        try:
            request = _read_request(data)
            if not {request.name, *request.among} <= self.members.workers.keys():
                raise ValueError(f"no worker {request.name!r} in this world")
        except Exception as exc:
            log.warning("worker %r rejected an unreadable report: %r", self.members.name, exc)
            reply.set_result(RemoteFailure.of(exc, self.members.name))
            return
        self._record(request.name, request.report)
        if request.patience and self._coordinator() == self.members.name:
            self._open_wait(request, complete)
            return
        self._waits.end(request.name, request.report.worker_id, request.token)
        complete(self._answer(request, False))
        self.settle()

    def _open_wait(self, request: Request, complete: Callable[[Answer], None]) -> None:
        """Answer a request when its goal is reached, or its patience is over."""
        asker = request.name, request.report.worker_id, request.token
        answer = lambda is_reached: complete(self._answer(request, is_reached))  # noqa: E731
        wait = Wait(*asker, request.goal, request.among, answer)
        self._waits.add(wait)
        self._loop.call_later(request.patience, self._waits.expire, wait)
        self.settle()
        is_attended = self._attendant is not None and not self._attendant.done()
        if not is_attended and self._waits.awaited():
            self._attendant = asyncio.create_task(self._attend(), name="aiorpc-departures")

    def _answer(self, request: Request, is_reached: bool) -> Answer:
        missing = self._waits.missing(request.name, request.goal, request.among)
        is_open = self._coordinator() == self.members.name
        done = [(each.name, each.worker_id) for each in self.members.everybody() if each.is_done]
        return Answer(is_reached, is_open, self.members.own.report, missing, done, self.lost())

    def settle(self) -> None:
        """Answer the requests whose goals are reached: a peer has left, or is lost or replaced."""
        self._waits.settle()

    async def _attend(self) -> None:
        """Watch the peers that any request waits for, so that those that freeze are lost in time.

        The end of a connection shows a death at once. Peers without one are pinged.
        """
        watched: set[str] = set()
        with self.pool.watching_peers(watched, lambda _: None):
            while awaited := self._waits.awaited():
                watched.clear()
                watched |= awaited - {self.members.name}
                for peer in watched - self.linked():
                    self.probe(peer)
                await asyncio.sleep(PROBE_INTERVAL)
                self.settle()

    async def close(self) -> None:
        """Answer all requests: this worker coordinates no more."""
        self._is_closed = True
        self._waits.end_all()
        if self._attendant is not None:
            self._attendant.cancel()
            await asyncio.wait({self._attendant})

    async def tell(self, peers: Iterable[str], failure: str) -> None:
        """Tell by torch RPC, as far as the peers answer, that this worker has failed."""
        data = dump((self.members.name, self.members.me.worker_id, wire_text(failure)))
        answers = []
        for peer in peers:
            with contextlib.suppress(Exception):  # torch does not reach it
                info = self.members.peers[peer].member.info
                answers.append(wrap_future(send(info, entry_points.leave_message, data)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MESSAGE_TIMEOUT):
                await asyncio.gather(*answers, return_exceptions=True)


def _complete(future: "asyncio.Future[Answer]", answer: Answer) -> None:
    if not future.done():  # its task was cancelled
        future.set_result(answer)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _read_request(data: bytes) -> Request:
    """Return the request that a peer has sent. Raises an exception if it is malformed."""
    request: Request = _read_plain_request(data)
    if not 0 <= request.patience <= MAX_PATIENCE:
        raise ValueError(f"not a patience: {request.patience}")
    return request
