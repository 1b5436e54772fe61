"""One transfer for several processes of one host: which link sends it, and which wait for it.

A state machine without sockets, threads or a clock. Messages with equal tensors, for links whose
peers share a host, meet in one `HostCopy`. Its first part, the lead, is sent over the network into
shared memory of its peer. The peers of the other parts map that memory. If the lead is lost before
its transfer has arrived, another part is the next lead. (tests/unit/carrier/test_host_copies.py)
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from .._aio.segments import SegmentName

Soon = Callable[[Callable[[], object]], object]
"""Calls a function in the next iteration of the event loop."""


class Part(Protocol):
    """The tensors of one message for one peer of a host."""

    @property
    def is_wanted(self) -> Callable[[], bool]:
        """Returns whether the message is still wanted, so that its tensors may not be changed."""
        ...

    def send(self, *, is_shared: bool) -> None:
        """Send the tensors to the peer, into memory that its siblings can map if `is_shared`."""

    def adopt(self, name: SegmentName) -> None:
        """Let the peer map the memory that a sibling has received."""

    def free(self) -> None:
        """Let the peer free the memory that it has received for its siblings."""


class HostCopy:
    """One transfer of equal tensors to the processes of one host.

    Args:
        keep: what has to be kept until the transfer has arrived.
        soon: calls a function in the next iteration.
        close: is called once no further part may join.
    """

    def __init__(self, keep: object, soon: Soon, close: Callable[["HostCopy"], None]) -> None:
        self.lead: Part | None = None  # which is or was sent over the network
        self._keep: object | None = keep
        self._soon = soon
        self._close = close
        self._waiting: list[Part] = []  # for the start, or for the lead's transfer to arrive
        self._adopting: list[Part] = []
        self._start_soon()

    def add(self, part: Part) -> None:
        """Let a part wait for the transfer."""
        self._waiting.append(part)

    def remove(self, part: Part) -> None:
        """Forget a part that is cancelled, lost or adopted; another one may have to lead."""
        if part is self.lead:
            self.lead = None
            self._start_soon()
        elif part in self._waiting:
            self._waiting.remove(part)
        elif part in self._adopting:
            self._adopting.remove(part)
            self._free_adopted()

    def on_arrived(self, name: SegmentName | None) -> None:
        """Let the waiting parts adopt the memory of the lead; without a name they are sent."""
        self._end()
        waiting, self._waiting = self._waiting, []
        if name is None:
            for each in waiting:
                each.send(is_shared=False)
            return
        self._adopting = waiting
        for each in waiting:
            each.adopt(name)
        self._free_adopted()

    def _start_soon(self) -> None:
        # An idle connection sends its call at once, the others at the end of the iteration: that
        # is after what is scheduled now.
        self._soon(lambda: self._soon(self._start))

    def _start(self) -> None:
        """Send one part; the others wait for it."""
        if self.lead is not None:  # two leads were lost in one iteration
            return
        # A part that is not wanted is about to be removed by its link.
        wanted = [each for each in self._waiting if each.is_wanted()]
        if len(wanted) < 2:
            self._end()
        if wanted:
            self.lead = wanted[0]
            self._waiting.remove(self.lead)
            self.lead.send(is_shared=len(wanted) > 1)

    def _free_adopted(self) -> None:
        if not self._adopting and self.lead is not None:
            self.lead.free()

    def _end(self) -> None:
        self._keep = None
        self._close(self)


HostCopies = dict[Hashable, HostCopy]
"""The transfers that parts may join, of the links of one event loop."""


def join(copies: HostCopies, key: Hashable, keep: Any, soon: Soon) -> HostCopy:
    """Return the transfer of a host and a content, a new one if there is none to join.

    While `keep` is kept, an equal key means an equal content.
    """

    def close(copy: HostCopy) -> None:
        if copies.get(key) is copy:
            del copies[key]

    found = copies.get(key)
    # If the lead is not wanted, the tensors that are sent may have been changed meanwhile.
    if found is None or not (found.lead is None or found.lead.is_wanted()):
        found = copies[key] = HostCopy(keep, soon, close)
    return found
