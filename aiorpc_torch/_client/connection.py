"""The calls of one event loop to one peer, over a connection of their own.

A driver: what leaves when is `SendState`'s to decide, who waits for what is `Pending`'s to know.
Payloads that do not travel on the connection go by torch RPC.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from .._aio.inline_future import Wait, wake_all
from .._protocol import endpoints
from .._protocol.ancestry import sent_by
from .._protocol.channel import Channel, describe
from .._protocol.columns import END
from .._protocol.connection_state import SendState
from .._protocol.frames import CALLS, CONTROL, MAX_FRAME, RESULTS, SLOT, ProtocolError, frame
from .._protocol.handshake import Party
from .._protocol.messages import (
    Outgoing,
    Short,
    Work,
    dump,
    dump_payload,
    lay_out,
    load_results,
    lone_frame,
    outgoing,
    shorten,
)
from .._protocol.payloads import EVERY, attach
from .._protocol.recording import Recorded, current
from .._protocol.targets import Broken, Method, Target, order_key
from .._protocol.targets import describe as target_name
from .._protocol.tensors import INLINE_BYTES, Table, size_of
from .._protocol.window import TRICKLE, Window
from .._torch import devices, rrefs
from .._torch.compat import WorkerInfo
from .._torch.rrefs import Ident
from .._torch.transport import in_autograd_context, send, transport_error, when_done
from ..errors import (
    CallTimeout,
    NotServing,
    RemoteError,
    RpcError,
    WorkerLost,
)
from .answers import error_of, is_inline, read_answer
from .introduction import Introductions
from .pending import Pending, Sink
from .stream_reader import Incoming, Item

log = logging.getLogger("aiorpc_torch")

REMEMBERED = 1024  # methods whose results were large, of one connection


class Observer(Protocol):
    """What is told of the peer of a connection."""

    def heard(self, peer: str) -> None:
        """Note a sign of life. In any thread."""
        ...

    def suspected(self, peer: str, number: int) -> None:
        """Note that a connection has ended without a last frame. In any thread."""
        ...

    def parted(self, peer: str, number: int, what: str, text: str) -> None:
        """Note the peer's last frame. In any thread."""
        ...


