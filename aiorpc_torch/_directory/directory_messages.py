"""Messages between a worker and the directory of its world: plain values, each with a tag."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from .._wire.plain import reader
from .registration import Registration


class Member(NamedTuple):
    """A process that is in the world, with the fields of `PeerInfo`."""

    name: str
    rank: int
    worker_id: int
    address: str
    device_maps: dict[str, dict[str, str]]
    namespace: str
    endpoint: str


class _Message(msgspec.Struct, tag=True, array_like=True):
    """The base class of all messages."""


class _OfProcess(_Message):
    """The base class of messages about one process."""

    name: str
    worker_id: int


# ── of a worker ─────────────────────────────────────────────────────────────────────────────────


class Register(_Message):
    """The first message of a process: it wants to be in the world."""

    registration: Registration
    key: str = ""
    """A secret of the process, with which it may connect again."""


class Resume(_OfProcess):
    """The first message of a process that connects again: its connection has ended."""

    key: str


class Publish(_Message):
    """The address of the agent of torch's RPC, which has started, and its device maps."""

    address: str
    device_maps: dict[str, dict[str, str]]
    is_reaching: bool
    """Whether the others are known to be within reach: no `Confirm` follows."""


class Confirm(_Message):
    """The ranks that this worker cannot reach, and a text about them if there are any."""

    unreachable: Sequence[int]
    text: str


class GiveUp(_Message):
    """The worker waits no longer for the world; the text says since when."""

    when: str


class AskMissing(_Message):
    """A question which ranks are awaited: the answer is `Missing`."""


class Know(_Message):
    """The worker has added the process with that worker id: other workers may tell it of it."""

    worker_id: int


class Verdict(_OfProcess):
    """The answer to `Ask`."""

    is_alive: bool


class Retire(_Message):
    """The block of the worker has ended, and it takes no new calls, while the others go on."""


class Leave(_Message):
    """The worker leaves, so the end of its connection is none of its process."""

    departs: bool
    """Whether the others go on: a process that enters later does not meet it."""


class Exit(_Message):
    """The worker is ready to end its pipes when those ranks are: the answer is `Exited`."""

    ranks: Sequence[int]


_AtStart = Register | Resume | Publish | Confirm | GiveUp | AskMissing
FromWorker = _AtStart | Know | Verdict | Retire | Leave | Exit

# ── of the directory ────────────────────────────────────────────────────────────────────────────


class Registered(_Message):
    """All workers of the start, in rank order."""

    registrations: Sequence[Registration]


class Entering(_Message):
    """The process enters a running world with this registration and worker id, beside these."""

    own: Registration
    worker_id: int
    registrations: Sequence[Registration]
    """Of all members in rank order, its own one included."""


class Members(_Message):
    """All members in rank order: each has an address."""

    members: Sequence[Member]
    entering: Sequence[str] = ()
    """Names of further ones, for a worker that connects again: `Add` follows."""


class Complete(_Message):
    """Each worker reaches each."""


class Failed(_Message):
    """The worker is not in the world, because ranks are missing or for a conflict."""

    text: str
    missing: Sequence[int] | None = None


class Ended(_Message):
    """This world is over: the worker belongs to the next one at this place."""


class Missing(_Message):
    """The ranks that are awaited, and what they have to do."""

    ranks: Sequence[int]
    action: str
    ended: str = ""
    """A text about those of them that had registered and have ended."""


class Add(_Message):
    """A process enters: the answer is `Know`."""

    member: Member


class Announce(_OfProcess):
    """A process that was added is in the world."""

    silent: Sequence[str]
    """Workers that have not confirmed in time that they know it."""


class Gone(_OfProcess):
    """The connection of a process has ended, and it did not leave; or is opened again."""


class Left(_OfProcess):
    """The block of a process has ended, and it takes no new calls."""


class Ask(_OfProcess):
    """A question to rank 0, whether that process is alive: the answer is `Verdict`."""


class Exited(_Message):
    """The ranks of `Exit` are ready too, or gone."""


_ToStarting = Registered | Entering | Members | Complete | Failed | Ended | Missing
ToWorker = _ToStarting | Add | Announce | Gone | Left | Ask | Exited

read_from_worker = reader(FromWorker)
read_to_worker = reader(ToWorker)
