"""The driver of `Group.map`: takes items, sends them to members, yields results in order.

`MapSchedule` decides: it chooses the member of each attempt at an item, and whether another one
follows. `_MapRun` acts: a task takes the items, and callbacks note the answers.
"""

import asyncio
import functools
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    Required,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from .._aio.deadlines import in_seconds
from .._aio.items import ItemIterator
from .._aio.loops import Wakeup, call_soon
from .._handles.mistakes import OnlyIterated
from .._torch.rrefs import identity, owner_name
from .._wire.pickling import CallAborted
from .._wire.targets import BoundTarget, call_name
from ..errors import CallTimeout, WorkerGone, WorkerLeft, WorkerLost, WorkerUnreachable
from .answers import exception_of
from .group_call import MemberCalls
from .group_schedule import MapSchedule, Outcome
from .pending import InlineFuture
from .pool import connection_to, current
from .routes import Route, checked_retries
from .supervised import Supervised

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
V = TypeVar("V")

Items = Iterable[V] | AsyncIterable[V]

Source = Iterator[Any] | AsyncIterator[Any]


@dataclass(frozen=True)
class MapOptions:
    """The options of `map`; if not `ordered`, those of `map_unordered`."""

    in_flight: int
    retries: int
    return_exceptions: bool
    ordered: bool = True

    def __post_init__(self) -> None:
        checked_retries(self.retries)
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise ValueError(f"in_flight must be an int of at least 1, got {self.in_flight!r}")


