"""Attachments: the workers of torch's world that serve, as torch messages tell.

Each worker tells all others when it attaches and when it leaves, and learns from the answers what
they had told before. Each message has the sender's epoch, so a late message changes nothing.
"""

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

from .._aio.loops import run_on_loop
from .._client.pool import AGENT_ENDED
from .._peers.peers import Peers
from .._protocol import endpoints
from .._protocol.endpoints import attach_message_of, read_attach_message
from .._torch.agent import agent_generation
from .._torch.compat import WorkerInfo
from .._torch.transport import classify_error, send, wrap_future
from .._wire.handshake import VERSION
from ..errors import NotInWorld, RpcError, WorkerLeft, WorkerLost, WorkerUnreachable, safe_str

log = logging.getLogger("aiorpc_torch")


@dataclass(eq=False)
class PeerState:
    """The last that is known of one peer. Any thread may read it, and wait for a change."""

    epoch: int = 0
    """How many times the peer has attached."""
    is_attached: bool = False
    is_known: bool = False
    """Whether the peer has answered."""
    refusal: Callable[[], RpcError] | None = None
    """Makes the error for calls to a peer that cannot attach."""
    is_over: bool = False
    """Whether the peer has left torch's group."""
    changed: "Future[None]" = field(default_factory=Future)
    """Completes at the next change."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def has_left(self) -> bool:
        """True if the peer was attached and is not now, or cannot attach."""
        return self.refusal is not None or (self.epoch > 0 and not self.is_attached)

    def record(self, epoch: int, is_attached: bool) -> bool:
        """Record what the peer has told, and return whether that is new."""
        with self._lock:
            if self.is_over:
                return False
            is_new = (epoch, not is_attached) > (self.epoch, not self.is_attached)
            if is_new:
                self.epoch, self.is_attached = epoch, is_attached
            if is_new or not self.is_known or self.refusal is not None:
                self._change(None)
            return is_new

    def refuse(self, refusal: Callable[[], RpcError]) -> None:
        """Record that calls to the peer fail."""
        with self._lock:
            if not self.is_over:
                self._change(refusal)

    def dismiss(self, refusal: Callable[[], RpcError]) -> None:
        """Record that the peer has left torch's group: nothing that it has told counts any more."""
        with self._lock:
            self.is_over, self.is_attached = True, False
            self._change(refusal)

    def _change(self, refusal: Callable[[], RpcError] | None) -> None:
        self.is_known, self.refusal = True, refusal
        changed, self.changed = self.changed, Future()
        changed.set_result(None)


