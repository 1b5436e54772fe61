"""Attachments: who of the workers of torch's world serves, as torch messages tell.

Each worker tells all others when it attaches and when it leaves, and learns from the answers what
they had told before. Each message has the sender's epoch, so a late message changes nothing. What
is known of a peer is in its record.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch.futures import Future

from .._aio.loops import await_on
from .._client.pool import AGENT_ENDED
from .._endpoint import entry_points
from .._endpoint.entry_points import attach_message_of, read_attach_message
from .._peers.peers import Attachment, Event, Peer, Peers
from .._text import printable
from .._torch.agent import agent_generation
from .._torch.transport import classify_error, send, wrap_future
from .._wire.handshake import VERSION
from ..errors import NotInWorld, RpcError, WorkerLeft, WorkerLost, WorkerUnreachable, safe_str

if TYPE_CHECKING:
    from .membership import Membership

log = logging.getLogger("aiorpc_torch")

LEFT_GROUP = "it has left torch's group (rpc.shutdown)"
"""Reason of the error of calls to a peer that has."""

LEAVING = "this process leaves attach()"

T = TypeVar("T")


class Attachments:
    """The messages of one process's attachment, and of its peers'. `Holding` for its calls."""

    def __init__(
        self,
        members: Peers,  # the workers of torch's world
        membership: "Membership",  # hears what the peers tell
        timeout: float,  # seconds for which a call to a peer that is not attached is held
        # Called on the loop with each peer that attaches and has a device map for this process.
        on_device_map: Callable[[str, Mapping[str, str]], None],
    ) -> None:
        self.timeout = timeout
        self.epoch = 0
        self._members = members
        self._membership = membership
        self._on_device_map = on_device_map
        self._is_attached = True
        self._is_closed = False
        self._generation = agent_generation()
        self._loop = asyncio.get_running_loop()
        self._asking: set[asyncio.Task[None]] = set()

    def ask_soon(self, peer: Peer) -> None:
        """Ask a worker that has entered torch's group whether it has this package."""
        task = self._loop.create_task(self._ask(peer), name="aiorpc-attach")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def has_agent(self) -> bool:
        """Return whether torch's RPC, as it was when this process attached, still runs."""
        return agent_generation() == self._generation

    # ── holding calls, on any event loop ────────────────────────────────────────────────────────

    def is_held(self, peer: str) -> bool:
        """Return whether calls to a peer are held."""
        found = self._members.peers.get(peer)
        return found is not None and found.attachment is not Attachment.ATTACHED

    async def wait_until_serving(self, peer: Peer) -> int:
        """Wait until a peer is attached; return how many times it has attached. Raises
        WorkerUnreachable if it does not have this package, NotInWorld if torch's RPC has ended
        here, WorkerLost if torch does not reach it.
        """
        # The usual case, in the caller's own loop: that of `attach` may be blocked.
        is_serving = peer.attachment is Attachment.ATTACHED and not peer.has_left
        if is_serving or peer.name == self._members.name:
            return peer.epoch

        async def wait() -> int:
            if isinstance(peer.refusal, WorkerLost):
                await self._ask(peer)  # it may be reachable again
            while self.has_agent():
                if peer.has_left or self._members.peers.get(peer.name) is not peer:
                    raise WorkerLeft(peer.name, LEFT_GROUP)
                if peer.refusal is not None:
                    raise peer.refusal.with_traceback(None)  # one error for all calls
                if peer.attachment is Attachment.ATTACHED:
                    return peer.epoch
                if not await self._membership.wait_for_change():
                    break
            raise NotInWorld(LEAVING if self.has_agent() else AGENT_ENDED)

        return await self._on_loop(wait())

    async def on_refused(self, peer: Peer, epoch: int) -> None:
        """Note that a peer has refused a connection in its `epoch`. Raises NotInWorld if closed."""

        async def note() -> None:
            if peer.name == self._members.name or not self._membership.is_open:
                raise NotInWorld(LEAVING)
            self._membership.report(peer, Event.DETACH, epoch=epoch)

        await self._on_loop(note())

    async def _on_loop(self, step: Coroutine[Any, Any, T]) -> T:
        try:
            return await await_on(self._loop, step)
        except RuntimeError:
            if self._loop.is_closed():
                raise NotInWorld(LEAVING) from None
            raise

    def end(self) -> None:
        """Fail held calls, and end waits for peers: torch's RPC has ended."""
        for peer in [*self._members.peers.values()]:
            self._membership.report(peer, Event.REFUSE, NotInWorld(AGENT_ENDED))

    # ── messages ────────────────────────────────────────────────────────────────────────────────

    async def tell(self, is_attached: bool) -> None:
        """Tell all peers that this process is attached or leaves; wait for their answers."""
        self._is_attached = is_attached
        peers = [each for each in self._members.peers.values() if is_attached or each.has_answered]
        await asyncio.gather(*map(self._ask, peers))

    async def _ask(self, peer: Peer) -> None:
        """Tell one peer of this process, and record its answer."""
        try:
            data = self._message(peer.name)
            answer = await wrap_future(send(peer.member.info, entry_points.attach_message, data))
            message = read_attach_message(answer)
        except Exception as exc:
            self._membership.report(peer, Event.REFUSE, _refusal(peer.name, exc))
        else:
            self._record(peer, message)

    def _message(self, peer: str) -> bytes:
        maps = self._members.own.member.device_maps.get(peer, {})
        return attach_message_of(self._members.me, self.epoch, self._is_attached, maps)

    def _record(self, peer: Peer, message: Sequence[Any]) -> None:
        version, _, epoch, is_attached, maps = message
        if version != VERSION:
            theirs = printable(bytes(version).decode(errors="replace"))
            reason = f"it speaks {theirs}, and this process {VERSION.decode()}"
            error = WorkerUnreachable(
                peer.name, f"{reason}: install one version of aiorpc_torch in both"
            )
            self._membership.report(peer, Event.REFUSE, error)
            return
        before = peer.epoch
        event = Event.ATTACH if is_attached else Event.DETACH
        self._membership.report(peer, event, epoch=epoch)
        if is_attached and maps and peer.epoch > before:
            try:
                self._on_device_map(peer.name, maps)
            except Exception:  # CUDA does not start here
                log.exception("%s cannot use the device map of %s", self._members.name, peer.name)

    def on_message(self, data: bytes) -> "Future[Any] | None":
        """Handle the message of a peer, on a thread of torch's; return None from `close` on."""
        if self._is_closed:
            return None
        answer: Future[Any] = Future()

        def handle() -> None:
            peer = ""
            try:
                message = read_attach_message(data)
                peer = message[1]
                if (known := self._members.peers.get(peer)) is not None:
                    self._record(known, message)
            except Exception as exc:
                log.warning("%s rejected an unreadable attach message: %r", self._members.name, exc)
            with contextlib.suppress(RuntimeError):  # torch has stopped
                answer.set_result(self._message(peer))

        try:
            self._loop.call_soon_threadsafe(handle)
        except RuntimeError:  # the loop is closed
            answer.set_result(self._message(""))
        return answer

    def open(self) -> None:
        """Begin the next epoch: from now on this process answers as attached.

        Were it begun before, an answer that this process is not attached would end it.
        """
        self.epoch = entry_points.next_epoch()

    def close(self) -> None:
        """Answer no further messages: this process has left."""
        self._is_closed = True
        for task in self._asking:
            task.cancel()


def _refusal(peer: str, exc: Exception) -> RpcError:
    """Return the error for calls to a peer that has answered with `exc`."""
    text = safe_str(exc)
    if "No module named 'aiorpc_torch'" in text:
        return WorkerUnreachable(peer, "it does not have aiorpc_torch: install it there")
    # torch's texts for a module or function that the peer does not know
    if "ModuleNotFoundError" in text or "ImportError" in text or "attach_message" in text:
        reason = "it has another version of aiorpc_torch: install one version in both"
        return WorkerUnreachable(peer, reason)
    return classify_error(exc, peer)
