"""Who waits for what on one link: calls' futures and streams' incoming ends, by number.

Each is settled once, with whatever comes first; what comes for nobody is counted. Confined to the
loop of its link.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from ._incoming import Incoming
from ._message import Key
from ._wait import Wait
from ._wire import Broken
from .errors import RpcError

Sink = Wait | Incoming
"""Where an outcome goes."""


class Pending:
    """The waiting of one link. `late`: how many answers came for nobody."""

    def __init__(self) -> None:
        self._sinks: dict[int, Sink] = {}
        self.late = 0

    def __len__(self) -> int:
        return len(self._sinks)

    def __contains__(self, number: int) -> bool:
        return number in self._sinks

    def numbers(self) -> list[int]:
        """Of all that wait."""
        return [*self._sinks]

    def add(self, number: int, sink: Sink) -> None:
        """Somebody waits for call or stream `number`."""
        self._sinks[number] = sink

    def leave(self, number: int) -> bool:
        """Nobody waits for it any more; False if nobody did."""
        return self._sinks.pop(number, None) is not None

    def settle(self, outcomes: Iterable[tuple[Key, Any]], wake: list[Wait]) -> Iterator[int]:
        """Deliver results and items; yields the numbers of those that have ended.

        Whose task is to be woken is added to `wake`.
        """
        sinks = self._sinks
        for key, value in outcomes:
            if type(key) is tuple:
                if self._deliver(key, value):
                    yield key[0]
                continue
            assert isinstance(key, int)
            sink = sinks.pop(key, None)
            if sink is None:
                self.late += 1
            elif isinstance(sink, Wait) and sink.settle(value):
                wake.append(sink)
            yield key

    def _deliver(self, key: tuple[int, int, int], value: Any) -> bool:
        number, index, price = key
        sink = self._sinks.get(number)
        if not isinstance(sink, Incoming):
            return price == 0  # only the end is free
        ended = sink.arrived(index, value, price)
        if ended:
            del self._sinks[number]
        return ended

    def fail(self, numbers: Iterable[int], error: RpcError) -> None:
        """No answer will come for these."""
        for number in numbers:
            sink = self._sinks.pop(number, None)
            if isinstance(sink, Incoming):
                sink.fail(Broken(error))
            elif sink is not None and sink.settle(Broken(error)):
                # This may be called by a task: another's step cannot be taken inside its own.
                sink.get_loop().call_soon(sink.wake)
