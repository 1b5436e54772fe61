"""Static types of `@batched` functions: `list[T] -> list[R]` is called as `T -> R`.

A generator of such lists, of up to two parameters, is called as `T -> AsyncIterator[R]`.

With a `Round`, `list[T] -> R` is called as `T -> R`. A function of more than four parameters, or
with another result than a sequence or a `Broadcast`, is typed as a function of anything. Nothing
here runs.
"""

from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from .results import Broadcast

S = TypeVar("S")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
R = TypeVar("R")
P = ParamSpec("P")
S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

_Results = Sequence[R] | Broadcast[R]
_Returned = _Results[R] | Awaitable[_Results[R]]
_Entries = Sequence[R | StopAsyncIteration] | Broadcast[R]
_Steps = AsyncIterator[_Entries[R]] | Iterator[_Entries[R]]


class BatchedFunction(Protocol[P, R_co]):
    """A function that takes one item; it returns a future, or what is iterated."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class BatchedMethod(Protocol[S_contra, P, R_co]):
    """A `BatchedFunction` of an instance, or of a function whose first parameter stands for it."""

    def __call__(self, first: S_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any) -> Callable[Concatenate[S_contra, P], R_co]: ...

    @overload
    def __get__(self, instance: S_contra, owner: Any) -> Callable[P, R_co]: ...


class ListDecorator(Protocol):
    """`@batched(max_size=64)`: takes lists, returns a sequence or a `Broadcast`, or yields some."""

    @overload
    def __call__(
        self, function: Callable[[list[A]], _Steps[R]], /
    ) -> BatchedFunction[[A], AsyncIterator[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B]], _Steps[R]], /
    ) -> BatchedFunction[[A, B], AsyncIterator[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A]], _Steps[R]], /
    ) -> BatchedMethod[S, [A], AsyncIterator[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B]], _Steps[R]], /
    ) -> BatchedMethod[S, [A, B], AsyncIterator[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A]], _Returned[R]], /
    ) -> BatchedFunction[[A], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B]], _Returned[R]], /
    ) -> BatchedFunction[[A, B], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B], list[C]], _Returned[R]], /
    ) -> BatchedFunction[[A, B, C], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B], list[C], list[D]], _Returned[R]], /
    ) -> BatchedFunction[[A, B, C, D], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A]], _Returned[R]], /
    ) -> BatchedMethod[S, [A], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B]], _Returned[R]], /
    ) -> BatchedMethod[S, [A, B], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B], list[C]], _Returned[R]], /
    ) -> BatchedMethod[S, [A, B, C], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B], list[C], list[D]], _Returned[R]], /
    ) -> BatchedMethod[S, [A, B, C, D], Future[R]]: ...
    @overload
    def __call__(self, function: Callable[..., Any], /) -> Any: ...


class RoundDecorator(Protocol):
    """`@batched(Round(4))`: takes lists, returns the result of all callers.

    `each(values)` has the type of one of its values.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[list[A]], Awaitable[R]], /
    ) -> BatchedFunction[[A], Future[R]]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], R], /) -> BatchedFunction[[A], Future[R]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[list[A], list[B]], Awaitable[R]], /
    ) -> BatchedFunction[[A, B], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B]], R], /
    ) -> BatchedFunction[[A, B], Future[R]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[list[A], list[B], list[C]], Awaitable[R]], /
    ) -> BatchedFunction[[A, B, C], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B], list[C]], R], /
    ) -> BatchedFunction[[A, B, C], Future[R]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[list[A], list[B], list[C], list[D]], Awaitable[R]], /
    ) -> BatchedFunction[[A, B, C, D], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[A], list[B], list[C], list[D]], R], /
    ) -> BatchedFunction[[A, B, C, D], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A]], Awaitable[R]], /
    ) -> BatchedMethod[S, [A], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A]], R], /
    ) -> BatchedMethod[S, [A], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B]], Awaitable[R]], /
    ) -> BatchedMethod[S, [A, B], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B]], R], /
    ) -> BatchedMethod[S, [A, B], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B], list[C]], Awaitable[R]], /
    ) -> BatchedMethod[S, [A, B, C], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B], list[C]], R], /
    ) -> BatchedMethod[S, [A, B, C], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B], list[C], list[D]], Awaitable[R]], /
    ) -> BatchedMethod[S, [A, B, C, D], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S, list[A], list[B], list[C], list[D]], R], /
    ) -> BatchedMethod[S, [A, B, C, D], Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[S], Awaitable[R]], /
    ) -> BatchedMethod[S, [], Future[R]]: ...
    @overload
    def __call__(self, function: Callable[[S], R], /) -> BatchedMethod[S, [], Future[R]]: ...
    @overload
    def __call__(self, function: Callable[..., Any], /) -> Any: ...


class StackDecorator(Protocol):
    """`@batched(max_size=64, stack=True)` or `concat=True`: takes and returns trees of tensors."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[S, P], AsyncIterator[R] | Iterator[R]], /
    ) -> BatchedMethod[S, P, AsyncIterator[R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, P], Awaitable[R]], /
    ) -> BatchedMethod[S, P, Future[R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, P], R], /
    ) -> BatchedMethod[S, P, Future[R]]: ...
