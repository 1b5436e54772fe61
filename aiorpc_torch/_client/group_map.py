"""The driver of `Group.map`: takes items, sends them to members, yields results in order.

`MapSchedule` decides. `_MapRun` acts: a task takes the items, and callbacks note the answers.
"""

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, TypeGuard, TypeVar, overload

from torch.distributed.rpc import RRef

from .._aio.deadlines import anyio_scope_deadline, deadline_in, earlier, in_seconds
from .._aio.items import ItemIterator, has_passed
from .._aio.loops import call_soon
from .._aio.tasks import InlineFuture
from .._aio.wakeup import Wakeup
from .._context.interception import CallInfo, End, begin_group, is_needed
from .._handles.mistakes import OnlyIterated
from .._torch.rrefs import identity, owner_name
from .._wire.pickling import CallAborted
from .._wire.targets import BoundTarget, call_name
from ..errors import CallTimeout, RpcError, WorkerLeft, WorkerLost, WorkerUnreachable
from .answers import exception_of, is_own
from .group_call import late_call
from .group_schedule import MapSchedule, Outcome
from .pending import cancel, expire
from .pool import connection_to, current
from .supervised import Supervised, Waiter

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
V = TypeVar("V")

Items = Iterable[V] | AsyncIterable[V]

Source = Iterator[Any] | AsyncIterator[Any]


Follow = Callable[[Callable[[Exception | None], None]], Callable[[], None]]
"""Calls back on the running loop after each change of the members, and with an error at their end.

Returns a function that ends it.
"""


@dataclass(frozen=True)
class MapOptions:
    """The options of a map.

    Args:
        in_flight: maximum number of unanswered calls of each member.
        retries: how often an item is given to another member after a loss.
        return_exceptions: whether the exception of an item is its result.
        ordered: whether results come in the order of the items; otherwise each with its item, as
            they complete.
    """

    in_flight: int
    retries: int
    return_exceptions: bool
    ordered: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise ValueError(f"in_flight must be an int of at least 1, got {self.in_flight!r}")
        if not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries must be an int of at least 0, got {self.retries!r}")