class Attachments:
    """The attachments of one process's peers, and its own. `Holding` for its calls.

    Args:
        members: the workers of torch's world.
        timeout: seconds for which a call to a peer that is not attached is held.
        on_attached: is called with each peer that attaches, and its device map for this process.
        on_detached: is called with each peer that leaves. Both are called on the loop.
    """

    def __init__(
        self,
        members: Peers,
        timeout: float,
        on_attached: Callable[[str, Mapping[str, str]], None],
        on_detached: Callable[[str], None],
    ) -> None:
        self.timeout = timeout
        self.epoch = 0
        self._members = members
        self._on_attached = on_attached
        self._on_detached = on_detached
        self._is_attached = True
        self._is_closed = False
        self._generation = agent_generation()
        self._loop = asyncio.get_running_loop()
        self._states = {name: PeerState() for name in members.peers}
        self._asking: set[asyncio.Task[None]] = set()

    def admit(self, peer: str) -> None:
        """Add a worker of torch's group: nothing is known of it yet."""
        if peer != self._members.name:
            self._states[peer] = PeerState()

    def welcome(self, peer: str) -> None:
        """Add a worker that has entered torch's group, and ask whether it has this package."""
        self.admit(peer)
        task = self._loop.create_task(self._ask(peer), name="aiorpc-attach")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def dismiss(self, peer: str) -> None:
        """Note that a peer has left torch's group: calls to it raise WorkerLeft."""
        self._states[peer].dismiss(functools.partial(WorkerLeft, peer, LEFT_GROUP))

    def forget(self, peer: str) -> None:
        """Forget a peer that has left torch's group."""
        self._states.pop(peer, None)

    def has(self, peer: str) -> bool:
        """Return whether a peer is in torch's group. In any thread."""
        state = self._states.get(peer)
        return state is not None and not state.is_over

    def left(self) -> dict[str, str]:
        """Return the peers that have left or cannot attach, as leave messages."""
        return {peer: "" for peer, state in [*self._states.items()] if state.has_left}

    def has_answered(self, peer: str) -> bool:
        """Return whether a peer has the package and has answered."""
        state = self._states.get(peer)
        return state is not None and state.is_known and state.refusal is None

    def has_agent(self) -> bool:
        """Return whether torch's RPC, as it was when this process attached, still runs."""
        return agent_generation() == self._generation

    # ── holding calls, on any event loop ────────────────────────────────────────────────────────

    def is_held(self, peer: str) -> bool:
        """Return whether calls to a peer are held."""
        state = self._states.get(peer)
        return state is not None and not state.is_attached

    async def wait_until_serving(self, peer: WorkerInfo) -> int:
        """Wait until a peer is attached; return how many times it has attached.

        Raises:
            WorkerUnreachable: if it does not have this package.
            NotInWorld: if torch's RPC has ended here.
            WorkerLost: if torch does not reach it.
        """
        state = self._states.get(peer.name)  # None for this process itself
        if state is not None and isinstance(_error_of(state), WorkerLost):
            await self._ask(peer.name)  # it may be reachable again
        while self.has_agent() and state is not None and not state.is_attached:
            changed = state.changed
            if (error := _error_of(state)) is not None:
                raise error
            if not state.is_attached:
                await wrap_future(changed)
        if not self.has_agent():
            raise NotInWorld(AGENT_ENDED)
        return 0 if state is None else state.epoch

    def on_refused(self, peer: str, epoch: int) -> None:
        """Note that a peer has refused a connection in its `epoch`: it leaves."""
        if peer not in self._states:
            raise NotInWorld("this process leaves attach()")
        self._record_detached(peer, epoch)

    def _record_detached(self, peer: str, epoch: int) -> None:
        if self._states[peer].record(epoch, False):
            run_on_loop(self._loop, self._on_detached, peer)

    def wake(self) -> None:
        """Let held calls look again: torch's RPC has ended."""
        for state in self._states.values():
            state.refuse(functools.partial(NotInWorld, AGENT_ENDED))

    # ── messages ────────────────────────────────────────────────────────────────────────────────

    async def tell(self, is_attached: bool) -> None:
        """Tell all peers that this process is attached or leaves; wait for their answers."""
        self._is_attached = is_attached
        peers = [
            peer
            for peer, state in self._states.items()
            if is_attached or (state.is_known and state.refusal is None)
        ]
        await asyncio.gather(*map(self._ask, peers))

    async def _ask(self, peer: str) -> None:
        """Tell one peer of this process, and record its answer."""
        try:
            info, message = self._members.peers[peer].member.info, self._message(peer)
            answer = await wrap_future(send(info, endpoints.attach_message, message))
            self._record(peer, read_attach_message(answer))
        except Exception as exc:
            if (state := self._states.get(peer)) is not None:
                state.refuse(_refusal(peer, exc))

    def _message(self, peer: str) -> bytes:
        me = self._members.me
        maps = self._members.workers[me.name].member.device_maps.get(peer, {})
        return attach_message_of(me, self.epoch, self._is_attached, maps)

    def _record(self, peer: str, message: Sequence[Any]) -> None:
        version, *rest = message
        state = self._states[peer]
        if version != VERSION:
            reason = (
                f"it speaks {bytes(version).decode()}, and this process {VERSION.decode()}: "
                "install one version of aiorpc_torch in both"
            )
            state.refuse(functools.partial(WorkerUnreachable, peer, reason))
            return
        _, epoch, is_attached, maps = rest
        if not is_attached:
            self._record_detached(peer, int(epoch))
        elif state.record(int(epoch), True):
            self._on_attached(peer, maps)

    def on_message(self, data: bytes) -> "Future[Any] | None":
        """Handle the message of a peer, on a thread of torch's; return None from `close` on."""
        if self._is_closed:
            return None
        answer: Future[Any] = Future()
        try:
            self._loop.call_soon_threadsafe(self._on_message, data, answer)
        except RuntimeError:  # the loop is closed
            answer.set_result(self._message(""))
        return answer

    def _on_message(self, data: bytes, answer: "Future[Any]") -> None:
        peer = ""
        try:
            message = read_attach_message(data)
            if (peer := message[1]) in self._states:
                self._record(peer, message)
        except Exception as exc:
            log.warning("%s rejected an unreadable attach message: %r", self._members.name, exc)
        with contextlib.suppress(RuntimeError):  # torch has stopped
            answer.set_result(self._message(peer))

    def open(self) -> None:
        """Begin the next epoch: from now on this process answers as attached.

        Were it begun before, an answer that this process is not attached would end it.
        """
        self.epoch = endpoints.next_epoch()

    def close(self) -> None:
        """Answer no further messages: this process has left."""
        self._is_closed = True
        for task in self._asking:
            task.cancel()

    def on_close(self, peer: str, text: str) -> None:
        """Note that a peer has closed a connection as it left, in the epoch `text`."""
        with contextlib.suppress(KeyError, ValueError):
            self._record_detached(peer, int(text))


LEFT_GROUP = "it has left torch's group (rpc.shutdown)"
"""Reason of the error of calls to a peer that has."""


def _error_of(state: PeerState) -> RpcError | None:
    return None if state.refusal is None else state.refusal()


def _refusal(peer: str, exc: Exception) -> Callable[[], RpcError]:
    """Return what makes the error for calls to a peer that has answered with `exc`."""
    text = safe_str(exc)
    if "ModuleNotFoundError" in text or "ImportError" in text:
        reason = "it does not have aiorpc_torch: install it there"
        return functools.partial(WorkerUnreachable, peer, reason)
    if "attach_message" in text:  # torch's text for a function that the peer does not know
        reason = f"it speaks a protocol before {VERSION.decode()}, which this process speaks"
        return functools.partial(WorkerUnreachable, peer, reason)
    return functools.partial(classify_error, exc, peer)
