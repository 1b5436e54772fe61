"""The peers of a worker: one record for each, with one state, and one function that changes it.

Everything that affects the state of a peer is in this file, and it does not know who reports:
connections, pings, the directory, a supervisor of children, or silence. It has no clock and no
loop. `Peers.apply` takes an event and returns the duties that follow; a driver does them.

A record is of one process. Another process of the same worker gets another record.
"""

import enum
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .._text import printable
from .._wire.handshake import Credentials, Introduction, Party
from ..errors import NotInWorld, RpcError, WorkerGone, WorkerLost
from .changes import FOLLOWS, Change, Kind

if TYPE_CHECKING:
    from .._torch.agent import PeerInfo
    from .._torch.devices import NamedDeviceMaps


class State(enum.Enum):
    """A state of a process, as far as it is known."""

    ALIVE = "alive, as far as is known"
    LOST = "dead, frozen or unreachable; it may answer again, or another take its place"
    ABANDONED = "dead, and no other process is started"
    FAILED = "lost, since its block has failed, whatever it still sends"
    LEFT = "one that has left in order: it takes no new calls; those that run may end"
    ENDED = "one that has left, and does not answer any more"


class Attachment(enum.Enum):
    """Service of a worker in a world that `init_rpc` has started, as it has told."""

    UNKNOWN = "it has not answered yet"
    ATTACHED = "it serves"
    DETACHED = "it does not serve: it has not attached yet, or has left"
    REFUSED = "it does not answer, or has another version, or none, of this package"


class Activity(enum.IntEnum):
    """The last that a worker has reported of its block. A later one implies those before it."""

    ACTIVE = 0
    """It is inside its block."""
    SERVING = 1
    """It waits in `serve()` for all peers."""
    DONE = 2
    """Its block has ended in order; it serves until every live peer's has."""


class Report(NamedTuple):
    """A report of one process. Each change of the activity has the next sequence number."""

    worker_id: int
    """New for a replacement process, whose activity is ACTIVE."""
    sequence: int
    activity: Activity


class Event(enum.Enum):
    """A report of a process: by anybody, in any order, late or twice."""

    MESSAGE = "a message of it is read"
    ANSWER = "it answers a ping"
    CUT = "a connection has ended without a last frame"
    EXIT = "a connection has ended, and it is a child that has ended or ends now"
    LOSS = "a ping has failed, it was silent for too long, or it has exited"
    FAILURE = "it tells that its block has failed"
    LEAVE = "it tells that it leaves in order"
    ABANDON = "no process is started in its place"
    ENTRY = "it has entered the world"
    ATTACH = "it tells that it has attached to a world of `init_rpc`"
    DETACH = "it tells that it is not attached to that world"
    REFUSE = "it cannot attach, or does not answer whether it has"
    LEAVE_GROUP = "it has left the group of torch's RPC"


class Duty(enum.Enum):
    """A duty of the driver, which also wakes whoever waits for a peer."""

    PING = "ping it; a failure is a LOSS"
    AWAIT_EXIT = "wait for its exit code, which is a LOSS"
    TELL = "tell the readers of changes"
    FAIL = "fail the calls to it, and cancel its own"
    REPORT = "report the loss to this worker's block"
    SEE_OFF = "ping it until torch reports its end"
    END = "end the connections to it, and from it"
    FORGET = "end its connections, and forget its name"


_ALIVE, _LOST, _ABANDONED, _FAILED, _LEFT, _ENDED = State
_TELL, _FAIL, _REPORT, _END = Duty.TELL, Duty.FAIL, Duty.REPORT, Duty.END

