"""Supervised objects: made again, from the same arguments, when their process is replaced.

`Supervision` decides. `Supervised` acts: a task waits for the process and makes the object, and a
future stands for each waiting call. Calls: `routes`, `group_call`, `group_map`.
"""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from .._aio.loops import run_on_loop
from .._handles.mistakes import refuse_attribute
from .._torch.compat import RRef, RRefBase
from .._torch.rrefs import owner_name
from .._wire.pickling import CallAborted
from .._wire.targets import function_name
from ..errors import NotInWorld, WorkerGone, WorkerLeft, WorkerLost
from .answers import is_interrupted
from .call import create_object
from .pool import ConnectionPool, current
from .supervision import Supervision

T = TypeVar("T")

log = logging.getLogger("aiorpc_torch")

Waiter = asyncio.Future[Any]
"""A waiting call: its result is the RRef to call, or a `CallAborted`."""


class Supervised(Generic[T]):
    """An object that is made again when its process is replaced. Made by `supervised`.

    `remote`, `call`, `proxy`, `fetch` and `Group` take it where they take an RRef. It belongs to
    this process, and cannot be an argument: pass `rref`, or supervise an object there. The object
    lives as long as this does.
    """

    __aiorpc_stands_for__ = True

    def __init__(
        self,
        rref: RRef[T],
        worker: str,
        factory: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._rref = rref
        self._worker = worker
        self._making = factory, args, kwargs
        self._pool: ConnectionPool = current()
        self._loop = asyncio.get_running_loop()  # of the recoveries
        self._lock = threading.Lock()  # calls come from all loops of this process
        self._supervision: Supervision[Waiter] = Supervision()
        self._open_rref: RRef[T] | None = rref  # None: calls have to wait
        self._error: BaseException | None = None  # of an object that has ended
        self._recovery: asyncio.Task[None] | None = None
        self._pool.tell_of_losses(worker, self._lose)

    if not TYPE_CHECKING:
        __getattr__ = refuse_attribute

    def __repr__(self) -> str:
        name = function_name(self._making[0])
        return f"<supervised {name} on {self._worker}, incarnation {self.incarnation}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} belongs to this process: send its .rref, or supervise an object there"
        )

    @property
    def incarnation(self) -> int:
        """Return how often the object was made again: 0 for the first one."""
        return self._supervision.incarnation

    @property
    def rref(self) -> RRef[T]:
        """Return the RRef of the last incarnation, which other workers can be sent."""
        return self._rref

    def owner_name(self) -> str:
        """Return the name of the worker."""
        return self._worker

    # ── for calls ───────────────────────────────────────────────────────────────────────────────

    def _start(self) -> RRef[T] | None:
        """Return the RRef for a call that starts now, None if the call has to `wait`."""
        if self._pool.is_lost(self._worker):
            self._lose(self._rref)
        return self._open_rref

    def _load(self) -> int | None:
        """Return the unanswered calls to its worker, None if a call would have to wait.

        If an attempt to make it again has failed, another one begins.
        """
        rref = self._start()
        load = None if rref is None else self._pool.load(owner_name(rref))
        if load is None and self._may_return():
            if rref is not None:
                self._lose(rref)
            self._recover_soon()
        return load

    def _may_return(self) -> bool:
        """Return whether calls may wait for the object: its worker is, or was, started again."""
        if not self._pool.is_lost(self._worker):  # it may be by `start` or `restart`
            with self._lock:
                self._supervision.reopen()
        return self._supervision.state != "ended"

    def _lose(self, rref: "RRefBase[Any] | None" = None) -> None:
        """Note that the worker is lost; ignore a late call of an earlier RRef that finds it so."""
        with self._lock:
            if rref is not None and rref is not self._rref:
                return
            self._supervision.lose(self._supervision.incarnation)
            self._update()
        self._recover_soon()

    def _wait(self) -> Waiter:
        """Return a future of the RRef, or of the `CallAborted`, for a call on the running loop.

        Cancel it if the call ends before.
        """
        waiter: Waiter = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(self._leave, context=contextvars.Context())
        self._may_return()
        with self._lock:
            self._supervision.wait(waiter)
            if self._supervision.state == "ended":
                assert self._error is not None
                _resolve(self._supervision.end(), CallAborted(self._error, was_sent=False))
            self._release()
        self._recover_soon()
        return waiter

    def _leave(self, waiter: Waiter) -> None:
        """Note that a call starts or ends. asyncio calls this just before the call goes on."""
        with self._lock:
            self._supervision.leave(waiter)
            self._update()

    def _release(self) -> None:
        _resolve(self._supervision.release(), self._rref)
        self._update()

    def _update(self) -> None:
        self._open_rref = self._rref if self._supervision.is_open else None

    # ── recovery ────────────────────────────────────────────────────────────────────────────────

    def _recover_soon(self) -> None:
        with self._lock:
            if not self._supervision.begin_recovery():
                return
        if self._loop.is_closed():
            self._fail(self._loop_ended())
        else:
            run_on_loop(self._loop, self._start_recovery)

    def _start_recovery(self) -> None:
        # Without the deadline and the context variables of the call that has found the loss.
        context = contextvars.Context()
        self._recovery = self._loop.create_task(
            self._recover(), name="aiorpc-supervise", context=context
        )
        self._recovery.add_done_callback(self._on_recovered)

    def _on_recovered(self, recovery: "asyncio.Task[None]") -> None:
        if recovery.cancelled():  # with its loop, or by code that cancels all, before a first step
            self._fail(self._loop_ended())

    async def _recover(self) -> None:
        try:
            while not await self._renew():
                """The process was lost in which the object was being made."""
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # of the factory, which may raise anything
            self._fail(exc)

    async def _renew(self) -> bool:
        """Wait for the process, make the object if it was replaced; return whether it is there."""
        if self._pool.has_left(self._worker):
            raise WorkerLeft(self._worker, may_have_run=False)
        try:
            await self._pool.observer.wait_until_alive(self._worker)
        except WorkerLost as exc:  # it is not started again
            self._error = exc
            raise
        with self._lock:
            if not self._pool.is_replaced(self._rref):
                self._supervision.resume()
                self._release()
                return True
            self._supervision.make()
        factory, args, kwargs = self._making
        try:
            rref = await create_object(self._worker, factory, args, kwargs)
        except WorkerGone as exc:
            if not is_interrupted(exc):
                raise
            with self._lock:
                self._supervision.lose_again()
            return False
        with self._lock:
            self._rref = rref
            self._supervision.made()
            self._release()
        log.info("%r was made again", self)
        return True

    def _loop_ended(self) -> NotInWorld:
        return NotInWorld(f"the event loop that made {self!r} has ended: supervise it again")

    def _fail(self, exc: BaseException) -> None:
        """End the recovery: the waiting calls raise `exc`. The next call begins another one."""
        with self._lock:
            ends = exc is self._error
            waiting = self._supervision.end() if ends else self._supervision.fail()
            _resolve(waiting, CallAborted(exc, was_sent=False))
            self._update()
        if not isinstance(exc, NotInWorld | WorkerGone):
            log.warning("%r could not be made again: %r", self, exc)


def _resolve(waiters: list[Waiter], outcome: Any) -> None:
    for each in waiters:
        run_on_loop(each.get_loop(), _set_result, each, outcome)


def _set_result(waiter: Waiter, outcome: Any) -> None:
    if not waiter.done():
        waiter.set_result(outcome)
