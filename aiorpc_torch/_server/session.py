"""One connection of a caller, as the callee sees it: calls in, results out.

It knows which calls run, which wait for a payload, and which results are held until their caller
collects them. Where a call runs, it does not know.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._protocol.channel import Channel, describe
from .._protocol.columns import FAILED, HELD, bulk, loose
from .._protocol.connection_state import ReplyState
from .._protocol.exceptions import Failure
from .._protocol.frames import CALLS, CONTROL, MAX_FRAME, RESULTS, SLOT, ProtocolError, frame
from .._protocol.handshake import Party
from .._protocol.messages import Calls, Result, dump_results, load_calls
from .._protocol.payloads import Slots, attach
from .._protocol.targets import plain
from .._protocol.tensors import INLINE_BYTES
from .._torch import devices

log = logging.getLogger("aiorpc_torch")

Key = tuple[str, int, int]
"""Of a session: the caller's name and process number, and the number of its link."""


class Payload(NamedTuple):
    """A call that came by torch RPC, and what answers it."""

    calls: Calls
    tensors: Sequence[Tensor]
    reply: Any
    context: int
    fence: Any


class Handler(Protocol):
    """What a session hands calls to."""

    def begin(self, session: "Session", calls: Calls) -> None:
        """Start the calls of a frame."""
        ...

    def begin_payload(self, session: "Session", payload: Payload) -> None:
        """Start a call whose payload is there."""
        ...

    def begin_job(self, job: Any) -> None:
        """Start a call that was held back."""
        ...

    def cancel(self, job: Any) -> None:
        """Cancel a call that runs, or that waits."""
        ...

    def heard(self, caller: str) -> None:
        """Note a sign of life."""
        ...

    def ended(self, session: "Session", what: str, text: str) -> None:
        """Note that the connection has ended: "lost" without a last frame."""
        ...


