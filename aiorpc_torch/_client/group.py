"""Groups: one call to many objects, or to the least busy of them."""

import contextlib
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeGuard, TypeVar, overload

from torch.distributed.rpc import RRef

from .._aio.deadlines import deadline_in, time_left
from .._handles.handles import described, of_handle
from .._handles.mistakes import await_hint, refuse_attribute
from .._torch.compat import RRefBase
from .._torch.rrefs import identity, note_class, owner_name
from .._wire.messages import Arguments
from .._wire.shared_arguments import EachValue
from .._wire.targets import BoundTarget, CreateTarget, MakeTarget, MethodTarget
from ..errors import NoMembers, QueueFull, RpcError, WorkerGone, WorkerLeft, WorkerLost
from .answers import is_own
from .call import RemoteCall, RemoteStream
from .group_call import GroupCall
from .group_map import Items, MapOptions, Mappable, MapResults
from .group_schedule import LeastBusy
from .pool import ConnectionPool, current
from .supervised import Supervised
from .supervised_calls import SupervisedCall, SupervisedStream, target_on

if TYPE_CHECKING:
    from .proxies import RemoteProxy, SupervisedProxy

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
V = TypeVar("V")
P = ParamSpec("P")


def each(values: Iterable[V]) -> V:
    """Give each member of a group a value of its own: `remote(envs).reset(each(seeds))`.

    It is a direct argument, positional or keyword, of a call of a group. There must be one value
    for each member. A tensor gives its rows. A `@batched` function returns `each(values)` to give
    one value to each caller, which the function of a `Round` needs: its result is for all.

    Raises:
        TypeError: if `values` cannot be iterated, or is a str, bytes, a mapping or a set. Also from
            a call of something other than a group, and from inside another argument.
        ValueError: from the call, if the number of values is wrong.
    """
    value: Any = EachValue(values)
    return value  # type: ignore[no-any-return]


class Group(Sequence[RRef[T]], Mappable[T]):
    """A group of objects on any workers: an immutable sequence of their RRefs.

        losses = await aiorpc.remote(envs).train(100)  # a list in the group's order
        async for member, loss in aiorpc.remote(envs).train(100): ...  # as they complete

    Each member gets an ordinary call. Arguments are encoded once for all; `each` gives every member
    its own. All members are waited for. If some fail, `GroupError` has the results of the others.

    A slice is a Group. Groups with equal members are equal. A member that is in it twice is called
    twice. As an argument or a result a Group travels as its RRefs. A member whose process was
    replaced stays lost, unless it is supervised: create it again.

    Args:
        members: RRefs of the objects, of one class or of several. Supervised objects, and what
            `remote` returns for either, too.

    Raises:
        TypeError: if a member is neither an RRef nor supervised.
    """

    __slots__ = ("__weakref__", "_has_supervised", "_key", "_least_busy", "_members")

    @overload
    def __init__(
        self,
        members: "Iterable[RRef[T] | Supervised[T] | RemoteProxy[T] | SupervisedProxy[T]]",
    ) -> None: ...

    @overload
    def __init__(
        self,
        members: "Iterable[RRef[Any] | Supervised[Any] | RemoteProxy[Any] | SupervisedProxy[Any]]",
    ) -> None: ...

    def __init__(self, members: Iterable[Any]) -> None:
        self._members: tuple[Any, ...] = tuple(map(of_handle, members))
        for member in self._members:
            if not isinstance(member, RRefBase | Supervised):
                got = f"{described(member)}{await_hint(member)}"
                raise TypeError(f"members of a Group must be RRefs, got {got}")
        self._has_supervised = any(isinstance(each, Supervised) for each in self._members)
        self._least_busy = LeastBusy()
        self._key = tuple(map(_identity, self._members))

    if not TYPE_CHECKING:
        __getattr__ = refuse_attribute

    def __repr__(self) -> str:
        owners = "workers of an earlier world"
        with contextlib.suppress(RuntimeError):  # torch has stopped
            owners = ", ".join(dict.fromkeys(owner_name(each) for each in self._members))
        return f"<Group of {len(self)}{' on ' if self else ''}{owners if self else ''}>"

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> RRef[T]: ...

    @overload
    def __getitem__(self, index: slice) -> "Group[T]": ...

    def __getitem__(self, index: int | slice) -> "RRef[T] | Group[T]":
        found: Any = self._members[index]
        return Group(found) if isinstance(index, slice) else found

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Group) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> Any:
        return Group, (self._members,)

    def any(self) -> "AnyMember[T]":
        """Return what `remote` and `call` take for the least busy member.

            y = await aiorpc.remote(models.any()).infer(x)

        Each call chooses when it starts: the member whose worker has the fewest unanswered calls
        and streams of this process, ties in turn. Lost workers and replaced processes are skipped.
        A member whose calls raise is passed over for some choices, for more after each failure in a
        row. A call that was not sent, or whose queue (`max_pending`) is full, goes to another
        member; one that may have run is not retried.

        Raises:
            ValueError: if the group is empty.
            QueueFull: from the call, if the queues of all members are full.
            WorkerLost: from the call, if no member is left.
        """
        self._check_not_empty("any()")
        return AnyMember(self, lambda: self)

    def _map(
        self, method: Callable[..., Any], iterables: Sequence[Items[Any]], options: MapOptions
    ) -> MapResults[Any]:
        self._check_not_empty("map()")
        return MapResults(self._members, method, iterables, options)

    def _check_not_empty(self, what: str) -> None:
        if not self._members:
            raise ValueError(f"{what} needs a member; the Group is empty")


