"""The unsent results of a session, those held for their caller, and the way that each takes.

A large result goes in shared memory or on tensor sockets if it can. Else it is held here until its
caller collects it by torch RPC. All others go in frames. The items of a stream stay in order.
"""

import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._carrier.carrier import Carrier
from .._wire.blocks import ReadyMessage
from .._wire.columns import FAILED, HELD, PLAIN, cell_bytes, cell_tensors
from .._wire.connection_state import ReplyState
from .._wire.exceptions import RemoteFailure
from .._wire.frames import MAX_FRAME, RESULTS, frame
from .._wire.messages import EncodedResult, encode_reply
from .._wire.slots import Slots
from .._wire.tensors import INLINE_BYTES

if TYPE_CHECKING:
    from .session import Session

log = logging.getLogger("aiorpc_torch")


class ResultSender:
    """The sender of one session's results. Confined to its event loop.

    Attributes:
        held: the results that wait to be collected, with their sizes in bytes.
        replies: the results that wait for their frame.
    """

    def __init__(self, session: "Session") -> None:
        self.held: dict[Any, tuple[EncodedResult, int]] = {}
        self._session = session
        self._carriers = session.carriers
        self._calls = session.calls
        self.replies = ReplyState()
        self._copies: Slots[Any] = Slots()  # results whose tensors are being sent
        self._copying: dict[int, int] = {}  # the calls of those that are wanted
        self._copy_numbers = itertools.count()

    def __repr__(self) -> str:
        return f"<ResultSender {len(self.held)} held, {self.replies!r}>"

    @property
    def held_bytes(self) -> int:
        """Return the size of the held results in bytes. In any thread."""
        return sum(size for _, size in [*self.held.values()])

    def queue(self, result: EncodedResult) -> None:
        """Send a result, now or at the end of this loop iteration."""
        key, kind, content = result
        size = cell_bytes(kind, content)
        if size > INLINE_BYTES or (type(kind) is str and cell_tensors(kind, content)):
            carrier = self._carriers.chosen
            if carrier is not None and self._copy(result, size, carrier):
                return
            result, size = self._hold(result, size), 0
        # An item of a stream waits for the copies before it.
        if type(key) is not tuple or not self._copies or self._copies.admit(key[0], (result, size)):
            self.queue_small(result, size)

    def queue_small(self, result: EncodedResult, size: int) -> None:
        """Queue a result of `size` bytes for its frame; send it now if no other call is running."""
        if self.replies.add(result, size, is_last=not self._calls):
            self.flush()
        else:
            self._session.flush_soon()

    def flush(self) -> None:
        """Send the queued results, if frames may be sent."""
        if not self._session.is_open:
            return
        for results in self.replies.take():
            if self._session.is_open and (frames := self._frames(results)):
                self._session.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def collect(self, key: Any) -> EncodedResult | None:
        """Return a held result, once; None if it was released. In any thread."""
        result, _ = self.held.pop(key, (None, 0))
        return result

    def release(self, number: int) -> None:
        """Release the held results of a call, or of a stream's items."""
        for key in [*self.held]:
            if number == _call_of(key):
                self.held.pop(key, None)
        if number in self._copying.values():
            self._copying = {copy: call for copy, call in self._copying.items() if call != number}
            self._carriers.drop_cancelled()

    def close(self) -> None:
        """Release everything."""
        self.held.clear()
        self._copies.close()
        self._copying.clear()

    # ── tensors apart ───────────────────────────────────────────────────────────────────────────

    def _copy(self, result: EncodedResult, size: int, carrier: Carrier) -> bool:
        """Begin to send the tensors of a result; return False if they are sent otherwise."""
        key, copy = result[0], next(self._copy_numbers)
        self._copying[copy] = _call_of(key)
        self._copies.open(copy, key[0] if isinstance(key, tuple) else (key,))
        try:
            then = functools.partial(self._on_copied, copy, result, size)
            if carrier.send(*encode_reply((result,)), then, lambda: copy in self._copying):
                return True
        except Exception as exc:  # no memory, for one: torch's reply says so
            log.debug("the tensors of a result cannot be sent: %r", exc)
        self._copying.pop(copy, None)
        self._queue_all(self._copies.drop(copy))
        return False

    def _on_copied(
        self, copy: int, result: EncodedResult, size: int, message: ReadyMessage | None
    ) -> None:
        """Send a result whose tensors were sent, or not, and the items behind it."""
        is_wanted = self._copying.pop(copy, None) is not None
        if self._session.is_open:
            item: Any = message
            if not is_wanted:  # the caller waits for an answer, without a use for it
                item = (result[0], PLAIN, None), 0
            elif message is None:
                item = self._hold(result, size), 0
            self._queue_all(self._copies.fill(copy, item) or ())

    def _queue_all(self, items: Iterable[Any]) -> None:
        """Queue results with their sizes. Those whose tensors were sent follow what is queued."""
        for item in items:
            if isinstance(item, ReadyMessage):
                if self.replies.results:
                    self.flush()
                item.send()
            else:
                self.queue_small(*item)

    # ── by torch, or in frames ──────────────────────────────────────────────────────────────────

    def _hold(self, result: EncodedResult, size: int) -> EncodedResult:
        """Keep a result until it is collected; return the result to send in its place."""
        self.held[result[0]] = result, size
        return result[0], HELD, size

    def _frames(self, results: Sequence[EncodedResult]) -> list[bytes]:
        """Return the results as frames: one frame, unless they cannot be encoded together."""
        try:
            data, _ = encode_reply(results)
        except Exception as exc:  # e.g. no memory; callers would wait for ever
            log.warning("results for worker %r cannot be encoded: %r", self._session.caller, exc)
            if len(results) == 1:
                key, kind, _ = results[0]
                if kind == FAILED:  # nothing can be told: the end of the connection tells it
                    self._session.abort()
                    return []
                return self._frames([(key, FAILED, RemoteFailure.of(exc, "the callee"))])
            data = b""
        if data and len(data) <= MAX_FRAME:
            return [frame(RESULTS, data)]
        if len(results) == 1:
            return self._frames([self._hold(results[0], len(data))])
        return [each for result in results for each in self._frames([result])]


def _call_of(key: Any) -> int:
    """Return the number of the call of a result or an item."""
    return key[0] if isinstance(key, tuple) else key  # type: ignore[no-any-return]
