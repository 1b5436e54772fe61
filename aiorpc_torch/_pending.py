"""Who waits for what on one link: calls' futures and streams' incoming ends, by number.

Each is settled once, with whatever comes first; what comes for nobody is counted. Confined to the
loop of its link.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch._C import Future

from ._bridge import transport_error
from ._exceptions import Failure
from ._incoming import Incoming
from ._message import Key, load_results
from ._recording import plain_answer
from ._wait import Wait
from ._wire import Broken
from .errors import RemoteError, RpcError

log = logging.getLogger("aiorpc_torch")

Sink = Wait | Incoming
"""Where an outcome goes."""


Heard = asyncio.Future[None] | None
"""Told when a message has arrived, or has not."""


def tell(heard: Heard, error: RpcError | None) -> None:
    """It has; or what came of it."""
    if heard is not None and not heard.done():
        heard.set_result(None) if error is None else heard.set_exception(error)


class Unreadable(RemoteError):
    """An answer that makes no sense: it may have been any call's."""


_NO_STREAM = Broken(RemoteError("a value came in place of the items of a stream"))


class Pending(dict[int, Sink]):
    """The waiting of one link. `late`: how many answers came for nobody."""

    late = 0

    def take(
        self,
        answer: "Future[Any]",
        peer: str,
        wake: list[Wait],
        recorded: bool = False,
    ) -> tuple[list[int], Sequence[int]]:
        """Deliver what the answer to a message brings, as `settle` does.

        Returns the numbers of calls that have ended, and of objects that the peer knows.

        Raises:
            Unreadable: if it makes no sense; what could be read of it is delivered.
            RpcError: if the message itself has failed.
        """
        try:
            results = answer.wait()
            if isinstance(results, Failure):  # nobody serves there, or it was not taken in
                results.get()
        except RpcError:
            raise
        except BaseException as exc:  # of whatever class the peer names: SystemExit is not ours
            raise transport_error(exc, peer) from None
        try:
            if recorded:
                results = plain_answer(results)
            outcomes, learned = load_results(results)
            if {*map(type, learned)} - {int}:
                raise TypeError("objects are known by numbers")
            return self.settle(outcomes, wake), learned
        except BaseException as exc:
            error = f"an answer of worker {peer!r}, perhaps to this call, cannot be read: {exc!r}"
            log.warning("%s", error)
            raise Unreadable(error) from None

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
            if type(key) is not int:
                raise TypeError(f"{key!r} is no call's number")
            ended.append(key)
            sink = self.pop(key, None)
            if sink is None:
                self.late += 1
            elif type(sink) is Wait:
                if sink.settle(value):
                    wake.append(sink)
            elif isinstance(sink, Incoming):  # its message made no sense there: no stream was begun
                sink.fail(value if type(value) is Failure else _NO_STREAM)
        return ended

    def _deliver(self, key: tuple[int, int, int], value: Any) -> bool:
        number, index, price = key
        if not (type(number) is type(index) is type(price) is int):
            raise TypeError(f"{key!r} is no item's number")
        sink = self.get(number)
        if type(sink) is not Incoming:
            if sink is not None:
                raise TypeError(f"an item of a stream for call {number}, which is none")
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
