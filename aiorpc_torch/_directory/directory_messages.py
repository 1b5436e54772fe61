"""Messages between a worker and the directory of its world: plain values, each with a tag."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from .._text import printable_parts
from .._wire.plain import reader
from .registration import Registration


class Member(NamedTuple):
    """A process that is in the world, as others reach it."""

    registration: Registration
    worker_id: int
    address: str
    device_maps: dict[str, dict[str, str]]
    digest: str  # of its key. Any member may have to check that key one day

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def rank(self) -> int:
        return self.registration.rank


class _Message(msgspec.Struct, tag=True, array_like=True):
    """The base class of all messages. Their text is printable, whoever has sent them."""

    def __post_init__(self) -> None:
        for each in self.__struct_fields__:
            setattr(self, each, printable_parts(getattr(self, each)))


class _OfProcess(_Message):
    """The base class of messages about one process."""

    name: str
    worker_id: int


# ── of a worker ─────────────────────────────────────────────────────────────────────────────────


class Register(_Message):
    """The first message of a process: it wants to be in the world."""

    registration: Registration
    key: str = ""  # a secret of the process, with which it may connect again


class Resume(_Message):
    """The first message of a process that connects again, perhaps to another directory."""

    registration: Registration
    worker_id: int
    key: str
    entries: int  # the highest number of an entry that it knows of
    is_member: bool  # whether it has entered. Else the directory lets it enter, with this worker id
    world: str


class Known(_Message):
    """The answer to `Recall`: what one member knows of a running world."""

    entries: int
    joins: int
    first_ids: int  # the highest worker id of the start
    members: Sequence[Member]
    leaving: Sequence[str]  # names of those that take no new calls
    lost: Sequence[str]  # names of those that this member has lost
    world: str


class Publish(_Message):
    """The address of the agent of torch's RPC, which has started, and its device maps."""

    address: str
    device_maps: dict[str, dict[str, str]]
    is_reaching: bool  # whether the others are known to be within reach: no `Confirm` follows


class Confirm(_Message):
    """The ranks that this worker cannot reach, and a text about them if there are any."""

    unreachable: Sequence[int]
    text: str


class GiveUp(_Message):
    """The worker waits no longer for the world; the text says since when."""

    when: str


class AskMissing(_Message):
    """A question which ranks are awaited: the answer is `Missing`."""


class Greet(_Message):
    """A question whether the directory is there: the answer is `Here`."""


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

    departs: bool  # whether the others go on: a process that enters later does not meet it


class Exit(_Message):
    """The worker is ready to end its pipes when those ranks are: the answer is `Exited`."""

    ranks: Sequence[int]
    is_full: bool = False  # whether it waits for all members, in place of those ranks


_AtStart = Register | Resume | Publish | Confirm | GiveUp | AskMissing
FromWorker = _AtStart | Known | Greet | Know | Verdict | Retire | Leave | Exit

# ── of the directory ────────────────────────────────────────────────────────────────────────────


class Registered(_Message):
    """All workers of the start, in rank order."""

    registrations: Sequence[Registration]
    world: str  # the id of the world, which it keeps when its directory moves


class Entering(_Message):
    """The process enters a running world with this registration and worker id, beside these."""

    own: Registration
    worker_id: int
    registrations: Sequence[Registration]  # of all members in rank order, its own one included
    world: str


class Members(_Message):
    """All members in rank order: each has an address."""

    members: Sequence[Member]
    entering: Sequence[str] = ()  # names of others, for one that connects again: `Add` follows
    coordinator: str = ""  # the worker that keeps the directory


class Complete(_Message):
    """Each worker reaches each."""


class Failed(_Message):
    """The worker is not in the world, because ranks are missing or for a conflict."""

    text: str
    missing: Sequence[int] | None = None


class Ended(_Message):
    """This world is over: the worker belongs to the next one at this place."""


class Missing(_Message):
    """The first ranks that are awaited, and what they have to do."""

    ranks: Sequence[int]
    action: str
    ended: str = ""  # a text about those that had registered and have ended
    more: int = 0  # number of the ranks that are awaited too, and not named


class Moved(_Message):
    """Tells that a worker keeps the directory now; the members are those that are known."""

    coordinator: str


class Recall(_Message):
    """A question what a member knows of its world: the answer is `Known`."""


class Here(_Message):
    """The answer to `Greet`."""


class Add(_Message):
    """A process enters: the answer is `Know`."""

    member: Member


class Announce(_OfProcess):
    """A process that was added is in the world."""

    silent: Sequence[str]  # workers that have not confirmed in time that they know it


class Gone(_OfProcess):
    """The connection of a process has ended, and it did not leave; or is opened again."""


class Left(_OfProcess):
    """The block of a process has ended, and it takes no new calls."""


class Ask(_OfProcess):
    """A question to a member, whether that process is alive: the answer is `Verdict`."""


class Exited(_Message):
    """The ranks of `Exit` are ready too, or gone."""


_ToStarting = Registered | Entering | Members | Complete | Failed | Ended | Missing
ToWorker = _ToStarting | Moved | Recall | Here | Add | Announce | Gone | Left | Ask | Exited

read_from_worker = reader(FromWorker)
read_to_worker = reader(ToWorker)