def _identity(member: Any) -> Any:
    return member if isinstance(member, Supervised) else identity(member)


async def create_on(
    workers: Sequence[str], factory: Callable[..., Any], arguments: Arguments
) -> list[RRef[Any]]:
    """Make an object on each of these workers, concurrently; return their RRefs.

    Raises:
        GroupError: if some fail.
    """
    target = CreateTarget(factory)
    rrefs = await GroupCall[Any, Any](workers, lambda _: target, *arguments)
    if isinstance(factory, type):
        for rref in rrefs:
            note_class(rref, factory)
    return rrefs


# ── the least busy member ───────────────────────────────────────────────────────────────────────


NO_REFUSALS: Mapping[Any, RpcError] = {}


class AnyMember(Generic[T]):
    """The least busy member of a group. Made by `Group.any`, for `remote` and `call`.

    `now` returns the members of that moment.
    """

    __slots__ = ("_group", "_now")

    __aiorpc_stands_for__ = True

    def __init__(self, group: Collection[RRef[T]], now: Callable[[], Group[T]]) -> None:
        self._group = group
        self._now = now

    if not TYPE_CHECKING:
        __getattr__ = refuse_attribute

    def __repr__(self) -> str:
        return f"<any member of {self._group!r}>"

    def __reduce__(self) -> Any:
        return type(self._group).any, (self._group,)  # type: ignore[attr-defined]

    def _choose(self, refusals: Mapping[Any, RpcError]) -> tuple[Group[T], int]:
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
        if group._has_supervised:
            loads = [_load(pool, member) for member in group]
        else:
            loads = [*map(pool.load, [owner_name(member) for member in group])]
        if refusals:
            loads = _without(refusals, group, loads)
        chosen = group._least_busy.choose(loads)
        if chosen is None and group._has_supervised:
            loads = [0 if _may_return(each) else None for each in group]
            chosen = group._least_busy.choose(_without(refusals, group, loads))
        if chosen is None:
            raise [*refusals.values(), _none_left(pool, group)][0]
        return group, chosen


def _without(
    refusals: Mapping[Any, RpcError], group: Group[Any], loads: Sequence[int | None]
) -> list[int | None]:
    """Return the loads, None for a member that did not take the call."""
    keys = ((owner_name(each), _identity(each)) for each in group)
    return [
        None if any(key in refusals for key in of_member) else load
        for of_member, load in zip(keys, loads, strict=True)
    ]