class Session(Channel):
    """Calls of one link of the worker `caller`. Results may come from any thread."""

    HIGH_WATER = 8 << 20  # bytes of results unsent at which no more calls are read

    def __init__(
        self,
        handler: Handler,
        caller: Party,
        link: int,
        on_loop: Callable[[Callable[[], None]], None],
        mapped: Collection[torch.device] = (),
    ) -> None:
        super().__init__()
        self.caller = caller.name
        self.key: Key = (caller.name, caller.number, link)
        self.jobs: dict[int, Any] = {}
        self.slots: Slots[Any] = Slots()
        self.served = 0
        self._handler = handler
        self._on_loop = on_loop
        self._mapped = mapped
        self._replies = ReplyState()
        self._held: dict[Any, tuple[Result, int]] = {}  # with the bytes of each

    def __repr__(self) -> str:
        return describe(self, f"from {self.caller}", f"{len(self.jobs)} running", self._replies)

    @property
    def held_bytes(self) -> int:
        """Bytes of the results that are held. In any thread."""
        return sum(size for _, size in [*self._held.values()])

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def on_frame(self, kind: int, data: bytes) -> int:
        if kind == CALLS:
            calls = load_calls(data)
            self._handler.begin(self, calls)
            return len(calls.numbers)
        if kind == CONTROL:
            return self._control(*plain(data))
        if kind == SLOT:
            number, key = plain(data)
            hash(key)  # before a payload that came early is taken out
            self._begin(self.slots.open(number, key))
            return 1
        raise ProtocolError(f"a caller sends no frame of kind {kind}")

    def on_read(self) -> None:
        self._handler.heard(self.caller)

    def admit(self, job: Any) -> bool:
        """Return whether a call may start; else it does so after a payload that is on its way."""
        return not self.slots or self.slots.admit(job.key, job)

    def payload(self, number: int, payload: Payload) -> None:
        """Take a payload that has come by torch RPC."""
        if self.ended.is_set():
            _answer(payload.reply, ())
            return
        ready = self.slots.fill(number, payload)
        if ready is None:  # its caller has given it up
            _answer(payload.reply, ())
        else:
            self._begin(ready)

    def _begin(self, items: Iterable[Any]) -> None:
        """Start calls that were held back."""
        for item in items:
            if isinstance(item, Payload):
                self._handler.begin_payload(self, item)
            else:
                self._handler.begin_job(item)

    def _control(self, cancels: Sequence[int], grants: Sequence[tuple[int, int]]) -> int:
        for number in cancels:
            self._begin(self.slots.drop(number))
            if (held := self.slots.take(number)) is not None:  # behind another payload
                _answer(held.reply, ())
            self._release_all(number)
            if (job := self.jobs.get(number)) is not None:
                self._handler.cancel(job)
        for number, credit in grants:
            job = self.jobs.get(number)
            if job is not None and type(credit) is int:
                job.grant(credit)
        return len(cancels) + len(grants)

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    def done(self, result: Result, reply: Any = None) -> None:
        """Send the result of a call that has ended, by torch if `reply` is given. In any thread."""
        if reply is not None:
            _answer(reply, (result,))
        elif asyncio._get_running_loop() is self._loop:
            self._send(result)
        else:
            self._on_loop(functools.partial(self._send, result))

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise for a tensor that torch would not send back: it would fail its whole message."""
        devices.check({tensor.device for tensor in tensors}, self._mapped, self.caller)

    def _send(self, result: Result) -> None:
        if self.ended.is_set() or self._is_closing:
            return
        kind, content = result[1:]
        size = bulk(kind, content)
        if size > INLINE_BYTES or (type(kind) is str and loose(kind, content)):
            result, size = self._hold(result, size), 0
        if self._replies.add(result, size, is_last=not self.jobs):
            self.flush()
        else:
            self.flush_soon()

    def _hold(self, result: Result, size: int) -> Result:
        """Keep a result until it is collected; return what is sent in its place."""
        self._held[result[0]] = result, size
        return result[0], HELD, size

    def _release_all(self, number: int) -> None:
        """Release what is held for a call, or for the items of a stream."""
        for key in [*self._held]:
            if number == (key[0] if isinstance(key, tuple) else key):
                self._held.pop(key, None)

    def collect(self, key: Any, reply: Any) -> None:
        """Answer with a result that was held; with nothing, if nobody waits for it any more."""
        result, _ = self._held.pop(key, (None, 0))
        _answer(reply, () if result is None else (result,))

    def flush(self) -> None:
        if not self.is_open:
            return
        frames = []
        for results in self._replies.batches():
            frames += self._frames(results)
        if frames:
            self.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _frames(self, results: Sequence[Result]) -> list[bytes]:
        """Return the results as frames: one, unless they cannot be packed together."""
        try:
            data, _ = dump_results(results)
        except Exception as exc:  # no memory, say; callers would wait for ever
            log.warning("results for %s cannot be packed: %r", self.caller, exc)
            if len(results) == 1:
                key, kind, _ = results[0]
                failed = key, FAILED, Failure.of(exc, "the callee")
                return [] if kind == FAILED else self._frames([failed])
            data = b""
        if data and len(data) <= MAX_FRAME:
            return [frame(RESULTS, data)]
        if len(results) == 1:
            return self._frames([self._hold(results[0], len(data))])
        return [each for result in results for each in self._frames([result])]

    # ── its end ─────────────────────────────────────────────────────────────────────────────────

    def pause_writing(self) -> None:
        self.pause_reading("full")

    def resume_writing(self) -> None:
        self.resume_reading("full")

    def on_close(self, what: str, text: str) -> None:
        self._handler.ended(self, what, text)

    def on_end(self, error: Exception | None) -> None:
        self._held.clear()
        if not self._heard_close:
            self._handler.ended(self, "lost" if error is not None else "ended", "")
        for item in self.slots.close():
            if isinstance(item, Payload):
                _answer(item.reply, ())


def _answer(reply: Any, results: Sequence[Result]) -> None:
    """Answer a message of torch's. In any thread."""
    try:
        data, tensors = dump_results(results)
        answer: Any = attach(data, tensors) if tensors or results else data
    except Exception as exc:  # no memory, say; its sender would wait for ever
        log.warning("a result cannot be packed: %r", exc)
        answer = b""
    try:
        reply.set_result(answer)
    except Exception as exc:  # torch has stopped: nobody is there to be answered
        log.debug("no answer: %s", exc)