class MapResults(OnlyIterated, ItemIterator[R]):
    """The results of a map. An early end cancels the running calls."""

    _KIND = "result of this map"

    def __init__(
        self,
        members: Any,
        method: Callable[..., Any],
        iterables: Sequence[Items[Any]],
        options: MapOptions,
    ) -> None:
        super().__init__()
        if isinstance(members, Sequence) and not members:
            raise ValueError("map() needs a member; the Group is empty")
        if not callable(method):
            raise TypeError(f"the method of map() must be callable, got {method!r}")
        if not iterables:
            raise TypeError("map() needs at least one iterable")
        self._name = call_name(BoundTarget((0, 0), method))
        sources = [
            aiter(each) if isinstance(each, AsyncIterable) else iter(each) for each in iterables
        ]
        self._make = functools.partial(_MapRun, self._name, members, method, sources, options)
        self._run: _MapRun | None = None  # from the first step on

    def __repr__(self) -> str:
        return f"<map of {self._name}{', over' if self._is_over else ''}>"

    def _next(self) -> Awaitable[R]:
        if self._run is None:
            self._run = self._make()
            self._bound = self._run.bound
        return self._run.next()

    def _stop(self) -> None:
        if self._run is not None:
            self._run.stop()

    def __del__(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None and not self._is_over:
            call_soon(run._loop, run.stop)  # later: garbage may be collected inside any code


_One = Callable[[T, A], R]
_Two = Callable[[T, A, B], R]
_Many = Callable[Concatenate[T, ...], R]


class _Raise(TypedDict, total=False):
    """Keywords of a map that raises the exception of an item."""

    in_flight: int
    retries: int
    return_exceptions: Literal[False]


class _Return(TypedDict, total=False):
    """Keywords of a map whose results may be exceptions."""

    in_flight: int
    retries: int
    return_exceptions: Required[Literal[True]]


class Mappable(Generic[T]):
    """A collection of members that do the items of a map."""

    __slots__ = ()

    def _follow(self, on_change: Callable[[Exception | None], None]) -> Callable[[], None] | None:
        """Call back on the running loop after each change of the members, with an error at the end.

        Return what ends that; None if they do not change.
        """
        return None

    @overload
    def map(
        self, method: _One[T, A, Awaitable[R]], items: Items[A], /, **options: Unpack[_Raise]
    ) -> MapResults[R]: ...

    @overload
    def map(
        self, method: _One[T, A, R], items: Items[A], /, **options: Unpack[_Raise]
    ) -> MapResults[R]: ...

    @overload
    def map(
        self,
        method: _Two[T, A, B, Awaitable[R]],
        first: Items[A],
        second: Items[B],
        /,
        **options: Unpack[_Raise],
    ) -> MapResults[R]: ...

    @overload
    def map(
        self,
        method: _Two[T, A, B, R],
        first: Items[A],
        second: Items[B],
        /,
        **options: Unpack[_Raise],
    ) -> MapResults[R]: ...

    @overload
    def map(
        self, method: _Many[T, Awaitable[R]], /, *iterables: Items[Any], **options: Unpack[_Raise]
    ) -> MapResults[R]: ...

    @overload
    def map(
        self, method: _Many[T, R], /, *iterables: Items[Any], **options: Unpack[_Raise]
    ) -> MapResults[R]: ...

    @overload
    def map(
        self, method: _Many[T, Awaitable[R]], /, *iterables: Items[Any], **options: Unpack[_Return]
    ) -> MapResults[R | BaseException]: ...

    @overload
    def map(
        self, method: _Many[T, R], /, *iterables: Items[Any], **options: Unpack[_Return]
    ) -> MapResults[R | BaseException]: ...

    def map(
        self,
        method: Callable[..., Any],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: bool = False,
    ) -> MapResults[Any]:
        """Return an iterator of the results of `method` for all items, in the order of the items.

            async for y in models.map(Model.infer, xs, in_flight=2): ...

        A work queue: the next item goes to a member with a free slot. Several iterables give
        several arguments, and the shortest ends the map. Each may be asynchronous. An item is taken
        only when a slot is free, and at most 4 × `in_flight` × `len(group)` items are taken and not
        yielded. The deadline of `aiorpc.timeout` at the first step bounds the whole map. If the
        consumer leaves early, running calls are cancelled.

        An exception of the method, or of an iterable, is raised at its item's place. It ends the
        map and cancels the other calls. If a member's worker is lost, its items go to other
        members, so the method may run twice for an item.

        Members of `members(name)` that come get items. Those that go get no more, and others get
        what they have not done. While there is none, items wait, until the deadline.

        Args:
            method: method or function, called with the object and the arguments of an item.
            iterables: iterables of the arguments.
            in_flight: maximum number of unanswered calls of each member.
            retries: how often an item is given to another member after a loss.
            return_exceptions: whether the exception of an item, also a loss that exceeds its
                retries, is its result, and the map goes on. What ends the map is raised: an
                exception of an iterable, the deadline, the loss of all members.

        Raises:
            TypeError: if `method` cannot be called, or an iterable cannot be iterated.
            ValueError: if the group is empty, or for an invalid `in_flight` or `retries`.
            NotInWorld: from a step, once this worker has left its world.
        """
        options = MapOptions(in_flight, retries, return_exceptions)
        return MapResults(self, method, iterables, options)

    @overload
    def map_unordered(
        self, method: _One[T, A, Awaitable[R]], items: Items[A], /, **options: Unpack[_Raise]
    ) -> MapResults[tuple[A, R]]: ...

    @overload
    def map_unordered(
        self, method: _One[T, A, R], items: Items[A], /, **options: Unpack[_Raise]
    ) -> MapResults[tuple[A, R]]: ...

    @overload
    def map_unordered(
        self, method: _Many[T, Awaitable[R]], /, *iterables: Items[Any], **options: Unpack[_Raise]
    ) -> MapResults[tuple[Any, R]]: ...

    @overload
    def map_unordered(
        self, method: _Many[T, R], /, *iterables: Items[Any], **options: Unpack[_Raise]
    ) -> MapResults[tuple[Any, R]]: ...

    @overload
    def map_unordered(
        self, method: _Many[T, Awaitable[R]], /, *iterables: Items[Any], **options: Unpack[_Return]
    ) -> MapResults[tuple[Any, R | BaseException]]: ...

    @overload
    def map_unordered(
        self, method: _Many[T, R], /, *iterables: Items[Any], **options: Unpack[_Return]
    ) -> MapResults[tuple[Any, R | BaseException]]: ...

    def map_unordered(
        self,
        method: Callable[..., Any],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: bool = False,
    ) -> MapResults[Any]:
        """Return an iterator of pairs `(item, result)`, as they complete.

            async for seed, episode in envs.map_unordered(Env.rollout, seeds): ...

        With several iterables the item is the tuple of the arguments. A slow item delays no other
        one. Otherwise as `map`: an exception of the method ends the map when it comes, and one of
        an iterable after the items before it.
        """
        options = MapOptions(in_flight, retries, return_exceptions, ordered=False)
        return MapResults(self, method, iterables, options)


_TAKING = -1
"""The key of the task that takes items; others are the numbers of members."""


class _MapRun(MemberCalls):
    """One map, from its first step to its end. `_calls` are by the index of the item."""

    def __init__(
        self,
        name: str,
        members: Any,
        method: Callable[..., Any],
        sources: Sequence[Source],
        options: MapOptions,
    ) -> None:
        super().__init__("map", name, len(members), None)
        self._now = members
        self._members = dict(enumerate(members))
        self._method = method
        self._follow_no_more = members._follow(self._on_change)  # it is called in later iterations
        self._changes = self._follow_no_more is not None  # the members do
        self._options = options
        self._schedule = MapSchedule(
            len(self._members),
            options.in_flight,
            options.retries,
            changes=self._changes,
            ordered=options.ordered,
        )
        self._items: dict[int, tuple[Any, ...]] = {}  # that are sent, or yielded with results
        # Of a supervised member that has been waited for: items start now, also if other calls that
        # have waited with them have not. If all waited for each other, none would ever start.
        self._returned: dict[int, Any] = {}
        self._failure: Exception | None = None  # that has ended the map
        self._results = Wakeup()  # is set when the next result may be there
        self._slots = Wakeup()  # is set when an item may be taken
        self._begin()
        self._start_task(_TAKING, self._take_items(sources))

    async def next(self) -> Any:
        """Return the next result, or raise the exception in its place."""
        while (found := self._schedule.next_outcome()) is None:
            if self._is_cancelled or self._schedule.is_over:
                raise StopAsyncIteration
            await self._results.wait()
        self._slots.set()
        index, outcome = found
        arguments = self._items.pop(index, ())
        value, failure = outcome.value, outcome.failure
        if failure is not None:
            if outcome.ends_map or not self._options.return_exceptions:
                raise failure
            value = failure
        if self._options.ordered:
            return value
        return (arguments[0] if len(arguments) == 1 else arguments), value

    def stop(self) -> None:
        """Cancel the running calls, and take no further items."""
        if self._follow_no_more is not None:
            self._follow_no_more()
            self._follow_no_more = None
        self.cancel(self._failure)
        self._results.set()

    # ── members that change, or return ──────────────────────────────────────────────────────────

    def _on_change(self, end: Exception | None) -> None:
        """Give items to members that have come, and no more to those that have gone."""
        if self._is_cancelled:
            return
        if end is not None:
            self._fail(end)
            return
        now = {identity(each): each for each in self._now}
        for number, member in [*self._members.items()]:
            if now.pop(identity(member), None) is None:
                del self._members[number]
                self._schedule.dismiss(number)
                if (waiting := self._tasks.pop(number, None)) is not None:
                    waiting.cancel()
        for member in now.values():
            self._members[self._schedule.admit()] = member
        self._go_on()

    def _expect(self, number: int) -> None:
        """Let items wait for a lost member that is made again, or whose connection has ended."""
        member = self._members.get(number)
        if member is None or number in self._tasks:
            return
        if isinstance(member, Supervised):
            self._schedule.expect(number)
            ready = Route(member, BoundTarget(member.rref, self._method), None, 0).ready
            self._start_task(number, self._await_return(number, ready))
        elif self._changes:
            worker = self._pool.worker_of(owner_name(member))
            alive = functools.partial(self._pool.observer.wait_until_alive, worker)
            self._start_task(number, self._await_return(number, alive))

    async def _await_return(self, number: int, wait: Callable[[], Awaitable[Any]]) -> None:
        try:
            destination = await wait()
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # of the factory of a supervised object
            self._schedule.give_up(number, exc)
        else:
            self._schedule.restore(number)
            if destination is not None:
                self._returned[number] = destination[0]
        del self._tasks[number]
        self._go_on()
        self._returned.pop(number, None)

    def _on_cancelled(self, key: int, exc: asyncio.CancelledError) -> None:
        if key == _TAKING:
            self._schedule.exhaust(exc)
        else:
            self._schedule.give_up(key, exc)
        self._go_on()

    # ── items ───────────────────────────────────────────────────────────────────────────────────

    async def _take_items(self, sources: Sequence[Source]) -> None:
        schedule = self._schedule
        failure = None
        try:
            while True:
                while not schedule.may_take():
                    await self._slots.wait()
                if (arguments := await _next_arguments(sources)) is None:
                    break
                index = schedule.take()
                self._items[index] = arguments
                self._go_on()
        except BaseException as exc:  # of an iterable, which may raise anything
            failure = exc
        schedule.exhaust(failure)
        self._results.set()

    def _go_on(self) -> None:
        """Send what can be sent; let items be taken and results be yielded."""
        if self._failure is not None:  # also an item whose member is lost is not sent again
            self._schedule.fail_unassigned(self._failure)
        while (assigned := self._schedule.assign()) is not None:
            self._send(*assigned)
        self._slots.set()
        self._results.set()

    def _send(self, index: int, number: int) -> None:
        member = self._members[number]
        try:
            current()  # torch's own error tells of no world
            rref = member
            if isinstance(member, Supervised):
                rref = self._returned.get(number) or member._start()
            owner = owner_name(member if rref is None else rref)
            if rref is None or self._pool.load(owner) is None:
                if isinstance(member, Supervised) and rref is not None:
                    member._lose(rref)
                raise self._pool.gone(owner)
            connection, target = connection_to(rref), BoundTarget(rref, self._method)
            future = connection.call(target, (self._items[index], {}), self.bound)
        except (WorkerLost, WorkerLeft) as exc:  # nothing was sent
            if isinstance(exc, WorkerLost):
                self._expect(number)
            self._schedule.withdraw(index, number, exc)
        except BaseException as exc:  # an argument that cannot be pickled, for one
            self._end_item(index, number, Outcome(None, exc))
        else:
            self._calls[index] = future
            on_answer = functools.partial(self._on_answer, index, number)
            future.add_done_callback(on_answer, context=self._context)

    def _on_answer(self, index: int, number: int, future: InlineFuture) -> None:
        if self._calls.pop(index, None) is None:  # the map has ended
            return
        answer, schedule = future.result(), self._schedule
        failure = exception_of(answer, future.target)
        if type(answer) is not CallAborted or not isinstance(failure, WorkerGone):
            self._end_item(index, number, Outcome(answer if failure is None else None, failure))
        elif isinstance(failure, WorkerUnreachable):
            schedule.interrupt(index, number, failure)
        elif isinstance(failure, WorkerLost):
            if isinstance(member := self._members.get(number), Supervised):
                member._lose(future.target.on)
            self._expect(number)
            schedule.lose(index, number, failure)
        else:  # it leaves; only such a worker does not serve, since this one has answered before
            take_back = schedule.lose if answer.was_sent else schedule.withdraw
            take_back(index, number, failure)
        self._go_on()

    def _end_item(self, index: int, member: int, outcome: Outcome) -> None:
        if self._options.ordered:  # otherwise the item is yielded too
            self._items.pop(index, None)
        self._schedule.answer(index, member, outcome)

    def _expire(self, seconds: float) -> None:
        """End the map with CallTimeout: at the items that run, and at those not taken."""
        text = f"the map of {self.name} timed out after {in_seconds(seconds)}"
        self._fail(CallTimeout(text, method=self.name))
        super()._expire(seconds)

    def _fail(self, failure: Exception) -> None:
        """Give up the items that no member has, and those not taken."""
        self._failure = failure
        self._schedule.fail_unassigned(failure)
        self._schedule.exhaust(failure)
        self._stop_waiting()
        self._results.set()


async def _next_arguments(sources: Sequence[Source]) -> tuple[Any, ...] | None:
    """Return the next arguments, None if an iterable has no more."""
    found = []
    for source in sources:
        value: Any
        if isinstance(source, AsyncIterator):
            value = await anext(source, _END)
        else:
            value = next(source, _END)
        if value is _END:
            return None
        found.append(value)
    return tuple(found)


_END = object()
