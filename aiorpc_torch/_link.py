"""The calls of one event loop to one peer, sent together.

What one turn of the loop calls leaves as one message at its end; a call that finds the link idle
leaves at once. The answer to a message carries back what is done by then. While anything is awaited
a message is outstanding: if no other is, one without calls. Its failure tells of a lost peer.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from torch._C import Future
from torch._C._distributed_rpc import PyRRef, WorkerInfo
from torch.distributed import rpc

from . import _doors
from ._bridge import transport_error, when_done
from ._exceptions import Failure
from ._handles import Handles
from ._wire import (
    Broken,
    Call,
    Cancel,
    Goodbye,
    Item,
    Message,
    Method,
    Outcome,
    Packed,
    Target,
    TypedMethod,
)
from .errors import NotServing, RpcError, WorkerLost

Heard = asyncio.Future[None] | None  # told when a message has arrived

SLICE = 256  # calls in a message at most: the callee starts while the caller still packs
LARGE = 64 * 1024  # bytes of tensors from which a call goes alone: nobody waits for its transfer


class Link:
    """One-way: calls go out, outcomes come back. Confined to the loop that it was made on."""

    def __init__(self, caller: str, number: int, peer: WorkerInfo) -> None:
        self._caller = caller
        self._number = number
        self._peer = peer
        self._ids = itertools.count()
        self._seq = 0
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._outgoing: list[Item] = []
        self._outstanding = 0  # messages that are not answered
        self._handles = Handles()

    def __repr__(self) -> str:
        return (
            f"<Link to {self._peer.name}: {len(self._waiting)} waiting, "
            f"{self._outstanding} messages outstanding>"
        )

    def call(self, work: Packed, budget: float | None) -> "tuple[int, asyncio.Future[Outcome]]":
        """Send a call; its number, and a future of its outcome."""
        number = next(self._ids)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        large = work.size > LARGE
        if large:
            self._flush()  # what came before it, so that nobody waits for its transfer
        at_once = large or (not self._waiting and not self._outgoing)
        self._waiting[number] = future
        self._put(Call(number, work, budget))
        if at_once or len(self._outgoing) >= SLICE:
            self._flush()
        return number, future

    def shorten(self, target: Target) -> Target:
        """The same target, with a number for an RRef that the peer knows."""
        if isinstance(target, Method | TypedMethod) and isinstance(target.on, PyRRef):
            return target._replace(on=self._handles.name(target.on))
        return target

    def cancel(self, number: int) -> None:
        """Nobody waits for that call any more."""
        if self._waiting.pop(number, None) is not None:
            self._put(Cancel(number))

    async def goodbye(self, *, alone: bool) -> None:
        """Tell the peer that this process leaves; return when it knows."""
        self._flush()
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._send((Goodbye(alone),), heard)
        await heard

    def close(self) -> None:
        """This process leaves: whoever still waits learns it."""
        error = NotServing(f"this worker left its world before {self._peer.name!r} answered")
        self._outgoing.clear()
        for number in list(self._waiting):
            self._settle(number, Broken(error))

    def _put(self, item: Item) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(item)

    def _flush(self) -> None:
        if self._outgoing:
            items, self._outgoing = self._outgoing, []
            self._send(items)

    def _send(self, items: Sequence[Item], heard: Heard = None) -> None:
        message = Message(self._caller, self._number, self._seq, tuple(items))
        try:
            answer = rpc.rpc_async(self._peer, _doors.answer, args=(message,), timeout=0)
        except Exception as exc:  # nothing was sent, so the number is still free
            self._failed(items, exc, heard)
            return
        self._seq += 1
        self._outstanding += 1
        when_done(answer, lambda done: self._answered(items, done, heard))

    def _answered(self, items: Sequence[Item], answer: "Future[Any]", heard: Heard) -> None:
        self._outstanding -= 1
        try:
            answers = answer.wait()
            if isinstance(answers, Failure):  # nobody serves there
                answers.get()
        except Exception as exc:
            self._failed(items, exc, heard)
        else:
            self._take(answers, heard)
        if self._waiting and not self._outstanding and not self._outgoing:
            self._send(())

    def _take(self, answers: list[tuple[int, Outcome, int | None]], heard: Heard) -> None:
        for number, outcome, learned in answers:
            self._settle(number, outcome)
            if learned is not None:
                self._handles.learned(learned)
        if heard is not None and not heard.done():
            heard.set_result(None)

    def _settle(self, number: int, outcome: Outcome) -> None:
        future = self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _failed(self, items: Sequence[Item], exc: Exception, heard: Heard) -> None:
        error = exc if isinstance(exc, RpcError) else transport_error(exc, self._peer.name)
        # A lost peer answers nothing any more; otherwise the other messages go their way.
        lost = isinstance(error, WorkerLost | NotServing)
        calls = [item.number for item in items if isinstance(item, Call)]
        for number in list(self._waiting) if lost else calls:
            self._settle(number, Broken(error))
        if heard is not None and not heard.done():
            heard.set_exception(error)
