"""The caller: a call becomes a message to a peer, and its answer a result or an exception.

One door, `Outbox.call`. It knows who the peers are and who waits; not what the callee does.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_rpc import WorkerInfo
from torch.distributed import rpc
from torch.futures import Future

from . import _doors
from ._bridge import transport_error, wrap_future
from ._deadline import budget, deadline_in
from ._wire import Call, Cancel, Goodbye, Message, Outcome, Target, pack
from .errors import CallTimeout, NotServing, RpcError


class Outbox:
    """Sends on behalf of worker `name` to any of `workers` (all of the world, in rank order)."""

    def __init__(self, name: str, workers: Sequence[WorkerInfo]) -> None:
        self.name = name
        self._workers: dict[str | int, WorkerInfo] = {info.name: info for info in workers}
        self._workers.update({info.id: info for info in workers})
        self._lock = threading.Lock()
        self._sent: dict[str, int] = dict.fromkeys((info.name for info in workers), 0)

    def __repr__(self) -> str:
        return f"<Outbox of {self.name}: {sum(self._sent.values())} messages sent>"

    def find(self, worker: str | int | WorkerInfo) -> str:
        """The name of a worker of this world.

        Raises:
            ValueError: if there is none; the message names those there are.
        """
        key = worker.name if isinstance(worker, WorkerInfo) else worker
        try:
            return self._workers[key].name
        except (KeyError, TypeError):
            names = ", ".join(self._sent)
            raise ValueError(f"no worker {worker!r} in this world; there are: {names}") from None

    async def call(
        self,
        worker: str,
        target: Target,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Run `target` on `worker` and return its result, or raise what it raised."""
        deadline = deadline_in(timeout)
        left = budget(deadline)
        if left is not None and left <= 0.0:
            raise CallTimeout(f"the deadline had passed before the call to {worker!r} was sent")
        work = pack((target, args, kwargs or {}))
        seq, answer = self._send(worker, lambda seq: Call(self.name, seq, work, left))
        try:
            outcome: Outcome = await _within(answer, left)
        except TimeoutError:
            self._cancel(worker, seq)
            raise CallTimeout(f"no answer from worker {worker!r} within {left:.3g} s") from None
        except asyncio.CancelledError:
            self._cancel(worker, seq)
            raise
        except RuntimeError as exc:
            raise transport_error(exc, worker) from exc
        return outcome.get()

    async def say_goodbye(self, worker: str, *, alone: bool) -> None:
        """Tell `worker` that this process leaves. Raises WorkerLost if it has gone itself."""
        _, heard = self._send(worker, lambda seq: Goodbye(self.name, seq, alone))
        try:
            await wrap_future(heard)
        except RuntimeError as exc:
            raise transport_error(exc, worker) from exc

    def _cancel(self, worker: str, call: int) -> None:
        with contextlib.suppress(RpcError):  # a lost worker has lost the call with it
            self._send(worker, lambda seq: Cancel(self.name, seq, call))

    def _send(self, worker: str, message: Callable[[int], Message]) -> tuple[int, "Future[Any]"]:
        info = self._workers[worker]
        # The number is taken only once the message is out: a gap would hold back all that follow.
        with self._lock:
            seq = self._sent[worker]
            try:
                future = rpc.rpc_async(info, _doors.answer, args=(message(seq),), timeout=0)
            except RuntimeError as exc:
                raise transport_error(exc, worker) from exc
            self._sent[worker] = seq + 1
        return seq, future


async def _within(answer: "Future[Any]", seconds: float | None) -> Any:
    if seconds is None:
        return await wrap_future(answer)
    async with asyncio.timeout(seconds):
        return await wrap_future(answer)


_current: Outbox | None = None


def use(outbox: Outbox | None) -> None:
    """Let `outbox` send for this process; None: nobody does."""
    global _current
    _current = outbox


def current() -> Outbox:
    """The outbox of this process's worker.

    Raises:
        NotServing: if this process is in no world.
    """
    if _current is None:
        raise NotServing("this process is in no world: enter worker() or local_world() first")
    return _current
