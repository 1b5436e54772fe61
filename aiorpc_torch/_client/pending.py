"""Who waits for what on one connection: calls' futures and streams' incoming ends, by number.

Each is settled once, with whatever comes first; what comes for nobody is counted. Confined to the
loop of its connection.
"""

from collections.abc import Callable, Iterable
from typing import Any

from .._aio.inline_future import Wait
from .._protocol.columns import END, Held
from .._protocol.exceptions import Failure
from .._protocol.messages import Key
from .._protocol.targets import Broken
from ..errors import RemoteError, RpcError
from .stream_reader import Incoming, Item

Sink = Wait | Incoming
"""Where an outcome goes."""

_NO_STREAM = Broken(RemoteError("a value came in place of the items of a stream"))

Collect = Callable[[Key, Sink, Item | None], None]
"""Asks for a result that the callee holds: a call's, or an item's."""


class Pending(dict[int, Sink]):
    """The waiting of one connection. `late`: how many answers came for nobody."""

    late = 0

    def settle(
        self, outcomes: Iterable[tuple[Key, Any]], wake: list[Wait], collect: Collect
    ) -> list[int]:
        """Deliver results and items; returns the numbers of those that have ended.

        Whose task is to be woken is added to `wake`; what is held is asked for with `collect`.
        """
        ended = []
        for key, value in outcomes:
            if type(key) is int:
                sink = self.get(key)
                if type(value) is Held and sink is not None:
                    collect(key, sink, None)
                    continue
                ended.append(key)
                self.pop(key, None)
                if sink is None:
                    self.late += 1
                elif type(sink) is Wait:
                    if sink.settle(value):
                        wake.append(sink)
                elif isinstance(sink, Incoming):  # it could not be read there: no stream was begun
                    sink.fail(value if type(value) is Failure else _NO_STREAM)
            elif self._deliver(key, value, collect):
                ended.append(key[0])  # type: ignore[index]
        return ended

    def _deliver(self, key: Any, value: Any, collect: Collect) -> bool:
        """Deliver an item of a stream; whether the stream has ended."""
        number, index, price = key
        if not (type(number) is type(index) is type(price) is int):
            raise TypeError(f"{key!r} is no item's number")
        sink = self.get(number)
        if type(sink) is not Incoming:
            if sink is not None:
                raise TypeError(f"an item of a stream for call {number}, which is none")
            return price == 0  # only the end is free
        if price == 0 and not (value is END or type(value) in (Failure, Held)):
            raise TypeError(f"an item of a stream for call {number} that costs nothing")
        if (item := sink.arrived(value, price)) is not None:
            collect(key, sink, item)
        if price == 0:
            del self[number]
            sink.arrived(END, 0)  # also after a held one: an error, too large for a frame
        return price == 0

    def fail(self, numbers: Iterable[int], error: RpcError) -> None:
        """No answer will come for these."""
        for number in numbers:
            sink = self.pop(number, None)
            if isinstance(sink, Incoming):
                sink.fail(Broken(error))
            elif sink is not None and sink.settle(Broken(error)):
                # This may be called by a task: another's step cannot be taken inside its own.
                sink.get_loop().call_soon(sink.wake)