class Connection(Channel):
    """One-way: calls go out, results come back. Confined to the loop that it was made on.

    Args:
        me: this process.
        peer: whom it calls.
        link: number of this connection among those of this process.
        observer: is told of the peer.
        mapped: devices that tensors for the peer may be on, beside the CPU.
    """

    def __init__(
        self,
        me: Party,
        peer: WorkerInfo,
        link: int,
        observer: Observer,
        mapped: Collection[torch.device] = (),
    ) -> None:
        super().__init__()
        self.peer = peer
        self._me = me
        self._key = (me.name, me.number, link)
        self._observer = observer
        self._mapped = mapped
        self._calls = self._messages = self._bytes = 0
        self._pending = Pending()
        self._state: SendState[Outgoing] = SendState(self._pending, Window(), self._dropped)
        self._trickling: asyncio.TimerHandle | None = None
        self._large: set[Short] = set()  # targets whose results were large
        self._slot_keys: dict[int, Any] = {}  # of calls whose payload travels by torch
        self._wake: list[Wait] = []  # whom the current read has answered
        self._opening: asyncio.Task[None] | None = None
        self._recorded: set[Recorded] = set()  # those of autograd contexts that are not answered
        self._error: RpcError | None = None  # why it has ended
        self.is_over = False  # whether another connection has to be made for the next call

    def __repr__(self) -> str:
        return describe(self, f"to {self.peer.name}", f"{len(self._pending)} waiting", self._state)

    @property
    def waiting(self) -> int:
        """How many calls and streams wait for an answer."""
        return len(self._pending)

    def tally(self) -> dict[str, int]:
        """What it has done and is doing; the names are those of `Stats`."""
        return {
            "calls": self._calls,
            "in_flight": len(self._pending),
            "unsent": len(self._state),
            "messages": self._messages,
            "bytes_sent": self._bytes,
            "late": self._pending.late,
        }

    # ── what a call asks for ────────────────────────────────────────────────────────────────────

    def call(self, target: Target, work: Work, due: float | None) -> tuple[int, Wait]:
        """Send a call; its number, and what is to be awaited: its value, `Failure` or `Broken`."""
        wait = Wait(self._loop)
        is_plain = due is None and not work[1] and not self._pending
        if is_plain and self._state.may_send_alone() and self._send_alone(target, work[0], wait):
            return self._calls - 1, wait
        call = self._outgoing(target, False, work, due)
        self._submit(call, wait, target)
        return call.number, wait

    def _send_alone(self, target: Target, args: tuple[Any, ...], wait: Wait) -> bool:
        """Send a lone call at once, without the queue; return whether it could be done."""
        if type(target) is not Method or (ident := _ident(target)) is None:
            return False  # to pack what only torch finds is to fork its RRef: once, by who sends it
        number, short = self._calls, (ident, target.name)
        if short in self._large or sent_by(self._me.name) or current() is not None:
            return False
        data = lone_frame(number, short, args)
        if data is None or len(data) > INLINE_BYTES:
            return False
        self._calls += 1
        self._messages += 1
        self._bytes += len(data)
        self._state.window.sent(number, len(data))
        self._pending[number] = wait
        wait.target = short
        self.write(frame(CALLS, data))
        return True

    def stream(self, target: Target, work: Work, due: float | None) -> tuple[int, Incoming]:
        """Send a call whose items are awaited one by one; its number, and where they arrive."""
        call = self._outgoing(target, True, work, due)
        number = call.number  # and not the call, which has the arguments
        incoming = Incoming(lambda credit: self._grant(number, credit))
        self._submit(call, incoming, target)
        return number, incoming

    def cancel(self, number: int) -> None:
        """Nobody waits for that call any more."""
        waits = self._pending.pop(number, None) is not None
        if waits and self._state.cancel(number) and not self._loop.is_closed():
            self.flush_soon()

    def expire(self, number: int, seconds: float) -> None:
        """The time of that call is over."""
        if number in self._pending:
            late = CallTimeout(f"no answer from worker {self.peer.name!r} within {seconds:.3g} s")
            self._pending.fail((number,), late)
            if self._state.cancel(number):
                self.flush_soon()

    def _outgoing(self, target: Target, stream: bool, work: Work, due: float | None) -> Outgoing:
        short = shorten(target, _ident(target))
        call = outgoing(self._calls, short, stream, work, due, sent_by(self._me.name))
        if call.header[2] is None:  # packed as a whole
            devices.check(call.cells[0].devices(), self._mapped, self.peer.name)
        return call

    def _dropped(self, call: Outgoing) -> None:
        """Forget a call that was given up before it was sent."""
        self._slot_keys.pop(call.number, None)
        if call.recorded is not None:
            call.recorded.failed("was given up before it was sent")

    def _grant(self, number: int, credit: int) -> None:
        self._state.credits.append((number, credit))
        self.flush_soon()

    def _submit(self, call: Outgoing, sink: Sink, target: Target) -> None:
        self._calls += 1
        if (recording := current()) is not None:  # in a context of autograd
            name = target_name(target)
            recorded = recording.begin(name, self.peer.name, self._recorded)
            if recorded is not None:
                call = call._replace(by_torch=True, recorded=recorded)
        if self._large and call.header[0] in self._large:
            call = call._replace(by_torch=True)
        if call.by_torch:
            self._slot_keys[call.number] = _ident(target) or order_key(target)
        is_idle = not self._pending
        self._pending[call.number] = sink
        sink.target = call.header[0]
        if self._state.submit(call, is_idle=is_idle):
            self.flush()
        else:
            self.flush_soon()

    # ── what leaves ─────────────────────────────────────────────────────────────────────────────

    def opened(self, transport: asyncio.Transport) -> None:
        """Send what has waited for the connection."""
        self.start(transport)
        self._state.is_paused = False
        self.flush()

    def pause_writing(self) -> None:
        self._state.is_paused = True

    def resume_writing(self) -> None:
        self._state.is_paused = False
        self.flush_soon()

    def flush(self) -> None:
        if not self.is_open:
            return
        frames: list[bytes] = []
        payloads: list[Outgoing] = []
        if (controls := self._state.controls()) is not None:  # before calls that come after them
            frames.append(frame(CONTROL, dump(controls)))
        while calls := self._state.take():
            frames += self._frames(calls, payloads)
            if payloads or len(frames) > 1:  # the socket may be full
                self._write(frames)
                frames = []
                while payloads:
                    self._send_payload(payloads.pop())
        self._write(frames)
        if len(self._state) and self._trickling is None and not self._state.is_paused:
            answers = self._state.window.answers
            self._trickling = self._loop.call_later(TRICKLE, self._trickle, answers)

    def _write(self, frames: list[bytes]) -> None:
        if frames:
            data = frames[0] if len(frames) == 1 else b"".join(frames)
            self._bytes += len(data)
            self.write(data)

    def _trickle(self, answers: int) -> None:
        self._trickling = None
        is_stuck = answers == self._state.window.answers and not self._state.is_paused
        if is_stuck and self.is_open:
            payloads: list[Outgoing] = []
            self._write(self._frames(self._state.force(), payloads))
            for call in payloads:
                self._send_payload(call)
        self.flush_soon()

    def _frames(self, calls: Sequence[Outgoing], payloads: list[Outgoing]) -> list[bytes]:
        """Return calls as a frame; those that go by torch are added to `payloads`."""
        if not calls:
            return []
        if calls[0].by_torch:
            self._messages += 1
            payloads.append(calls[0])
            number = calls[0].number
            return [frame(SLOT, dump((number, self._slot_keys.pop(number, EVERY))))]
        try:
            data = dump(tuple(lay_out(calls, time.monotonic(), Table())))
        except Exception as exc:  # no memory, say: nothing was sent
            self._fail([call.number for call in calls], RpcError(f"the call cannot be sent: {exc}"))
            return []
        if len(data) <= MAX_FRAME:
            self._messages += 1
            return [frame(CALLS, data)]
        if len(calls) == 1:
            return self._frames([calls[0]._replace(by_torch=True)], payloads)
        return [each for call in calls for each in self._frames([call], payloads)]

    def _send_payload(self, call: Outgoing) -> None:
        """Send what a slot stands for."""
        number, recorded = call.number, call.recorded
        context = -1 if recorded is None else recorded.context
        try:
            table = Table()
            calls = lay_out((call,), time.monotonic(), table)
            data, tensors = attach(dump_payload(self._key, context, calls), table)
            self._bytes += len(data) + sum(map(size_of, tensors))
            if recorded is None:
                answer = send(self.peer, endpoints.payload, data, tensors)
            else:
                with torch.enable_grad(), in_autograd_context(context):
                    sent = recorded.leave(tensors)
                    answer = send(self.peer, endpoints.payload, data, sent)
        except Exception as exc:  # nothing was sent: the slot is withdrawn
            self._payload_failed(number, transport_error(exc, self.peer.name), recorded)
            return
        first = None if recorded is None else recorded.done
        when_done(answer, lambda done: self._answered(number, done, recorded), first)

    def _payload_failed(self, number: int, error: RpcError, recorded: Recorded | None) -> None:
        if recorded is not None:
            recorded.failed(error)
        if self._state.cancel(number):
            self.flush_soon()
        self._fail([number], error)
        if isinstance(error, WorkerLost):
            self._observer.suspected(self.peer.name, self.peer.id)

    def _fail(self, numbers: Sequence[int], error: RpcError) -> None:
        self._state.window.answered(numbers)
        self._pending.fail(numbers, error)

    # ── what comes back ─────────────────────────────────────────────────────────────────────────

    def on_frame(self, kind: int, data: bytes) -> int:
        if kind != RESULTS:
            raise ProtocolError(f"a callee sends no frame of kind {kind}")
        outcomes = load_results(data)
        self._state.window.answered(self._pending.settle(outcomes, self._wake, self._collect))
        return len(outcomes)

    def on_read(self) -> None:
        self._observer.heard(self.peer.name)
        self._woken()

    def _woken(self) -> None:
        """Wake those who were answered; what they call is sent together."""
        wake, self._wake = self._wake, []
        self._state.woken = len(wake)
        if len(self._state):
            self.flush()
        if len(wake) == 1:
            wake[0].wake()
        else:
            wake_all(wake, self._loop)

    def _collect(self, key: Any, sink: Sink, item: Item | None) -> None:
        """Ask for a result that the callee holds."""
        if item is None and len(self._large) < REMEMBERED:
            self._large.add(sink.target)
        self._messages += 1
        try:
            answer = send(self.peer, endpoints.collect, dump((self._key, key)))
        except Exception as exc:
            self._collected(key, sink, item, transport_error(exc, self.peer.name))
        else:
            when_done(
                answer,
                lambda done: self._collected(key, sink, item, read_answer(done, self.peer.name)),
            )

    def _collected(
        self, key: Any, sink: Sink, item: Item | None, answer: list[Any] | RpcError
    ) -> None:
        if isinstance(answer, RpcError):
            outcomes: list[Any] = [(key, Broken(answer))]
        else:
            gone = Broken(RemoteError("the result is no longer held"))
            outcomes = [each for each in answer if each[0] == key][:1] or [(key, gone)]
        if item is not None and isinstance(sink, Incoming):
            sink.fill(item, outcomes[0][1])
        elif self._pending.get(key) is sink:  # else it was cancelled meanwhile
            self._settle(outcomes)

    def _answered(self, number: int, answer: Any, recorded: Recorded | None) -> None:
        """Take the answer to a payload."""
        outcomes = read_answer(answer, self.peer.name, recorded=recorded is not None)
        if isinstance(outcomes, RpcError):
            self._payload_failed(number, outcomes, None)
            return
        ours = [each for each in outcomes if each[0] == number]
        if not ours and number in self._pending:
            error = RemoteError(f"worker {self.peer.name!r} has taken a call and does not answer")
            self._payload_failed(number, error, None)
            return
        # The end of a stream is behind its items, on the connection.
        ours = [each for each in ours if each[1] is not END]
        sink = self._pending.get(number)
        if self._large and sink is not None and is_inline(answer.wait()):
            self._large.discard(sink.target)
        self._state.window.answered((number,))  # also if its caller has given it up
        self._settle(ours)

    def _settle(self, outcomes: Sequence[Any]) -> None:
        self._observer.heard(self.peer.name)
        self._state.window.answered(self._pending.settle(outcomes, self._wake, self._collect))
        self._woken()

    # ── its beginning and its end ───────────────────────────────────────────────────────────────

    def open(self, introductions: Introductions) -> None:
        """Begin to connect."""
        opening = self._open(introductions)
        context = contextvars.Context()  # in nobody's deadline
        self._opening = self._loop.create_task(opening, name="aiorpc-connect", context=context)
        self._opening.add_done_callback(self._not_opened)

    async def _open(self, introductions: Introductions) -> None:
        transport = await introductions.connect(self.peer, self._key[2])
        if self._error is None:
            self.opened(transport)
        else:
            transport.abort()

    def _not_opened(self, opening: "asyncio.Task[None]") -> None:
        """Note what came of connecting, if it failed."""
        if self.is_open:
            return
        exc = None if opening.cancelled() else opening.exception()
        if isinstance(exc, RpcError):
            self._over(exc)
        else:
            self._over(RpcError(f"no connection to worker {self.peer.name!r}: {exc!r}"))
        self.ended.set()
        if isinstance(exc, WorkerLost):
            self._observer.suspected(self.peer.name, self.peer.id)

    def leave(self, what: str, text: str, error: RpcError) -> None:
        """Close the connection: whoever still waits learns `error`, the peer `what` and `text`."""
        self._give_up(error)
        if what != "ended":  # torch still answers calls in autograd contexts, whatever loop ends
            self._fail_recorded(error)
        self._error = self._error or error
        self.is_over = True
        if self._transport is not None:
            self.close(what, text)
        elif self._opening is not None:
            self._opening.cancel()

    def lost(self, error: RpcError) -> None:
        """The peer gives no sign of life. Should it come back, what it ran for us is cancelled."""
        self._give_up(error)
        self._fail_recorded(error)

    def _give_up(self, error: RpcError) -> None:
        self._state.cancels += self._state.clear()
        self._pending.fail([*self._pending], error)
        self.flush_soon()

    def _fail_recorded(self, error: RpcError) -> None:
        for recorded in [*self._recorded]:
            recorded.failed(error)

    def _over(self, error: RpcError) -> None:
        if self._error is None:
            self._error = error
            self.is_over = True
            self.lost(error)
            if self._trickling is not None:
                self._trickling.cancel()

    def on_close(self, what: str, text: str) -> None:
        self._observer.parted(self.peer.name, self.peer.id, what, text)
        self._over(error_of(self.peer.name, what, text))

    def on_broken(self, exc: Exception) -> None:
        error = f"what worker {self.peer.name!r} sent, perhaps this result, cannot be read: {exc!r}"
        self._over(RemoteError(error))

    def on_end(self, error: Exception | None) -> None:
        if error is not None and self._error is None:
            self._observer.suspected(self.peer.name, self.peer.id)
            self._over(WorkerLost(self.peer.name, f"its connection has ended: {error}"))
        self._over(NotServing(f"the connection to worker {self.peer.name!r} was closed"))


def _ident(target: Target) -> Ident | None:
    """Return by what the peer finds the object of a call, None if only torch does."""
    on = target.on
    return on if on is None or isinstance(on, tuple) else rrefs.ident(on)
