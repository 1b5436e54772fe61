"""Contexts of torch's distributed autograd that follow the tasks of their opener.

torch cannot interrupt a backward, and one that another worker never answers keeps its thread. So
each has a cached thread of its own, and blocks nothing else. `_context.recording` records the
calls.
"""

import asyncio
import contextlib
import functools
import warnings
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from torch import Tensor

from .._aio.deadlines import deadline_in, time_left
from .._aio.loops import interruptible
from .._aio.threads import ThreadCache, run_in_thread
from .._client.pool import current as current_pool
from .._context.recording import ContextRecord, current_record, enter_record
from .._torch.compat import (
    backward,
    current_context_id,
    get_gradients,
    new_context,
    release_context,
    watch_rpc,
)
from .._torch.transport import enter_context_id
from .._wire.exceptions import try_add_note
from ..errors import CallTimeout, RpcError, WorkerGone

_threads = ThreadCache("aiorpc-autograd")

# Seconds that an abandoned backward has to end before its context is released. The release makes
# it fail on other workers, and torch logs that.
RELEASE_DELAY = 2.0

PEER_LOSS_DELAY = 0.5  # seconds for the membership to name the worker that broke a backward

_OF_PLAIN_BACKWARD = "graphTask_ INTERNAL ASSERT FAILED"
"""Part of torch's error of `loss.backward()` through the result of a recorded call (2.14)."""


_has_warned = False


@functools.cache
def _watch_torch() -> None:
    """From now on, warn once of a call by torch's RPC in a context of this module."""
    watch_rpc(_warn_if_unrecorded)


def _warn_if_unrecorded() -> None:
    global _has_warned
    recording = current_record()
    if _has_warned or recording is None or not recording.is_open or current_context_id() >= 0:
        return
    _has_warned = True
    warnings.warn(
        "a call by torch's RPC in an autograd context of aiorpc_torch is not recorded: no gradient "
        "flows through it. Write `await aiorpc_torch.remote(rref).forward(x)`",
        RuntimeWarning,
        stacklevel=4,
    )


