"""Calls that choose their object, wait for it, or are made again.

A call is one attempt (`RemoteCall`) or several. A `Route` chooses the object of each, and says
whether another one follows: for what is awaited (`RoutedCall`), iterated (`RoutedStream`), and for
each member of a group (`group_call`).
"""

import asyncio
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

from .._aio.deadlines import deadline_in, in_seconds, time_left
from .._aio.items import ItemIterator, has_passed
from .._handles.mistakes import refuse_attribute
from .._torch.compat import RRef, RRefBase
from .._torch.rrefs import identity, owner_name
from .._wire.exceptions import try_add_note
from .._wire.pickling import CallAborted
from .._wire.targets import Target, call_name
from ..errors import CallTimeout, NoMembers, QueueFull, RpcError, WorkerLost
from .answers import is_own, raise_aborted
from .call import USED, RemoteCall, RemoteStream
from .pool import current
from .supervised import Supervised, Waiter

if TYPE_CHECKING:
    from .group import Group

T = TypeVar("T")

Destination = tuple[Any, Any]
"""The worker or the RRef of an attempt, and its target there."""


class Route:
    """The choices of one call: where each attempt is made, and whether another one follows.

    A call that was not sent waits once for its supervised object, or goes to another member of
    `any()`. One whose worker is gone is made again up to `retries` times, also if it may have run.

    Args:
        of: worker, RRef, supervised object, or any member of a group.
        target: what to call; each attempt replaces its object.
        due: bound of all attempts and waits together.
        retries: how often the call is made again.
    """

    # Set when they are needed: most calls are one attempt.
    _on: Any = None  # worker or RRef of the attempt that is made
    _chosen: "tuple[Group[Any], int] | None" = None  # the group of `any()`, and the position in it
    _refusals: Mapping[Any, RpcError] = {}  # of members, or workers, that did not take the call
    _waiter: Waiter | None = None
    _waited: Any = None  # the RRef after whose loss the call has waited, unsent
    _suspect = ""  # worker that is pinged before the next attempt
    _may_have_run = False  # an attempt that has failed
    is_begun = False  # an item of a stream has come: no attempt follows

    def __init__(self, of: Any, target: Target, due: float | None, retries: int) -> None:
        self._of = of
        self._target = target
        self.due = due
        self._retries = retries
        self._member: Any = None if isinstance(of, AnyMember) else of

    def choose(self) -> Destination | None:
        """Return where the next attempt is made; None if `ready` has to be awaited for it.

        Raises what `AnyMember` raises if no member is left.
        """
        if self._suspect:
            return None
        if self._member is None:
            group, position = self._chosen = self._of._choose(self._refusals)
            self._member = group[position]
        member: Any = self._member
        on = member._start() if isinstance(member, Supervised) else member
        return None if on is None else self._destination(on)

    def _destination(self, on: Any) -> Destination:
        self._on, target = on, self._target
        if target.on is not None and target.on is not on:
            target = type(target)(on, *target[1:])  # `_replace` takes four times as long
        return on, target

    def wait(self) -> None:
        """Begin to wait for the object, before `ready` is awaited: calls start in their order."""
        if not self._suspect:
            self._waiter = self._member._wait()

    def stop(self) -> None:
        """Wait no more."""
        if self._waiter is not None:
            self._waiter.cancel()
            self._waiter = None

    async def ready(self) -> Destination:
        """Wait until the next attempt may be made: until its object is there.

        A worker whose connection has ended may live. It is pinged, and the attempt waits for that.

        Raises:
            CallTimeout: if the deadline passes before.
            WorkerLost: if the object is not made again.
            Exception: of the factory.
        """
        left, worker, destination, found = time_left(self.due), self._suspect, None, None
        try:
            async with asyncio.timeout(left):
                if worker:
                    await current().observer.wait_until_probed(worker)
                    self._suspect = ""
                if self._waiter is None and (destination := self.choose()) is None:
                    self.wait()
                if destination is None:
                    found = await self._waiter  # type: ignore[misc]
        except TimeoutError:
            pass
        finally:
            self.stop()
        if type(found) is CallAborted:
            raise_aborted(found, call_name(self._target))
        if found is None and (destination is None or has_passed(self.due)):
            worker = worker or self._member.owner_name()
            method, for_ = call_name(self._target), in_seconds(max(left or 0.0, 0.0))
            text = f"{method} on worker {worker!r} timed out: that worker was awaited for {for_}"
            text = f"{text}; the call was not sent. If it hangs, `await me.restart({worker!r})`"
            raise CallTimeout(text, worker=worker, method=method, may_have_run=False)
        return destination or self._destination(found)

    def failed(self, exc: BaseException) -> bool:
        """Note that an attempt has failed, or cannot be made; return whether another one follows.

        The exception of the last one says whether an earlier one may have run.
        """
        on, self._on = self._on, None
        member = self._member
        may_follow = not self.is_begun
        if may_follow and isinstance(member, Supervised) and on is not None and is_own_loss(exc):
            member._lose(on)
            if not exc.may_have_run and on is not self._waited:
                self._waited = on
                return True
        if self._chosen is not None and member is not None:
            group, position = self._chosen
            group._least_busy.fail(position, len(group))
            # It was not sent, or its queue is full.
            if may_follow and (isinstance(exc, QueueFull) or is_own(exc)) and not exc.may_have_run:
                key = identity_of(member) if isinstance(exc, QueueFull) else owner_name(member)
                self._refusals = {**self._refusals, key: exc}
                self._member = None
                return True
        if may_follow and self._retries and is_own(exc):
            self._retries -= 1
            self._may_have_run |= exc.may_have_run
            self._suspect, self._waited, self._refusals = exc.worker, None, {}
            if self._chosen is not None:
                self._member = None
            return True
        if self._may_have_run and isinstance(exc, RpcError) and not exc.may_have_run:
            exc.may_have_run = True
            try_add_note(exc, "an earlier attempt of this call may have run")
        self._refusals = {}
        return False

    def succeeded(self) -> None:
        """Note that the call has its result, or all its items."""
        self._refusals = {}  # their tracebacks hold the arguments
        if self._chosen is not None:
            group, position = self._chosen
            group._least_busy.succeed(position)


