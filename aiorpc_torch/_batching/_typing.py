"""What type checkers see of a `@batched` function: `list[T] -> list[R]` is called as `T -> R`.

Up to four parameters; of a body with more, or with another answer than a sequence or a
`Broadcast`, they see a function of anything. Nothing here runs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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

_Answers = Sequence[R] | Broadcast[R]
_Given = _Answers[R] | Awaitable[_Answers[R]]


class BatchedFunction(Protocol[P, R]):
    """One item in, one result out."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[R]": ...


class BatchedMethod(Protocol[S_contra, P, R]):
    """The same, of an instance; or of a function, whose first parameter stands for it."""

    def __call__(
        self, first: S_contra, /, *args: P.args, **kwargs: P.kwargs
    ) -> "asyncio.Future[R]": ...

    @overload
    def __get__(
        self, instance: None, owner: Any
    ) -> Callable[Concatenate[S_contra, P], "asyncio.Future[R]"]: ...

    @overload
    def __get__(self, instance: S_contra, owner: Any) -> Callable[P, "asyncio.Future[R]"]: ...


class ListDecorator(Protocol):
    """`@batched(max_size=64)`: lists in, a sequence or a `Broadcast` out."""

    @overload
    def __call__(self, body: Callable[[list[A]], _Given[R]], /) -> BatchedFunction[[A], R]: ...
    @overload
    def __call__(
        self, body: Callable[[list[A], list[B]], _Given[R]], /
    ) -> BatchedFunction[[A, B], R]: ...
    @overload
    def __call__(
        self, body: Callable[[list[A], list[B], list[C]], _Given[R]], /
    ) -> BatchedFunction[[A, B, C], R]: ...
    @overload
    def __call__(
        self, body: Callable[[list[A], list[B], list[C], list[D]], _Given[R]], /
    ) -> BatchedFunction[[A, B, C, D], R]: ...
    @overload
    def __call__(self, body: Callable[[S, list[A]], _Given[R]], /) -> BatchedMethod[S, [A], R]: ...
    @overload
    def __call__(
        self, body: Callable[[S, list[A], list[B]], _Given[R]], /
    ) -> BatchedMethod[S, [A, B], R]: ...
    @overload
    def __call__(
        self, body: Callable[[S, list[A], list[B], list[C]], _Given[R]], /
    ) -> BatchedMethod[S, [A, B, C], R]: ...
    @overload
    def __call__(
        self, body: Callable[[S, list[A], list[B], list[C], list[D]], _Given[R]], /
    ) -> BatchedMethod[S, [A, B, C, D], R]: ...
    @overload
    def __call__(self, body: Callable[..., Any], /) -> Any: ...


class StackDecorator(Protocol):
    """`@batched(max_size=64, stack=True)`: each nest gains a dimension on its way in, and loses it
    on its way out.
    """

    @overload
    def __call__(
        self, body: Callable[Concatenate[S, P], Awaitable[R]], /
    ) -> BatchedMethod[S, P, R]: ...
    @overload
    def __call__(self, body: Callable[Concatenate[S, P], R], /) -> BatchedMethod[S, P, R]: ...