class MapResults(OnlyIterated, ItemIterator[R]):
    """The results of a map. An early end cancels the running calls."""

    _KIND = "result of this map"

    def __init__(
        self,
        members: Collection[Any],
        method: Callable[..., Any],
        iterables: Sequence[Iterable[Any] | AsyncIterable[Any]],
        options: MapOptions,
        follow: Follow | None = None,
    ) -> None:
        super().__init__()
        _check(method, iterables)
        self._name = call_name(BoundTarget((0, 0), method))
        sources = [
            aiter(each) if isinstance(each, AsyncIterable) else iter(each) for each in iterables
        ]
        self._make = functools.partial(
            _MapRun, self._name, members, method, sources, options, follow
        )
        self._run: _MapRun | None = None  # from the first step on

    def __repr__(self) -> str:
        return f"<map of {self._name}{', over' if self._is_over else ''}>"

    def _next(self) -> Awaitable[R]:
        if self._run is None:
            if has_passed(deadline_in(None)):
                raise late_call(self._name)
            self._run = self._make()
            self._bound = self._run.bound
        return self._run.next()

    def _stop(self) -> None:
        if self._run is not None:
            self._run.stop()

    def __del__(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None and not self._is_over:
            call_soon(run.loop, run.stop)  # later: garbage may be collected inside any code


class Mappable(Generic[T]):
    """A collection of members that do the items of a map."""

    __slots__ = ()

    def _map(
        self, method: Callable[..., Any], iterables: Sequence[Items[Any]], options: MapOptions
    ) -> MapResults[Any]:
        raise NotImplementedError

    @overload
    def map(
        self,
        method: Callable[[T, A], Awaitable[R]],
        items: Items[A],
        /,
        *,
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[R]: ...

    @overload
    def map(
        self,
        method: Callable[[T, A], R],
        items: Items[A],
        /,
        *,
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[R]: ...

    @overload
    def map(
        self,
        method: Callable[[T, A, B], Awaitable[R]],
        first: Items[A],
        second: Items[B],
        /,
        *,
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[R]: ...

    @overload
    def map(
        self,
        method: Callable[[T, A, B], R],
        first: Items[A],
        second: Items[B],
        /,
        *,
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[R]: ...

    @overload
    def map(
        self,
        method: Callable[Concatenate[T, ...], Awaitable[R]],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[R]: ...

    @overload
    def map(
        self,
        method: Callable[Concatenate[T, ...], R],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[R]: ...

    @overload
    def map(
        self,
        method: Callable[Concatenate[T, ...], Awaitable[R]],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[True],
    ) -> MapResults[R | BaseException]: ...

    @overload
    def map(
        self,
        method: Callable[Concatenate[T, ...], R],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[True],
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
        return self._map(method, iterables, MapOptions(in_flight, retries, return_exceptions))

    @overload
    def map_unordered(
        self,
        method: Callable[[T, A], Awaitable[R]],
        items: Items[A],
        /,
        *,
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[tuple[A, R]]: ...

    @overload
    def map_unordered(
        self,
        method: Callable[[T, A], R],
        items: Items[A],
        /,
        *,
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[tuple[A, R]]: ...

    @overload
    def map_unordered(
        self,
        method: Callable[Concatenate[T, ...], Awaitable[R]],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[tuple[Any, R]]: ...

    @overload
    def map_unordered(
        self,
        method: Callable[Concatenate[T, ...], R],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[False] = False,
    ) -> MapResults[tuple[Any, R]]: ...

    @overload
    def map_unordered(
        self,
        method: Callable[Concatenate[T, ...], Awaitable[R]],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[True],
    ) -> MapResults[tuple[Any, R | BaseException]]: ...

    @overload
    def map_unordered(
        self,
        method: Callable[Concatenate[T, ...], R],
        /,
        *iterables: Items[Any],
        in_flight: int = 2,
        retries: int = 1,
        return_exceptions: Literal[True],
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
        return self._map(method, iterables, options)


def _check(method: Any, iterables: Sequence[Any]) -> None:
    if not callable(method):
        raise TypeError(f"the method of map() must be callable, got {method!r}")
    if not iterables:
        raise TypeError("map() needs at least one iterable")


class _MapRun:
    """One map, from its first step to its end. Confined to the running loop.

    Attributes:
        results: is set when the next result may be there.
        bound: earlier of the map's own deadline and a scope's.
    """

    def __init__(
        self,
        name: str,
        members: Collection[Any],
        method: Callable[..., Any],
        sources: Sequence[Source],
        options: MapOptions,
        follow: Follow | None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.results = Wakeup()
        self._name = name
        self._now = members
        self._members = dict(enumerate(members))
        self._method = method
        self._changes = follow is not None  # the members do
        self._options = options
        self._schedule = MapSchedule(
            len(self._members),
            options.in_flight,
            options.retries,
            changes=self._changes,
            ordered=options.ordered,
        )
        self._pool = current()
        self._context, self._observed = self._begin()  # of the calls, and of interceptors
        self._items: dict[int, tuple[Any, ...]] = {}  # that are sent, or yielded with results
        self._calls: dict[int, InlineFuture] = {}
        self._waits: dict[int, Waiter] = {}  # for supervised members that are lost
        self._failure: Exception | None = None  # that has ended the map
        due = deadline_in(None)
        self.bound = earlier(due, anyio_scope_deadline())
        self._timer = None
        if due is not None:
            left = due - time.monotonic()
            self._timer = self.loop.call_later(left, self._expire, left)
        self._returning: dict[int, asyncio.Task[None]] = {}  # for members that may be alive
        self._slots = Wakeup()  # is set when an item may be taken
        taking = self._take_items(sources)
        context = self._context.copy()  # a context is entered once at a time
        self._taking = self.loop.create_task(taking, name="aiorpc-map", context=context)
        self._follow_no_more = None if follow is None else follow(self._on_change)

    def _begin(self) -> tuple[contextvars.Context, End | None]:
        if not is_needed():
            return contextvars.copy_context(), None
        me, now, size = self._pool.worker, time.monotonic(), len(self._members)
        return begin_group(CallInfo("map", self._name, me, "", now, size))

    async def next(self) -> Any:
        """Return the next result, or raise the exception in its place."""
        while (found := self._schedule.next_outcome()) is None:
            if self._schedule.is_over:
                raise StopAsyncIteration
            await self.results.wait()
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
        if self._timer is not None:
            self._timer.cancel()
        self._taking.cancel()
        for call in self._calls.values():
            cancel(call)
        self._calls.clear()
        self._stop_waiting()
        end, self._observed = self._observed, None
        if end is not None:
            end(self._failure)

    def _stop_waiting(self) -> None:
        for waiter in [*self._waits.values(), *self._returning.values()]:
            waiter.cancel()
        self._waits.clear()
        self._returning.clear()

    # ── members that change ─────────────────────────────────────────────────────────────────────

    def _on_change(self, end: Exception | None) -> None:
        """Give items to members that have come, and no more to those that have gone."""
        if self._follow_no_more is None:  # the map has ended meanwhile
            return
        if end is not None:
            self._end(end)
            return
        now = {identity(each): each for each in self._now}
        for number, member in [*self._members.items()]:
            if now.pop(identity(member), None) is None:
                del self._members[number]
                self._schedule.dismiss(number)
                if (waiting := self._returning.pop(number, None)) is not None:
                    waiting.cancel()
        for member in now.values():
            self._members[self._schedule.admit()] = member
        self._go_on()

    async def _await_return(self, number: int, owner: str) -> None:
        """Let a member have items again if it is alive: only its connection had ended."""
        with contextlib.suppress(RpcError):  # it is lost: it goes
            await self._pool.wait_until_alive(owner)
            del self._returning[number]
            self._schedule.restore(number)
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
                self._send_assigned()
        except BaseException as exc:  # of an iterable, which may raise anything
            failure = exc
        schedule.exhaust(failure)
        self.results.set()

    def _go_on(self) -> None:
        """Send what can be sent, and take further items."""
        self._send_assigned()
        self._slots.set()

    def _send_assigned(self) -> None:
        if self._failure is not None:  # also an item whose member is lost is not sent again
            self._schedule.fail_unassigned(self._failure)
            self.results.set()
            return
        while (assigned := self._schedule.assign()) is not None:
            self._send(*assigned)

    def _send(self, index: int, member: int) -> None:
        try:
            rref = self._live(self._members[member])
            target = BoundTarget(rref, self._method)
            connection = connection_to(rref)
            future = connection.call(target, (self._items[index], {}), self.bound)
        except WorkerLost as exc:  # nothing was sent
            self._expect(member)
            self._schedule.withdraw(index, member, exc)
            self.results.set()
            return
        except Exception as exc:  # an argument that cannot be pickled, for one
            if self._is_leaving(exc):
                self._schedule.withdraw(index, member, exc)
            else:
                self._end_item(index, member, Outcome(None, exc))
            return
        self._calls[index] = future
        on_answer = functools.partial(self._on_answer, index, member)
        future.add_done_callback(on_answer, context=self._context)

    def _live(self, member: Any) -> RRef[Any]:
        """Return the RRef to call.

        Raises:
            WorkerLost: if the member is lost.
            WorkerLeft: if its worker leaves.
        """
        is_supervised = isinstance(member, Supervised)
        rref: RRef[Any] | None = member._start() if is_supervised else member
        owner = owner_name(member if rref is None else rref)
        if rref is None or self._pool.load(owner) is None:
            if is_supervised:
                member._lose(member.rref)
            worker = self._pool.worker_of(owner)
            if self._pool.has_left(worker):
                raise WorkerLeft(worker, may_have_run=False)
            raise WorkerLost(worker, "no member of the group is left", may_have_run=False)
        return rref

    def _expect(self, position: int) -> None:
        """Let items wait for a lost member that is made again, or may be alive."""
        member = self._members.get(position)
        if self._changes:
            if member is not None and position not in self._returning:
                waiting = self._await_return(position, self._pool.worker_of(owner_name(member)))
                self._returning[position] = self.loop.create_task(waiting, name="aiorpc-map")
        elif isinstance(member, Supervised) and position not in self._waits:
            self._schedule.expect(position)
            self._waits[position] = waiter = member._wait()
            waiter.add_done_callback(
                functools.partial(self._on_alive, position), context=self._context
            )

    def _on_alive(self, position: int, waiter: Waiter) -> None:
        if self._waits.pop(position, None) is None:  # the map has ended
            return
        found = waiter.result()
        target = BoundTarget(self._members[position].rref, self._method)
        failure = exception_of(found, target)
        if failure is None:
            self._schedule.restore(position)
            self._go_on()
        else:
            self._schedule.give_up(position, failure)
        self.results.set()

    # ── answers ─────────────────────────────────────────────────────────────────────────────────

    def _on_answer(self, index: int, member: int, future: InlineFuture) -> None:
        if self._calls.pop(index, None) is None:  # the map has ended
            return
        answer = future.result()
        failure = exception_of(answer, future.source)
        if type(answer) is CallAborted and self._is_leaving(failure):
            take_back = self._schedule.lose if answer.was_sent else self._schedule.withdraw
            take_back(index, member, failure)
            self.results.set()
        elif type(answer) is CallAborted and isinstance(failure, WorkerUnreachable):
            self._schedule.interrupt(index, member, failure)
            self.results.set()
        elif type(answer) is CallAborted and isinstance(failure, WorkerLost):
            supervised = self._members.get(member)
            if isinstance(supervised, Supervised) and is_own(failure):
                supervised._lose(future.source.on)
            self._expect(member)
            self._schedule.lose(index, member, failure)
            self.results.set()
        else:
            self._end_item(index, member, Outcome(None if failure else answer, failure))
        self._go_on()

    def _is_leaving(self, failure: BaseException | None) -> TypeGuard[WorkerLeft]:
        """Return whether a call has failed since its member leaves.

        A member has answered before, so only a worker that leaves does not serve.
        """
        return isinstance(failure, WorkerLeft)

    def _end_item(self, index: int, member: int, outcome: Outcome) -> None:
        if self._options.ordered:  # otherwise the item is yielded too
            self._items.pop(index, None)
        self._schedule.answer(index, member, outcome)
        self.results.set()

    def _expire(self, seconds: float) -> None:
        """End the map with CallTimeout: at the items that run, and at those not taken."""
        text = f"the map of {self._name} timed out after {in_seconds(seconds)}"
        self._end(CallTimeout(text, method=self._name))
        for call in [*self._calls.values()]:
            expire(call, seconds)

    def _end(self, failure: Exception) -> None:
        """Give up the items that no member has, and those not taken."""
        self._failure = failure
        self._schedule.fail_unassigned(failure)
        self._schedule.exhaust(failure)
        self._taking.cancel()
        self._stop_waiting()
        self.results.set()


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