class Context:
    """A context in which calls are recorded for a backward through all workers.

    Made by `context`.
    """

    def __init__(self) -> None:
        self._recording: ContextRecord | None = None
        self._outer: ContextRecord | None = None
        self._lock = asyncio.Lock()  # torch runs one backward of a context at a time
        self._failure = ""  # of an earlier backward

    def __repr__(self) -> str:
        recording = self._recording
        return f"<autograd context {'not opened' if recording is None else recording.id}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an autograd context cannot be sent: pass its number, `context.id`")

    @property
    def id(self) -> int:
        """torch's number of the context: `torch.distributed.autograd.get_gradients(id)`, anywhere.

        Raises:
            RuntimeError: before the context is opened, and after it was left.
        """
        return self._require_open().id

    def __index__(self) -> int:
        """Let torch's functions take the context for its number, as `get_gradients(context)`."""
        return self.id

    async def __aenter__(self) -> "Context":
        if self._recording is not None:
            raise RuntimeError("an autograd context can be opened once: make a new one")
        current_pool()
        _watch_torch()
        with enter_context_id(-1):  # torch makes no context in a thread that has one
            self._recording = ContextRecord(new_context()._context_id())
        self._outer = current_record()
        enter_record(self._recording)
        return self

    async def __aexit__(self, _: object, exc: BaseException | None, __: object) -> None:
        if isinstance(exc, RuntimeError) and _OF_PLAIN_BACKWARD in str(exc):
            hint = "(in an autograd context write `await context.backward([loss])`, not "
            try_add_note(exc, f"{hint}`loss.backward()`)")
        recording = self._recording
        assert recording is not None
        if current_record() is recording:
            enter_record(self._outer)
        recording.close()

        def release() -> None:
            with contextlib.suppress(RuntimeError):  # torch has stopped, or has released it
                release_context(recording.id)

        # A result that arrives after the release would make the context again. The release does not
        # block: it erases the context here and sends messages. A thread for it would cost more.
        recording.when_settled(release)

    def _require_open(self) -> ContextRecord:
        if self._recording is None:
            raise RuntimeError("this autograd context is not open: `async with context() as ctx`")
        if not self._recording.is_open:
            raise RuntimeError("this autograd context was left, and its gradients are released")
        return self._recording

    async def backward(
        self,
        roots: Sequence[Tensor] | Tensor,
        *,
        retain_graph: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Compute the gradients of `roots` on every worker that the calls have reached.

        They are accumulated in the context, not in `.grad`. Calls whose results are not part of
        `roots` contribute nothing. Cancelled calls, and calls that have not ended, are waited for:
        torch needs a result of each.

        Args:
            roots: scalars that require a gradient.
            retain_graph: keep the graph for another backward in this context.
            timeout: seconds for all of it (default: no bound but `aiorpc.timeout`'s).

        Raises:
            CallTimeout: the time is over; the message names the calls that were waited for. If
                torch did not finish, this context is unusable; other contexts are unaffected.
            RpcError: a call in the context was never answered; the message names it. Nothing was
                computed.
            WorkerLost: a worker that was called in the context is lost.
            WorkerLeft: a worker that was called in the context has left.
            RuntimeError: torch raised it, here or on another worker; or the context is not open.
            TypeError, ValueError: if `roots` are not scalar tensors that require gradients.
        """
        recording = self._require_open()
        checked = _check(roots)
        due = deadline_in(timeout)
        try:
            async with asyncio.timeout(time_left(due)) as bound, self._lock:
                await self._backward(recording, checked, retain_graph)
        except TimeoutError:
            if not bound.expired():
                raise
            if (pending := recording.pending) != ["backward"]:
                calls = ", ".join(pending)
                text = f"backward() timed out before the end of {calls}; try again later"
                raise CallTimeout(text) from None
            raise CallTimeout(
                f"backward() did not finish in time, after {recording.describe_calls()}. "
                "If a method makes calls by plain torch RPC, its result must depend on theirs"
            ) from None

    async def _backward(
        self, recording: ContextRecord, roots: list[Tensor], retain_graph: bool
    ) -> None:
        if self._failure:
            raise RpcError(
                f"autograd context unusable: an earlier backward() {self._failure}; open a new one "
                "with context()"
            )
        key = object()  # while the recording holds it, the context is not released
        ends = await recording.hold_when_settled(key, "backward")
        if recording.lost:
            recording.release(key)
            raise RpcError(
                "backward() cannot run, since calls in this context were never answered: "
                + "; ".join(recording.lost)
            )

        def run() -> None:
            try:
                backward(recording.id, roots + ends, retain_graph=retain_graph)
            finally:
                recording.release(key)

        self._failure = "did not finish"
        # torch waits for a frozen worker without end: the membership ends the wait.
        try:
            async with interruptible() as interrupt:
                with current_pool().watching_peers(recording.peers, interrupt):
                    step = run_in_thread(run, "aiorpc-autograd", _threads)
                    await _await_peer_loss(step, recording.peers)
        except (asyncio.CancelledError, WorkerGone):
            asyncio.get_running_loop().call_later(RELEASE_DELAY, recording.release, key)
            raise
        except Exception as exc:
            self._failure = f"raised {exc!r}"
            raise
        self._failure = ""

    async def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients of this worker's tensors that `backward` has computed.

        Raises:
            RuntimeError: if the context is not open.
        """
        return get_gradients(self._require_open().id)


def context() -> Context:
    """Return a context of distributed autograd: calls made in it are recorded for a backward.

        async with aiorpc.autograd.context() as ctx:
            loss = loss_fn(await aiorpc.remote(ps).forward(x), y)
            await ctx.backward([loss], timeout=30)
            await opt.step(ctx)

    It applies to the task that opens it and to tasks that this task starts inside. Calls of other
    tasks are not recorded in it, and any number of contexts may be open. On a callee, the calls
    that the method makes are recorded too, whatever kind of method it is.

    Raises:
        NotInWorld: if this process is in no world.
    """
    return Context()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Record no calls inside the block."""
    before = current_record()
    enter_record(None)
    try:
        yield
    finally:
        enter_record(before)


async def _await_peer_loss(step: Coroutine[Any, Any, None], peers: Collection[str]) -> None:
    """Await `step`; after a transport error, raise that one of these peers is gone.

    torch's error does not name the worker. If none is known to be gone, wait for the membership to
    interrupt the block.
    """
    try:
        await step
    except RuntimeError as exc:
        if "tensorpipe/" not in str(exc):
            raise
        if (gone := current_pool().find_gone(peers)) is None:
            await asyncio.sleep(PEER_LOSS_DELAY)
            gone = current_pool().find_gone(peers)
        if gone is not None:
            raise gone from exc
        raise


def _check(roots: Any) -> list[Tensor]:
    is_one = isinstance(roots, Tensor | Awaitable) or not isinstance(roots, Iterable)
    found = [roots] if is_one else [*roots]
    for root in found:
        if not isinstance(root, Tensor):
            raise TypeError(f"roots must be tensors, got {root!r}")
        if root.numel() != 1 or not root.requires_grad:
            got = f"one of shape {tuple(root.shape)}"
            if not root.requires_grad:
                got += ", which requires none"
            raise ValueError(
                f"roots must be scalars that require a gradient, got {got}: compute them in this "
                "context, from results of calls"
            )
    if not found:
        raise ValueError("roots must not be empty")
    return found