def _none_left(pool: ConnectionPool, group: Group[Any]) -> WorkerGone:
    owners = [pool.worker_of(owner_name(member)) for member in group]
    if lost := [each for each in owners if not pool.has_left(each)]:
        return WorkerLost(lost[0], "no member of the group is left", may_have_run=False)
    return WorkerLeft(owners[0], f"so have all members of {group!r}", may_have_run=False)


def _load(pool: ConnectionPool, member: Any) -> int | None:
    if isinstance(member, Supervised):
        return member._load()
    return pool.load(owner_name(member))


def _may_return(member: Any) -> bool:
    return isinstance(member, Supervised) and member._may_return()


def _is_refusal(exc: Exception) -> TypeGuard[RpcError]:
    """Return whether a member did not take a call: it was not sent, or its queue is full."""
    return (isinstance(exc, QueueFull) or is_own(exc)) and not exc.may_have_run


class AnyCall(SupervisedCall):
    """A call of the least busy member of a group, which it chooses when it starts."""

    __slots__ = ("_any", "_chosen")

    def __init__(
        self,
        any_member: AnyMember[Any],
        target: MethodTarget | BoundTarget | MakeTarget,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None = None,
    ) -> None:
        self._any = any_member
        self._chosen: tuple[Group[Any], int]
        RemoteCall.__init__(self, "", target, timeout, *args, **kwargs)

    def _run(self) -> Generator[Any, Any, Any]:
        steps, due = self._steps, None if self._timeout is None else deadline_in(self._timeout)
        refusals: dict[Any, RpcError] = {}  # of those that did not take the call
        while True:
            is_supervised = self._choose(refusals)
            run = SupervisedCall._run if is_supervised else RemoteCall._run
            try:
                found = yield from run(self)
            except Exception as exc:
                self._note(has_failed=True)
                if not _is_refusal(exc):
                    raise
                group, position = self._chosen
                member = group[position]
                is_full = isinstance(exc, QueueFull)
                refusals[_identity(member) if is_full else owner_name(member)] = exc
                self._steps, self._timeout = steps, time_left(due)  # it is not over
            else:
                self._note(has_failed=False)
                return found

    def _note(self, *, has_failed: bool) -> None:
        group, position = self._chosen
        if has_failed:
            group._least_busy.fail(position, len(group))
        else:
            group._least_busy.succeed(position)

    def _iterate(self, *, enters: bool) -> "AnyStream":  # type: ignore[override]
        is_supervised = self._steps is None and self._choose()
        iterate = super()._iterate if is_supervised else super(SupervisedCall, self)._iterate
        return AnyStream(iterate(enters=enters), self._note)

    def _choose(self, refusals: Mapping[Any, RpcError] = NO_REFUSALS) -> bool:
        """Choose the member; return whether it is supervised."""
        self._chosen = group, position = self._any._choose(refusals)
        member: Any = group[position]
        if isinstance(member, Supervised):
            self._supervised = member
            return True
        self._worker, self._target = member, target_on(self._target, member)
        return False


class AnyStream(AsyncIterator[Any]):
    """The items of a remote generator of the least busy member, whose end is noted."""

    def __init__(self, stream: RemoteStream | SupervisedStream, note: Callable[..., None]) -> None:
        self._stream = stream
        self._note = note

    def __repr__(self) -> str:
        return repr(self._stream)

    async def __anext__(self) -> Any:
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            self._note(has_failed=False)
            raise
        except Exception:
            self._note(has_failed=True)
            raise

    def _has_item(self) -> bool:
        return self._stream._has_item()

    def raise_failure(self) -> None:
        """Raise what has ended the stream before its consumer: a deadline, or a loss."""
        self._stream.raise_failure()

    async def aclose(self) -> None:
        """Close the remote generator: its `finally` runs. `break` does the same."""
        await self._stream.aclose()
