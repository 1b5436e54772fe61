"""The calls of one link that have not left: a message's worth of them at a time, within the window.

Confined to the loop of its link. It sends nothing.
"""

from collections import deque
from collections.abc import Container

from ._message import Outgoing
from ._window import Window

SLICE = 256  # calls in a message at most: the callee starts while the caller still packs
# From how many on the calls of a turn leave before it ends: soon while the callee is idle, so that
# both work at once; then late, since what comes back takes the interpreter from a long turn.
SOON = 64
CROWD = 1024
LARGE = 256 * 1024  # bytes from which a call goes alone: nobody waits for its transfer


class Backlog(deque[Outgoing]):
    """In order. A call that is no longer among `pending` is left behind: its caller has gone."""

    def __init__(self, pending: Container[int], window: Window) -> None:
        super().__init__()
        self._pending = pending
        self._window = window

    def is_enough(self, outstanding: int, woken: int) -> bool:
        """Whether they leave before their turn ends. The last answer has woken so many callers."""
        if outstanding:
            return len(self) >= CROWD
        return len(self) >= (SOON if woken < SOON else (woken + 1) // 2)

    def slice(self) -> list[Outgoing]:
        """The next message's calls: many small ones, or a large one."""
        taken: list[Outgoing] = []
        size = 0
        while self and len(taken) < SLICE and size < LARGE:
            call = self[0]
            if call.number in self._pending:
                if (call.size > LARGE and taken) or not self._window.admits(call.size):
                    break
                self._window.sent(call.number, call.size)
                taken.append(call)
                size += call.size
            self.popleft()
        return taken

    def force(self) -> list[Outgoing]:
        """The next call, whatever the window says; none if none is left."""
        while self and self[0].number not in self._pending:
            self.popleft()
        if not self:
            return []
        call = self.popleft()
        self._window.sent(call.number, call.size)
        return [call]