RULES: Mapping[Event, Mapping[State, tuple[State, Collection[Duty]]]] = {
    Event.MESSAGE: {_LOST: (_ALIVE, [_TELL])},
    Event.ANSWER: {_LOST: (_ALIVE, [_TELL])},
    Event.CUT: {state: (state, [Duty.PING]) for state in (_ALIVE, _LOST, _LEFT, _ENDED)},
    # Calls wait for the exit code. Once it is known they are failed, as often as it takes: some may
    # have begun to wait, in another thread, after they were failed.
    Event.EXIT: {
        **{state: (state, [Duty.AWAIT_EXIT]) for state in (_ALIVE, _LOST, _LEFT, _ENDED)},
        **{state: (state, [_FAIL]) for state in (_ABANDONED, _FAILED)},
    },
    Event.LOSS: {
        _ALIVE: (_LOST, [_TELL, _FAIL, _REPORT]),
        _LOST: (_LOST, [_FAIL]),  # calls that were sent since
        _ABANDONED: (_ABANDONED, [_FAIL]),
        _FAILED: (_FAILED, [_FAIL]),
        _LEFT: (_ENDED, [_FAIL]),
        _ENDED: (_ENDED, [_FAIL]),
    },
    Event.FAILURE: {
        _ALIVE: (_FAILED, [_TELL, _FAIL, _REPORT]),
        _LOST: (_FAILED, [_FAIL]),
        _ABANDONED: (_FAILED, [_FAIL]),
    },
    Event.LEAVE: {
        _ALIVE: (_LEFT, [_TELL, Duty.SEE_OFF]),
        _LOST: (_ENDED, [_TELL, Duty.SEE_OFF]),
        _ABANDONED: (_ENDED, [_TELL]),
    },
    Event.ABANDON: {
        _ALIVE: (_ABANDONED, [_TELL, _FAIL, _REPORT]),
        _LOST: (_ABANDONED, []),
        _LEFT: (_ENDED, []),
    },
    Event.ENTRY: {_ALIVE: (_ALIVE, [_TELL]), _LOST: (_ALIVE, [_TELL])},
    Event.ATTACH: {_ALIVE: (_ALIVE, [_TELL]), _LOST: (_ALIVE, [_TELL])},
    Event.DETACH: {_ALIVE: (_ALIVE, [_TELL]), _LOST: (_LOST, [_TELL])},
    Event.REFUSE: {},
    Event.LEAVE_GROUP: {
        **{state: (_ENDED, [_TELL, _FAIL, _END]) for state in State},
        _FAILED: (_FAILED, [_FAIL, _END]),
    },
}
"""The next state and the duties. Where there is no rule, nothing follows."""

_ENDS_PROBE = {Event.ANSWER, Event.LOSS, Event.ENTRY, Event.ATTACH}
_OF_ATTACHMENT = {Event.ATTACH, Event.DETACH, Event.REFUSE}


class Peer:
    """The record of one process."""

    __slots__ = (
        *("activity", "attachment", "credentials", "epoch", "error", "failure", "final"),
        *("has_old_ping", "introduction", "is_done_there", "is_exiting", "is_first", "is_open"),
        *("is_pinged", "is_probed", "last_heard", "loss_there", "member", "name"),
        *("probed_since", "rank", "refusal", "silent_since", "state", "tensor_offer", "told"),
        *("watched_since", "worker_id", "_has_detached", "_sequence"),
    )

    def __init__(self, member: "PeerInfo", *, is_first: bool = False) -> None:
        self.member = member  # its addresses and device maps, beside what follows
        self.name, self.rank = member.name, member.rank  # of its worker
        self.worker_id = member.worker_id  # torch's: unlike the rank, it is new for each process
        self.is_first = is_first  # it was there when this worker started: it is never forgotten
        self.state = State.ALIVE  # changed by `Peers.apply` alone
        self.error: RpcError | None = None  # why it is lost, or has ended; None while it is alive
        self.final: RpcError | None = None  # why no other process takes its place
        self.failure: RpcError | None = None  # of its block, as it has told
        self.told: Kind | None = None  # the last change that readers know

        self.is_probed = False  # it has to answer a ping, or exit, before it counts as alive
        self.probed_since: float | None = None  # time of the first look at it after that
        self.is_pinged = False  # a ping by torch is under way
        self.has_old_ping = False  # from before a connection has ended: its answer may be, too
        self.is_exiting = False  # calls wait for its exit code: a loss has to follow
        self.last_heard = float("-inf")  # time of its last message, written in any thread
        self.watched_since: float | None = None  # time from which its silence counts
        self.silent_since: float | None = None  # time of a ping that is not answered

        # In a world that `init_rpc` has started.
        self.attachment = Attachment.UNKNOWN
        self.epoch = 0  # how many times it has attached
        self._has_detached = True  # in this epoch
        self.refusal: RpcError | None = None  # the error of calls to it while it is REFUSED

        self.activity = Activity.ACTIVE  # the last that it has reported of its block
        self._sequence = -1  # of the last report
        self.is_done_there = False  # its block has ended in order, as the coordinator tells
        self.loss_there = ""  # why it is lost for the coordinator, "" if it is not
        self.is_open = True  # it takes requests that wait for a goal, if it is the coordinator

        self.introduction: Introduction | None = None  # for calls from here, once it has told it
        self.credentials: Credentials | None = None  # for calls from there, once it has asked
        self.tensor_offer: tuple[int, str] | None = None  # of its tensor sockets, once told

    @property
    def is_lost(self) -> bool:
        """True if its calls fail: it is lost, or has ended after it had left."""
        return self.state is not _ALIVE and self.state is not _LEFT

    @property
    def has_left(self) -> bool:
        """True if its block has ended in order."""
        return self.state is _LEFT or self.state is _ENDED

    @property
    def has_told(self) -> bool:
        """True if it has told of its end itself, or cannot attach."""
        has_detached = self.attachment is Attachment.DETACHED and self.epoch > 0
        is_refused = self.attachment is Attachment.REFUSED
        return self.has_left or self.failure is not None or has_detached or is_refused

    @property
    def has_answered(self) -> bool:
        """True if it has told whether it is attached."""
        return self.attachment is Attachment.ATTACHED or self.attachment is Attachment.DETACHED

    @property
    def is_here(self) -> bool:
        """True if readers of changes know it as a member: it has entered and not left."""
        return self.told is not None and self.told != "left"

    @property
    def is_done(self) -> bool:
        """True if its block has ended in order, as it or the coordinator has told."""
        return self.activity is Activity.DONE or self.is_done_there

    @property
    def is_awaited(self) -> bool:
        """True if waits for all peers are for it, whatever it does: it lives, and has not left."""
        return not (self.is_lost or self.has_told or self.is_done_there)

    @property
    def report(self) -> Report:
        return Report(self.worker_id, self._sequence, self.activity)

    def record(self, report: Report) -> None:
        """Record a report of this process, unless it is late."""
        if report.sequence > self._sequence:
            self._sequence, self.activity = report.sequence, report.activity

    def attach(self, event: Event, epoch: int, error: RpcError | None) -> bool:
        """Note what is reported of its attachment; return whether it has told something new.

        In each epoch a process attaches, then leaves.
        """
        if self.has_left:
            return False
        if event is Event.REFUSE:
            # What it has told itself counts, until torch's RPC ends here.
            if self.attachment is not Attachment.ATTACHED or isinstance(error, NotInWorld):
                self.attachment, self.refusal = Attachment.REFUSED, error
            return False
        told, known = (epoch, event is Event.DETACH), (self.epoch, self._has_detached)
        self.epoch, self._has_detached = max(told, known)
        self.attachment = Attachment.DETACHED if self._has_detached else Attachment.ATTACHED
        self.refusal = None
        return told > known


