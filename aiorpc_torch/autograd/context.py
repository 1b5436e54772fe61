"""A context of torch's distributed autograd that follows the tasks of whoever opens it.

What blocks runs in spare threads: a backward that another worker never answers keeps one, and
nobody else. How calls are recorded is the recording's; here are a context's beginning and end.
"""

import asyncio
import contextlib
import types
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from .._aio.deadlines import budget, deadline_in
from .._aio.interruption import Interruption
from .._aio.threads import Spare, run_blocking
from .._client.pool import current as world
from .._protocol.recording import Recording, enter, entered, settle
from .._torch.compat import backward, get_gradients, new_context, release_context
from .._torch.transport import in_autograd_context
from ..errors import CallTimeout, RpcError, WorkerLost

__all__ = ("Context", "context")

_spare = Spare("aiorpc-autograd")

PATIENCE = 2.0  # seconds that a backward for which nobody waits has to end before it is released

NAMING = 0.5  # seconds to find out which worker it was that broke a backward


class Context:
    """Where calls are recorded for a backward through all workers. Made by `context`.

    `id` is the number by which torch knows it, on every worker.
    """

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._outer: Recording | None = None
        self._turn = asyncio.Lock()  # torch takes one backward of a context at a time
        self._given_up = ""

    def __repr__(self) -> str:
        return f"<autograd context {self._recording or 'not opened'}>"

    @property
    def id(self) -> int:
        """By which torch knows it: `torch.distributed.autograd.get_gradients(id)`, anywhere.

        Raises:
            RuntimeError: before it is opened, and after it was left.
        """
        return self._open().id

    async def __aenter__(self) -> "Context":
        if self._recording is not None:
            raise RuntimeError("an autograd context is opened once: make a new one")
        world()
        with in_autograd_context(-1):  # torch opens none in a thread where one is
            self._recording = Recording(new_context()._context_id())
        self._outer = entered()
        enter(self._recording)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        recording = self._opened()
        if entered() is recording:
            enter(self._outer)
        recording.close()
        # An answer that comes after its release would make it anew. To release is to erase it here
        # and to send messages, which does not block: a thread for it would cost more than it does.
        recording.when_settled(lambda: _release(recording.id))

    def _opened(self) -> Recording:
        if self._recording is None:
            raise RuntimeError("this autograd context is not open: `async with context() as ctx`")
        return self._recording

    def _open(self) -> Recording:
        recording = self._opened()
        if not recording.is_open:
            raise RuntimeError("this autograd context was left: its gradients are gone")
        return recording

    # ── what it is for ──────────────────────────────────────────────────────────────────────────

    async def backward(
        self,
        roots: Sequence[Tensor] | Tensor,
        *,
        retain_graph: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Compute the gradients of `roots` on every worker that the calls have reached.

        They are accumulated in the context, and not in `.grad`. Calls whose results are not a part
        of `roots` contribute nothing; one that was given up, or has not ended, is waited for, since
        torch needs an answer to each.

        Args:
            roots: scalars that require a gradient.
            retain_graph: whether another backward in this context will follow.
            timeout: seconds for all of it; None: no bound but `aiorpc.timeout`'s.

        Raises:
            CallTimeout: the time is over; the message names the calls that were waited for. The
                context is of no more use, others are not concerned.
            RpcError: a call in it was never answered; the message names it. Nothing was computed.
            WorkerLost: a worker that calls in it were made of is lost.
            RuntimeError: what torch raises, here or on another worker, and outside the context.
            TypeError, ValueError: for other roots.
        """
        recording = self._open()
        checked = _check(roots)
        due = deadline_in(timeout)
        try:
            async with asyncio.timeout(budget(due)) as bound, self._turn:
                await self._backward(recording, checked, retain_graph)
        except TimeoutError:
            if bound.expired():
                raise CallTimeout(self._late(recording)) from None
            raise

    async def _backward(
        self, recording: Recording, roots: list[Tensor], retain_graph: bool
    ) -> None:
        if self._given_up:
            raise RpcError(f"this autograd context is of no more use: {self._given_up}")
        key = object()  # while it is held, it is not released under torch's hands
        while (ends := recording.hold_settled(key, "backward")) is None:
            await settle(recording)
        if recording.lost:
            recording.ended(key)
            raise RpcError(
                "no gradient comes back from calls that were never answered: "
                + "; ".join(recording.lost)
            )

        def step() -> None:
            try:
                backward(recording.id, roots + ends, retain_graph=retain_graph)
            finally:
                recording.ended(key)

        self._given_up = "a backward in it did not end"
        try:
            async with Interruption() as interruption:
                with world().needing(recording.peers, interruption.end):
                    await _naming(run_blocking(_spare, step))
        except (asyncio.CancelledError, WorkerLost):
            asyncio.get_running_loop().call_later(PATIENCE, recording.ended, key)
            raise
        except Exception as exc:
            self._given_up = f"its backward raised {exc!r}"
            raise
        self._given_up = ""

    def _late(self, recording: Recording) -> str:
        if (pending := recording.pending) != ["backward"]:
            return f"backward waited in vain for the end of {', '.join(pending)}"
        return (
            f"backward did not end in time, of {recording.made()}. What a method calls by plain "
            "torch RPC in this context must be a part of its result"
        )

    async def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients of this worker's tensors, as far as `backward` has come to any.

        Raises:
            RuntimeError: outside the context.
        """
        return get_gradients(self._open().id)


def context() -> Context:
    """A context of distributed autograd: calls that are made in it are recorded for a backward.

        async with aiorpc.autograd.context() as ctx:
            loss = loss_fn(await remote(ps).forward(x), y)
            await ctx.backward([loss], timeout=30)
            await opt.step(ctx)

    It holds for the task that opens it and for those that this task starts meanwhile; other tasks'
    calls have no part in it, and any number may be open. Where a call in it arrives, what that
    calls in turn is recorded too, whatever the method is.

    Raises:
        NotServing: if this process is in no world.
    """
    return Context()


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """What is called in this block is recorded nowhere, if the task is in a context of ours."""
    before = entered()
    enter(None)
    try:
        yield
    finally:
        enter(before)


async def _naming(step: Coroutine[Any, Any, None]) -> None:
    """Leave some time to whoever can say which worker is lost: torch's error does not."""
    try:
        await step
    except RuntimeError as exc:
        if "tensorpipe/" in str(exc):
            await asyncio.sleep(NAMING)
        raise


def _check(roots: Any) -> list[Tensor]:
    found = [roots] if isinstance(roots, Tensor) else roots
    if not isinstance(found, Iterable):
        raise TypeError(f"backward takes tensors, not {roots!r}")
    found = [*found]
    for root in found:
        if not isinstance(root, Tensor):
            raise TypeError(f"backward takes tensors, not {root!r}")
        if root.numel() != 1 or not root.requires_grad:
            raise ValueError(
                f"a root is a scalar that requires a gradient, not {_describe(root)}: was it "
                "computed in this context, from what calls returned?"
            )
    if not found:
        raise ValueError("backward needs a root")
    return found


def _describe(root: Tensor) -> str:
    needs = "" if root.requires_grad else ", which requires none"
    return f"one of shape {tuple(root.shape)}{needs}"


def _release(number: int) -> None:
    with contextlib.suppress(RuntimeError):  # torch has stopped, or has done it
        release_context(number)
