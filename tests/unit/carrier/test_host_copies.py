"""One transfer for a host: one part leads, the others adopt, and none is forgotten."""

import weakref
from collections import deque
from collections.abc import Callable

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiorpc_torch._aio.segments import SegmentName
from aiorpc_torch._carrier.host_copies import HostCopies, HostCopy, join

NAME = SegmentName(1, 2, 3, 4)


class Member:
    """A part that notes what it is told."""

    def __init__(self) -> None:
        self.state = "waits"
        self.is_alive = True
        self.released = 0
        self.copy: HostCopy | None = None

    def is_wanted(self) -> bool:
        return self.is_alive

    def send(self, *, is_shared: bool) -> None:
        assert self.state == "waits"
        assert type(is_shared) is bool
        self.state = "is shared" if is_shared else "is sent"

    def adopt(self, name: SegmentName) -> None:
        assert name == NAME
        assert self.state == "waits"
        self.state = "adopts"

    def free(self) -> None:
        self.released += 1


class Host:
    """The transfers of one loop, with its next iteration at hand."""

    def __init__(self) -> None:
        self.copies: HostCopies = {}
        self.soon: deque[Callable[[], None]] = deque()

    def join(self, key: str = "host") -> Member:
        member = Member()
        member.copy = join(self.copies, key, None, self.soon.append)
        member.copy.add(member)
        return member

    def iterate(self) -> None:
        for _ in range(len(self.soon)):
            self.soon.popleft()()

    def start(self) -> None:
        """All that may join has joined."""
        self.iterate()
        self.iterate()


def joined(count: int) -> tuple[Host, list[Member]]:
    host = Host()
    members = [host.join() for _ in range(count)]
    host.start()
    return host, members


def leave(member: Member) -> None:
    assert member.copy is not None
    member.copy.remove(member)


def states(members: list[Member]) -> list[str]:
    return [each.state for each in members]


def test_one_of_equal_transfers_is_sent() -> None:
    """Of those that begin in one iteration, and of those that join while it is sent."""
    host, members = joined(3)
    members.append(host.join())
    host.start()
    assert states(members) == ["is shared", "waits", "waits", "waits"]
    assert members[0].copy is not None
    members[0].copy.on_arrived(NAME)
    assert states(members) == ["is shared", "adopts", "adopts", "adopts"]
    for each in members[1:]:
        assert not members[0].released
        leave(each)
    assert members[0].released == 1


def test_a_transfer_alone_is_not_shared() -> None:
    """The next one does not join it: the memory has no name."""
    host, members = joined(1)
    members.append(host.join())
    host.start()
    assert states(members) == ["is sent", "is sent"]
    assert not host.copies


def test_other_contents_and_hosts_have_other_transfers() -> None:
    host = Host()
    members = [host.join(key) for key in ("one", "other")]
    host.start()
    assert states(members) == ["is sent", "is sent"]


def test_none_joins_what_has_arrived() -> None:
    """The tensor may have been changed since."""
    host, members = joined(2)
    assert members[0].copy is not None
    members[0].copy.on_arrived(NAME)
    late = host.join()
    assert late.copy is not members[0].copy


def test_none_joins_a_transfer_whose_message_is_not_wanted() -> None:
    """Its caller may change the tensor already. What has joined before has another transfer."""
    host, members = joined(2)
    members[0].is_alive = False
    late = host.join()
    assert late.copy is not members[0].copy
    leave(members[0])
    host.start()
    assert members[1].state == late.state == "is sent"
    assert not host.copies


def test_a_receiver_without_a_segment() -> None:
    """Each has its own transfer."""
    _, members = joined(3)
    assert members[0].copy is not None
    members[0].copy.on_arrived(None)
    assert states(members) == ["is shared", "is sent", "is sent"]
    assert not members[0].released


def test_the_tensors_are_kept_until_none_can_join() -> None:
    """Another tensor would get their address, and their key."""
    host, keep = Host(), {1}
    freed = weakref.ref(keep)
    copy = join(host.copies, "host", keep, host.soon.append)
    for _ in range(2):
        copy.add(member := Member())
    host.start()
    del keep
    assert freed() is not None
    copy.on_arrived(None)
    assert freed() is None
    assert member.state == "is sent"


def test_nobody_is_left_when_it_arrives() -> None:
    """The memory is released."""
    _, members = joined(2)
    leave(members[1])
    assert members[0].copy is not None
    members[0].copy.on_arrived(NAME)
    assert members[0].released == 1


def test_all_are_lost_before_the_start() -> None:
    host = Host()
    members = [host.join() for _ in range(2)]
    for each in members:
        each.is_alive = False
        leave(each)
    host.start()
    assert states(members) == ["waits", "waits"]
    assert not host.copies


class Transfers(RuleBasedStateMachine):
    """Whatever is lost, cancelled or cannot be mapped, all that are wanted get their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host()
        self.members: list[Member] = []

    def of(self, *states: str) -> list[Member]:
        return [each for each in self.members if each.state in states]

    @rule()
    def join(self) -> None:
        self.members.append(self.host.join())

    @rule()
    def iterate(self) -> None:
        self.host.iterate()

    @rule(which=st.integers(0, 20))
    def arrive(self, which: int) -> None:
        self._arrive(which, NAME)

    @rule(which=st.integers(0, 20))
    def arrive_without_a_segment(self, which: int) -> None:
        self._arrive(which, None)

    def _arrive(self, which: int, name: SegmentName | None) -> None:
        for each in self.of("is sent"):
            each.state = "done"
        if shared := self.of("is shared"):
            lead = shared[which % len(shared)]
            assert lead.copy is not None
            lead.state = "done" if name is None else "is held"
            lead.copy.on_arrived(name)

    @rule(which=st.integers(0, 20), can_map=st.booleans())
    def map(self, which: int, can_map: bool) -> None:
        if adopting := self.of("adopts"):
            member = adopting[which % len(adopting)]
            leave(member)
            member.state = "done" if can_map else "is sent"

    @rule(which=st.integers(0, 20))
    def lose(self, which: int) -> None:
        """Its call is cancelled, or its peer dies."""
        if pending := self.of("waits", "is shared", "adopts"):
            member = pending[which % len(pending)]
            member.is_alive = False
            leave(member)
            member.state = "lost"

    @invariant()
    def held_memory_is_released_once(self) -> None:
        for each in self.of("is held"):
            if each.released:
                each.state = "done"
        assert all(each.released <= 1 for each in self.members)

    def teardown(self) -> None:
        for _ in range(2 * len(self.members) + 2):
            self.host.start()
            self._arrive(0, NAME)
            while self.of("adopts"):
                self.map(0, True)
            self.held_memory_is_released_once()
        assert not self.of("waits", "is shared", "adopts", "is held")
        assert not self.host.copies


Transfers.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestTransfers = Transfers.TestCase
