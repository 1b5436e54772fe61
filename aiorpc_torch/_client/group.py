"""Groups: one call to many objects, or to the least busy of them."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from .._handles.handles import described, of_handle
from .._handles.mistakes import await_hint, refuse_attribute
from .._torch.compat import RRef, RRefBase
from .._torch.rrefs import owner_name
from .._wire.shared_arguments import EachValue
from .group_map import Mappable
from .group_schedule import LeastBusy
from .routes import AnyMember, identity_of
from .supervised import Supervised

if TYPE_CHECKING:
    from .proxies import RemoteProxy, SupervisedProxy

T = TypeVar("T")
V = TypeVar("V")


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
    return cast(V, EachValue(values))


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

    __slots__ = ("__weakref__", "_key", "_least_busy", "_members")

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
        self._least_busy = LeastBusy()
        self._key = tuple(map(identity_of, self._members))

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

    def any(self) -> AnyMember[T]:
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
        if not self._members:
            raise ValueError("any() needs a member; the Group is empty")
        return AnyMember(self, lambda: self)
