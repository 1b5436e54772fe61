"""One link of one caller, as the callee sees it: order of arrival, answers, objects, running jobs.

It brings together what the ground floor keeps apart and hands results out; what runs, and where, it
does not know.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from . import _devices
from ._desk import Carrier, Desk
from ._handles import Objects
from ._lane import Lane
from ._message import Message, Result, dump_results

log = logging.getLogger("aiorpc_torch")

Answer = Carrier[Result]


class Repeated(ValueError):
    """A message without calls whose number has come: its sender thought that it had not."""


class Line:
    """From worker `caller`. `soon` runs a function on the loop, after this turn."""

    def __init__(
        self,
        caller: str,
        soon: Callable[[Callable[[], None]], None],
        mapped: Collection[torch.device],
    ) -> None:
        self.caller = caller
        self.lock = threading.Lock()
        self.lane: Lane[Any] = Lane()
        self.objects = Objects()
        self.jobs: dict[int, Any] = {}
        self.served = 0
        self.on_loop = 0  # messages on their way to the loop
        self._desk: Desk[Result] = Desk(self._answer)
        self._soon = soon
        self._mapped = mapped
        self._flushing = False
        self._learned: list[int] = []

    def __repr__(self) -> str:
        return f"<Line from {self.caller}: {len(self.jobs)} running, {self._desk}>"

    def expect(self, message: Message) -> None:
        """Raise ValueError for a message that cannot be the line's. Nothing changes here."""
        if not self.lane.expects(message.seq):
            kind = ValueError if message.numbers or message.controls() else Repeated
            raise kind(f"message {message.seq} has come already, or cannot be: {self.lane}")
        if not self.jobs.keys().isdisjoint(message.numbers):
            raise ValueError("it has a call whose number is a running one's")

    def admit(self, reply: "Future[Any]", calls: int, *, poll: bool, own: bool) -> Answer:
        """A message with so many calls came in."""
        carrier = self._desk.admit(reply, calls, poll=poll, own=own)
        if self._desk.has_orphans:  # and its calls may wait for those who wait for them
            self._flush_soon()
        return carrier

    def done(self, carrier: Answer, result: Result) -> None:
        """A call of that message has ended. In any thread."""
        if self._desk.done(carrier, result):
            self._flush_soon()

    def more(self, result: Result) -> None:
        """A stream has an item. In any thread."""
        self._desk.more(result)
        self._flush_soon()

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise for a tensor that torch would not send back: it would fail its whole message."""
        _devices.check({tensor.device for tensor in tensors}, self._mapped, self.caller)

    def learn(self, target: Any) -> Any:
        """The object that a target names, whose number is told to the caller if it is new.

        Raises what finding it raises.
        """
        if target.on is None:
            return None
        found = self.objects.find(target.on)
        if (number := self.objects.learn(target.on, found)) is not None:
            self._learned.append(number)
        return found

    def release(self) -> None:
        """Answer every message now: its sender leaves, or this process does."""
        self._desk.release()

    def _flush_soon(self) -> None:
        # At the end of this turn of the loop: with all that the turn brings.
        if not self._flushing:
            self._flushing = True
            self._soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._desk.flush()

    def _answer(self, reply: "Future[Any]", results: list[Result]) -> None:
        # Two threads may answer at once: at worst a number is told twice, or with the next use.
        learned = self._learned[:]
        del self._learned[: len(learned)]
        try:
            answer = dump_results(results, learned)
        except Exception as exc:  # no memory, say; its sender would wait for ever
            log.warning("an answer to %s cannot be packed: %r", self.caller, exc)
            answer = b""
        try:
            reply.set_result(answer)
        except Exception as exc:  # torch has stopped: nobody is there to be answered
            log.debug("no answer to %s: %s", self.caller, exc)