def is_own_loss(exc: BaseException) -> TypeGuard[WorkerLost]:
    """Return whether the call's own worker was lost, and not one that its method has called."""
    return isinstance(exc, WorkerLost) and is_own(exc)


class RoutedCall(RemoteCall):
    """A call that may take several attempts, each on the object that its route chooses."""

    __slots__ = ("_retries",)

    def __init__(
        self,
        of: Any,
        target: Target,
        timeout: float | None,
        retries: int,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(of, target, timeout, *args, **kwargs)
        self._retries = retries

    def _route(self) -> Route:
        return Route(self._worker, self._target, deadline_in(self._timeout), self._retries)

    def _attempt(self, route: Route, destination: Destination) -> RemoteCall:
        args, kwargs = self._arguments
        seconds = None if self._timeout is None else time_left(route.due)
        return RemoteCall(*destination, seconds, *args, **kwargs)

    def __await__(self) -> Generator[Any, Any, Any]:
        self._use()
        route = self._route()
        try:
            while True:
                try:
                    destination = route.choose() or (yield from route.ready().__await__())
                    found = yield from self._attempt(route, destination).__await__()
                except Exception as exc:
                    if not route.failed(exc):
                        raise
                else:
                    route.succeeded()
                    return found
        finally:
            self._steps = USED

    def _iterate(self, *, enters: bool) -> "RoutedStream":  # type: ignore[override]
        self._use()
        return RoutedStream(self, self._route(), enters)


def call_of(
    of: Any, target: Target, timeout: float | None, retries: int, /, *args: Any, **kwargs: Any
) -> RemoteCall:
    """Return a call of an RRef, a supervised object or any member."""
    if retries or not isinstance(of, RRefBase):
        return RoutedCall(of, target, timeout, retries, *args, **kwargs)
    return RemoteCall(of, target, timeout, *args, **kwargs)


def placeholder(of: Any) -> Any:
    """Return the object that the target of a call has until its route chooses one."""
    return of.rref if isinstance(of, Supervised) else (0, 0) if isinstance(of, AnyMember) else of


def checked_retries(retries: Any) -> int:
    """Return a number of retries that a user gave.

    Raises:
        ValueError: if it is no number, or negative.
    """
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(f"retries must be an int of at least 0, got {retries!r}")
    return retries


class RoutedStream(ItemIterator[Any]):
    """The items of a remote generator. Until the first item it may be begun again."""

    def __init__(self, call: RoutedCall, route: Route, enters: bool) -> None:
        super().__init__()
        self._call = call
        self._route = route
        self._enters = enters
        self._stream: RemoteStream | None = None
        try:
            if (destination := route.choose()) is not None:
                self._open(destination)
        except Exception as exc:
            if not route.failed(exc):
                raise

    def __repr__(self) -> str:
        return f"<stream of {self._call._what()}>"

    def _open(self, destination: Destination) -> None:
        self._stream = self._call._attempt(self._route, destination)._iterate(enters=self._enters)
        self._bound = self._stream._bound

    async def _next(self) -> Any:
        while True:
            try:
                if self._stream is None:
                    self._open(await self._destination())
                item = await self._stream._next()  # type: ignore[union-attr]
            except StopAsyncIteration:
                self._route.succeeded()
                raise
            except Exception as exc:
                if not self._route.failed(exc):
                    raise
                self._stop()
                self._stream = None
            else:
                self._route.is_begun = True
                return item

    async def _destination(self) -> Destination:
        """Return where the next attempt is made, once it may be."""
        try:
            destination = self._route.choose() or await self._route.ready()
        except asyncio.CancelledError:
            if not self._is_over:
                raise
        if self._is_over:  # closed by another task
            raise StopAsyncIteration
        return destination

    def _has_item(self) -> bool:
        return self._stream is not None and self._stream._has_item()

    def raise_failure(self) -> None:
        """Raise what has ended the stream before its consumer: a deadline, or a loss."""
        if self._stream is not None:
            self._stream.raise_failure()

    def _stop(self) -> None:
        self._route.stop()
        if self._stream is not None:
            self._stream._stop()


# ── the least busy member ───────────────────────────────────────────────────────────────────────


class AnyMember(Generic[T]):
    """The least busy member of a group. Made by `Group.any`, for `remote` and `call`.

    `now` returns the members of that moment.
    """

    __slots__ = ("_group", "_now")

    __aiorpc_stands_for__ = True

    def __init__(self, group: Collection[RRef[T]], now: Callable[[], "Group[T]"]) -> None:
        self._group = group
        self._now = now

    if not TYPE_CHECKING:
        __getattr__ = refuse_attribute

    def __repr__(self) -> str:
        return f"<any member of {self._group!r}>"

    def __reduce__(self) -> Any:
        return type(self._group).any, (self._group,)  # type: ignore[attr-defined]

    def _choose(self, refusals: Mapping[Any, RpcError]) -> "tuple[Group[T], int]":
        """Return the group, and the position of the member for a call that starts now.

        It is none of the `refusals`: workers by name, and members. If all are lost, it is a
        supervised one, for which the call waits.

        Raises:
            QueueFull: if the queue of a member is full, and no other is left.
            WorkerLost: if no member is left.
            WorkerLeft: if all members have left.
            NoMembers: if the group is empty now.
            NotInWorld: outside a world.
        """
        pool, group = current(), self._now()
        if not group:
            raise NoMembers(f"there is no member in {self._group!r}: await its `wait()` first")
        loads = [
            each._load() if isinstance(each, Supervised) else pool.load(owner_name(each))
            for each in group
        ]
        if refusals:
            loads = _without(refusals, group, loads)
        chosen = group._least_busy.choose(loads)
        if chosen is None:
            returning = [isinstance(each, Supervised) and each._may_return() for each in group]
            if any(returning):
                loads = _without(refusals, group, [0 if each else None for each in returning])
                chosen = group._least_busy.choose(loads)
        if chosen is not None:
            return group, chosen
        if refusals:
            try:
                raise next(iter(refusals.values()))
            finally:
                del refusals  # else it is a cycle, as below
        owners = [owner_name(member) for member in group]
        lost = [each for each in owners if not pool.has_left(pool.worker_of(each))]
        # In no variable: it would be a cycle, which keeps what the caller's frames hold.
        raise pool.gone([*lost, *owners][0], f"so have all members of {group!r}")


def _without(
    refusals: Mapping[Any, RpcError], group: "Group[Any]", loads: Sequence[int | None]
) -> list[int | None]:
    """Return the loads, None for a member that did not take the call."""
    keys = ((owner_name(each), identity_of(each)) for each in group)
    return [
        None if any(key in refusals for key in of_member) else load
        for of_member, load in zip(keys, loads, strict=True)
    ]


def identity_of(member: Any) -> Any:
    """Return what tells a member of a group from the others."""
    return member if isinstance(member, Supervised) else identity(member)
