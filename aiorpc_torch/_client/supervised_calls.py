"""Calls and streams of a supervised object. One that was not sent waits for the next incarnation.

The calls of groups do the same in `group_call` and `group_map`.
"""

import asyncio
import time
from collections.abc import Awaitable, Generator
from typing import Any, TypeVar

from torch.distributed.rpc import RRef

from .._aio.deadlines import deadline_in, time_left
from .._aio.items import ItemIterator
from .._torch.compat import RRefBase
from .._wire.pickling import CallAborted
from .._wire.targets import (
    BoundTarget,
    FetchTarget,
    MakeTarget,
    MethodTarget,
    Target,
    call_name,
)
from ..errors import WorkerLost
from .answers import raise_aborted
from .call import ALREADY_AWAITED, USED, RemoteCall, RemoteStream
from .supervised import Supervised, Waiter, is_own_loss, late_wait

T = TypeVar("T")

ObjectTarget = MethodTarget | BoundTarget | MakeTarget | FetchTarget


def target_on(target: Any, rref: "RRefBase[Any]") -> Any:
    """Return the target of a call on another object."""
    return type(target)(rref, *target[1:])  # `_replace` takes four times as long


def expire(waiter: Waiter, target: Target, worker: str, seconds: float) -> None:
    """End the wait of a call with CallTimeout."""
    if not waiter.done():
        waiter.set_result(late_wait(target, worker, seconds))


class SupervisedCall(RemoteCall):
    """A call of a supervised object, which waits until the object is there."""

    __slots__ = ("_supervised",)

    _target: ObjectTarget

    def __init__(
        self,
        supervised: Supervised[Any],
        target: ObjectTarget,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None = None,
    ) -> None:
        self._supervised = supervised
        super().__init__(supervised.owner_name(), target, timeout, *args, **kwargs)

    def _run(self) -> Generator[Any, Any, Any]:
        steps, due = self._steps, None if self._timeout is None else deadline_in(self._timeout)
        tried: RRefBase[Any] | None = None
        while True:
            rref = self._supervised._start()
            if rref is None:
                rref = yield from wait_for(self._supervised, self._target, due).__await__()
                self._timeout = time_left(due)
            self._worker = rref
            if self._target.on is not rref:
                self._target = target_on(self._target, rref)
            try:
                return (yield from super()._run())
            except WorkerLost as exc:
                if not may_wait(self._supervised, exc, rref) or rref is tried:
                    raise
            tried = rref
            self._steps = steps  # it is not over

    def _iterate(self, *, enters: bool) -> "SupervisedStream":  # type: ignore[override]
        if self._steps is not None:
            raise RuntimeError(ALREADY_AWAITED)
        self._steps = USED
        due = deadline_in(self._timeout)
        return SupervisedStream(self._supervised, self._target, self._arguments, due, enters)


def may_wait(supervised: Supervised[Any], exc: WorkerLost, rref: "RRefBase[Any]") -> bool:
    """Note the failure of a call; return whether it was not sent and may wait."""
    if not is_own_loss(exc):
        return False
    supervised._lose(rref)
    return not exc.may_have_run


async def wait_for(supervised: Supervised[T], target: Target, due: float | None) -> RRef[T]:
    """Wait until a call may start; return the RRef to call.

    Raises:
        CallTimeout: if it may not by `due`, or by the deadline of `aiorpc.timeout`.
        WorkerLost: if the object is not made again.
        Exception: of the factory.
    """
    waiter, timer = supervised._wait(), None
    loop = asyncio.get_running_loop()
    bound = due if due is not None else deadline_in(None)
    if bound is not None and not waiter.done():
        left = bound - time.monotonic()
        timer = loop.call_later(left, expire, waiter, target, supervised.owner_name(), left)
    try:
        found = await waiter
    finally:
        waiter.cancel()
        if timer is not None:
            timer.cancel()
    if type(found) is CallAborted:
        raise_aborted(found, call_name(target))
    return found  # type: ignore[no-any-return]


class SupervisedStream(ItemIterator[Any]):
    """The items of a remote generator of a supervised object.

    Until the first item, it is begun again if it was not sent.
    """

    def __init__(
        self,
        supervised: Supervised[Any],
        target: ObjectTarget,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        due: float | None,
        enters: bool,
    ) -> None:
        super().__init__()
        self._supervised = supervised
        self._target = target
        self._arguments = arguments
        self._due = due
        self._enters = enters
        self._stream: RemoteStream | None = None
        self._is_begun = False  # from the first item on
        if (rref := supervised._start()) is not None:
            self._try_to_open(rref)

    def __repr__(self) -> str:
        return f"<stream of {call_name(self._target)} of {self._supervised!r}>"

    def _try_to_open(self, rref: RRef[Any]) -> bool:
        """Send the call; return False if it was not sent and has to wait."""
        target = target_on(self._target, rref)
        args, kwargs = self._arguments
        call = RemoteCall(rref, target, time_left(self._due), *args, **kwargs)
        try:
            self._stream = call._iterate(enters=self._enters)
        except WorkerLost as exc:
            if not may_wait(self._supervised, exc, rref):
                raise
            return False
        self._target = target
        return True

    def _next(self) -> Awaitable[Any]:
        if self._stream is not None and self._is_begun:
            return self._stream._next()
        return self._retried()

    async def _retried(self) -> Any:
        tried: RRefBase[Any] | None = None
        while True:
            while self._stream is None:
                rref = await wait_for(self._supervised, self._target, self._due)
                if self._is_over:  # closed by another task
                    raise StopAsyncIteration
                self._try_to_open(rref)
            try:
                item = await self._stream._next()
            except WorkerLost as exc:
                called: Any = self._target.on
                if not may_wait(self._supervised, exc, called) or called is tried:
                    raise
                tried, self._stream = called, None
            else:
                self._is_begun = True
                return item

    def _has_item(self) -> bool:
        return self._is_begun and self._stream is not None and self._stream._has_item()

    def raise_failure(self) -> None:
        """Raise what has ended the stream before its consumer: a deadline, or a loss."""
        if self._stream is not None:
            self._stream.raise_failure()

    def _stop(self) -> None:
        if self._stream is not None:
            self._stream._stop()