class Effect(NamedTuple):
    """A duty for one process; `error` is the reason of FAIL, END and REPORT."""

    duty: Duty
    peer: Peer
    error: RpcError | None = None
    change: Change | None = None


KEPT_GONE = 256  # members that came later and are gone, whose names are still known


class Peers:
    """The workers of one world, as one of them knows them.

    It is empty until the world is complete. One thread changes it; any thread may read it.
    """

    def __init__(
        self, name: str, members: Iterable["PeerInfo"] = (), *, is_attached: bool = False
    ) -> None:
        self.name = name  # of this worker
        # Every worker by its name, and by its rank; this one too, which is always alive.
        self.workers: dict[str | int, Peer] = {}
        self.peers: dict[str, Peer] = {}  # the others
        # Whether `init_rpc` has started the world. Then workers attach and detach, without a change
        # of their state.
        self.is_attached = is_attached
        self.coordinator = ""  # the worker that keeps the directory, as far as this one knows
        self.restarts = 0  # how often the process of this worker was started again
        self._gone: deque[Peer] = deque()
        self._last_check = float("-inf")
        for member in members:
            self.admit(member, is_known=True)

    @property
    def own(self) -> Peer:
        return self.workers[self.name]

    @property
    def me(self) -> Party:
        return Party(self.name, self.own.worker_id)

    def names(self) -> list[str]:
        """Return the names of all workers. In any thread."""
        return [key for key in [*self.workers] if isinstance(key, str)]

    def everybody(self) -> list[Peer]:
        """Return all workers, in the order in which they became known."""
        return [self.workers[name] for name in self.names()]

    def get(self, name: str, worker_id: int) -> Peer | None:
        """Return the record of a worker's process, None if it is not the current one."""
        found = self.workers.get(name)
        return found if found is not None and found.worker_id == worker_id else None

    def worker_id_of(self, name: str) -> int | None:
        """Return the worker id of a worker's process, None for no worker of this world."""
        found = self.workers.get(name)
        return None if found is None else found.worker_id

    def is_here(self, name: str) -> bool:
        """Return whether a peer has entered and not left: it may be lost. In any thread."""
        found = self.peers.get(name)
        return found is not None and found.is_here

    def present(self) -> tuple[str, ...]:
        """Return the peers that have not left, in rank order. In any thread."""
        every = sorted([*self.peers.values()], key=lambda peer: peer.rank)
        return tuple(
            each.name for each in every if (not each.has_left if self.is_attached else each.is_here)
        )

    def check(self, caller: Party) -> Peer:
        """Return the record of a caller, which is a current worker. Raises ValueError if no worker
        has that name, NotInWorld if another process has replaced the caller.
        """
        if caller.name not in self.workers:
            raise ValueError(f"no worker {caller.name!r} in this world")
        if (found := self.get(caller.name, caller.worker_id)) is None:
            raise NotInWorld(replaced_text(caller.name))
        return found

    def lost(self) -> dict[str, RpcError]:
        """Return why peers are lost, or have ended. In any thread."""
        every = [(each.name, each.error) for each in [*self.peers.values()] if each.is_lost]
        return {name: error for name, error in every if error is not None}

    def address_elsewhere(self, peer: Peer) -> str:
        """Return the address of a peer in another network namespace, "" of one in this one."""
        member, own = peer.member, self.own.member.namespace
        is_here = bool(own) and member.namespace == own
        return "" if is_here else member.endpoint or member.address

    def device_maps(self) -> "dict[str, NamedDeviceMaps]":
        return {name: self.workers[name].member.device_maps for name in self.names()}

    def told(self) -> dict[str, str]:
        """Return what peers have told of their ends: a failure, or "". In any thread."""
        told = [(each.name, each.failure) for each in [*self.peers.values()] if each.has_told]
        return {name: "" if failure is None else reason_of(failure) for name, failure in told}

    # ── who is a member ─────────────────────────────────────────────────────────────────────────

    def admit(self, member: "PeerInfo", *, is_first: bool = False, is_known: bool = False) -> Peer:
        """Add a worker, or its next process; if `is_known`, no change tells of it."""
        peer = Peer(member, is_first=is_first)
        if (known := self.peers.get(member.name)) is not None:
            peer.told = known.told
        elif is_known and not self.is_attached:
            peer.told = "joined"
        return self._put(peer)

    def _put(self, peer: Peer) -> Peer:
        known = self.workers.get(peer.name)
        if known is not None and known.rank != peer.rank:  # it has joined under the name again
            del self.workers[known.rank]
        self.workers[peer.name] = self.workers[peer.rank] = peer
        if peer.name != self.name:
            self.peers[peer.name] = peer
        if peer.rank == 0 and not self.coordinator:
            self.coordinator = peer.name
        return peer

    def replace(self, member: "PeerInfo") -> list[Effect]:
        """Put another process in the place of a worker's; it is lost until it has entered."""
        old = self.peers[member.name]
        error = WorkerLost(old.name, "its process was replaced")
        effects = self._tell(old, "lost", error)
        new = Peer(member, is_first=old.is_first)
        new.state, new.error, new.told = State.LOST, error, old.told
        self._put(new)
        if not new.is_first:  # it may never enter
            self._gone.append(new)
        return [*effects, Effect(Duty.END, old, error)]

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def apply(
        self, peer: Peer, event: Event, error: RpcError | None = None, epoch: int = 0
    ) -> list[Effect]:
        """Change the state of a peer; return what has to be done.

        `error` is the reason of CUT, EXIT, LOSS, FAILURE, ABANDON, REFUSE and LEAVE_GROUP. `epoch`
        is how many times it has attached, for ATTACH and DETACH.
        """
        if self.peers.get(peer.name) is not peer:  # it was replaced, or is this process
            return []
        if event in _OF_ATTACHMENT and not peer.attach(event, epoch, error):
            return []
        if event is Event.ANSWER and peer.has_old_ping:  # it may have died since
            peer.has_old_ping = False
            return [Effect(Duty.PING, peer, error)]
        before = peer.state
        peer.state, duties = RULES[event].get(before, (before, ()))
        if event is Event.LOSS or event is Event.EXIT:
            if event is Event.EXIT and peer.is_exiting:  # its loss follows
                return []
            peer.is_exiting = Duty.AWAIT_EXIT in duties
        if Duty.PING in duties or Duty.AWAIT_EXIT in duties:
            peer.is_probed, peer.probed_since = True, None
            peer.has_old_ping = peer.is_pinged
        elif event in _ENDS_PROBE or peer.state is not before:
            peer.is_probed = False
        has_reason = peer.failure is not None or peer.final is not None
        if peer.state is State.ALIVE:
            peer.error = None
        elif event is Event.FAILURE and before is not peer.state:
            peer.error = peer.failure = error
        elif event is Event.ABANDON:
            peer.final, peer.error = error, peer.failure or error
        elif event is Event.LEAVE_GROUP or (event is Event.LOSS and not has_reason):
            peer.error = error
        effects: list[Effect] = []
        for duty in duties:
            if duty is Duty.TELL:
                effects += self._tell(peer, _kind(peer, event), peer.error)
            else:
                reason = error if duty is Duty.AWAIT_EXIT else peer.error
                effects.append(Effect(duty, peer, reason))
        has_gone = before is _ALIVE and peer.state is not before and not self.is_attached
        if has_gone or event is Event.LEAVE_GROUP:
            effects += self._let_go(peer)
        return effects

    def _tell(self, peer: Peer, kind: Kind, error: RpcError | None) -> list[Effect]:
        """Tell the readers of a change, if it follows from the last one of this worker."""
        if peer.told not in FOLLOWS[kind]:
            return []
        peer.told = kind
        reason = reason_of(error) if kind == "lost" and error is not None else ""
        return [Effect(Duty.TELL, peer, None, Change(kind, peer.name, peer.rank, reason))]

    def _let_go(self, peer: Peer) -> Iterator[Effect]:
        """Forget, but for the last ones, the members that came later and are gone.

        Until then calls to them say that they have left or are lost. Afterwards they are unknown,
        so a world that changes for weeks does not grow. The first members may be replaced.
        """
        if not peer.is_first:
            self._gone.append(peer)
        while len(self._gone) > KEPT_GONE:
            oldest = self._gone.popleft()
            if self.peers.get(oldest.name) is oldest and oldest.state is not _ALIVE:
                del self.workers[oldest.name], self.peers[oldest.name]
                if self.workers.get(oldest.rank) is oldest:
                    del self.workers[oldest.rank]
                yield Effect(Duty.FORGET, oldest)

    # ── silence ─────────────────────────────────────────────────────────────────────────────────

    def end_answered_probes(self, now: float) -> bool:
        """Return whether the probe of a peer has ended, since it was heard meanwhile.

        torch's connection to it may have failed too, and never answers a ping. What was received
        before, and is read late, does not count. Call this as `check_silence`.
        """
        has_ended = False
        for peer in [*self.peers.values()]:
            if not peer.is_probed or peer.is_exiting:
                continue
            if peer.probed_since is None:
                peer.probed_since = now
            elif peer.last_heard > peer.probed_since:
                peer.is_probed, has_ended = False, True
        return has_ended

    def check_silence(
        self, now: float, timeout: float, awaited: Collection[str]
    ) -> tuple[list[Peer], list[tuple[Peer, float]]]:
        """Return the peers to ping, and the lost ones with the seconds of their silence.

        Only peers that something waits for are watched, and those that are probed. A silent one is
        pinged after `timeout / 4` seconds, and is lost `timeout / 2` later. Call this every
        `timeout / 8` seconds.
        """
        # This process was blocked or suspended: answers may be here unread.
        is_late = now - self._last_check > timeout / 4
        self._last_check = now
        to_ping, lost = [], []
        for peer in [*self.peers.values()]:
            if peer.name not in awaited and not peer.is_probed:
                peer.watched_since = peer.silent_since = None
                continue
            if peer.watched_since is None:
                peer.watched_since = now
            heard = max(peer.watched_since, peer.last_heard)
            if peer.silent_since is not None and (heard >= peer.silent_since or is_late):
                peer.silent_since = None if heard >= peer.silent_since else now
            if peer.silent_since is None:
                if now - heard >= timeout / 4:
                    peer.silent_since = now
                    to_ping.append(peer)
            elif now - peer.silent_since >= timeout / 2:
                peer.watched_since = peer.silent_since = None
                lost.append((peer, now - heard))
        return to_ping, lost


def _kind(peer: Peer, event: Event) -> Kind:
    """Return the change that an event is for the readers, if it is one."""
    if peer.has_left or event is Event.DETACH:
        return "left"
    if peer.state is not State.ALIVE:
        return "lost"
    has_joined = event is Event.ATTACH or (event is Event.ENTRY and peer.told != "lost")
    return "joined" if has_joined else "returned"


def replaced_text(worker: str) -> str:
    """Return the error text for a process that was replaced."""
    return f"worker {worker!r} was restarted: a newer process has replaced this one"


def reason_of(error: RpcError) -> str:
    """Return in one line why a peer is lost: the peer may have told it."""
    return printable(error.reason if isinstance(error, WorkerGone) else str(error))
