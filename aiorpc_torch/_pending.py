"""Who waits for what on one link: calls' futures and streams' incoming ends, by number.

Each is settled once, with whatever comes first; what comes for nobody is counted. Confined to the
loop of its link.
"""

from collections.abc import Iterable
from typing import Any

from ._incoming import Incoming
from ._message import Key
from ._wait import Wait
from ._wire import Broken
from .errors import RpcError

Sink = Wait | Incoming
"""Where an outcome goes."""


class Pending(dict[int, Sink]):
    """The waiting of one link. `late`: how many answers came for nobody."""

    late = 0

    def settle(self, outcomes: Iterable[tuple[Key, Any]], wake: list[Wait]) -> list[int]:
        """Deliver results and items; returns the numbers of those that have ended.

        Whose task is to be woken is added to `wake`.
        """
        ended = []
        for key, value in outcomes:
            if isinstance(key, tuple):
                if self._deliver(key, value):
                    ended.append(key[0])
                continue
            ended.append(key)
            sink = self.pop(key, None)
            if sink is None:
                self.late += 1
            elif type(sink) is Wait and sink.settle(value):
                wake.append(sink)
        return ended

    def _deliver(self, key: tuple[int, int, int], value: Any) -> bool:
        number, index, price = key
        sink = self.get(number)
        if type(sink) is not Incoming:
            return price == 0  # only the end is free
        ended = sink.arrived(index, value, price)
        if ended:
            del self[number]
        return ended

    def fail(self, numbers: Iterable[int], error: RpcError) -> None:
        """No answer will come for these."""
        for number in numbers:
            sink = self.pop(number, None)
            if isinstance(sink, Incoming):
                sink.fail(Broken(error))
            elif sink is not None and sink.settle(Broken(error)):
                # This may be called by a task: another's step cannot be taken inside its own.
                sink.get_loop().call_soon(sink.wake)
