"""`@batched`: a function that is called once for many callers.

A call binds its arguments and joins the queue of its instance; the queue runs the batches.
"""

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Literal, TypedDict, Unpack, overload

from .._aio.identity import WeakIdentityDict
from .._context.recording import current_record
from .._endpoint.entry_points import serving
from .._endpoint.runtime import (
    in_event_loop,
    mark_runs_on_loop,
    run_for_torch_client,
    warn_if_switch_is_void,
)
from .._torch.compat import RRefBase
from .._turns.turns import METHOD_TURNS, is_limited
from .._wire.by_value import refuse_by_value
from .._wire.messages import Arguments
from .._wire.targets import GENERATOR_HINT
from ._typing import ListDecorator, RoundDecorator, StackDecorator
from .collate import Collation, Device
from .function import BatchFunction, is_generator, traits_function
from .policies import Count, Fill, Policy, Round, Seconds, has_functions
from .queue import LOCAL_CALLER, BatchQueue, ResultCallback
from .stats import new_counters
from .streams import LocalItems, LocalStream


class FillOptions(TypedDict, total=False):
    """The arguments of a `Fill`, in place of one."""

    max_size: Count
    max_wait: Seconds
    max_concurrent_batches: Count
    max_pending: Count | None
    key: Callable[..., Hashable] | None
    weight: Callable[..., float] | None
    max_weight: float | Callable[[Any], float] | None


@overload
def batched(
    policy: Policy | None = None,
    *,
    stack: Literal[True],
    concat: Literal[False] = False,
    pad_to: Sequence[int] | None = None,
    device: Device = None,
    **fill: Unpack[FillOptions],
) -> StackDecorator: ...


@overload
def batched(
    policy: Policy | None = None,
    *,
    stack: Literal[False] = False,
    concat: Literal[True],
    pad_to: Sequence[int] | None = None,
    device: Device = None,
    **fill: Unpack[FillOptions],
) -> StackDecorator: ...


@overload
def batched(policy: Round, *, stack: Literal[False] = False) -> RoundDecorator: ...


@overload
def batched(
    policy: Fill | None = None, *, stack: Literal[False] = False, **fill: Unpack[FillOptions]
) -> ListDecorator: ...


def batched(
    policy: Policy | None = None,
    *,
    stack: bool = False,
    concat: bool = False,
    pad_to: Sequence[int] | None = None,
    device: Device = None,
    **fill: Any,
) -> Any:
    """Call the decorated function once for many callers.

    A caller passes one item: `await remote(agent).select(state)`. The function gets one list for
    each parameter, in order of arrival. With a `Fill` it returns a list or tuple of the same
    length, or `Broadcast(value)`. Or it returns a tree of tensors and arrays: their first dimension
    is the batch. With a `Round` all callers get what it returns, whatever that is, or one value
    each of `each(values)`. An exception *instance* among the results is raised for that caller
    alone; an exception that the function raises is raised for each caller.

    A caller of a generator iterates: `async for token in remote(model).generate(prompt)`. Each step
    yields what a function returns, for the callers of the batch. An instance of StopAsyncIteration
    ends the iteration of its caller. The generator is closed when all have ended or left.

        @aiorpc.batched(max_size=64, max_wait=0.002)
        async def select(self, states: list[Tensor]) -> list[int]: ...

        @aiorpc.batched(max_size=64, stack=True, device="cuda")
        def infer(self, states: Tensor) -> Tensor: ...  # [B, ...] in, [B, ...] out

        @aiorpc.batched(concat=True, max_weight=256, pad_to=(64, 256))
        def embed(self, rows: Tensor) -> Tensor: ...  # [n, ...] of each caller, [n, ...] back

        @aiorpc.batched(max_size=16)
        async def generate(self, prompts: list[str]) -> AsyncIterator[list[Any]]: ...

        @aiorpc.batched(aiorpc.Round(size=5, quorum=4, timeout=10.0))
        def update(self, grads: list[Grads]) -> list[Tensor]: ...  # for all five

    An `async def` function runs on the event loop, a plain `def` in a thread; calls that arrive
    meanwhile form the next batch. Each instance has its own queue. A call leaves the queue if its
    caller is cancelled, times out or is lost before the batch starts. Plain torch clients can call
    the function with `rpc_sync` and `rref.rpc_sync()`. Works on methods, static methods
    (`@staticmethod` outside) and functions.

    Args:
        policy: A `Fill` or a `Round`. In place of a `Fill`, its arguments: `max_size`, the most
            calls in a batch (default: as many as rows, by `max_weight` with `concat` or by
            `pad_to`); `max_wait`, the seconds that the oldest call waits for others
            (default: 0.0); `max_concurrent_batches`, the batches that run at once (default: 1);
            `max_pending`, the most calls that wait (default: None, no limit); `key`, `weight` and
            `max_weight`, which `Fill` describes.
        stack: Pass each parameter stacked: a tensor with the batch as its first dimension, or a
            dict, tuple, list or dataclass of such. Arrays and numbers come as tensors too.
            Calls of different structure, dtypes or shapes are in separate batches. The function may
            then return a tuple of tensors as well.
        concat: Join each parameter along its first dimension instead: each caller passes any
            number of rows and gets as many. A call weighs as much as it has rows.
        pad_to: Ascending numbers of rows. With `stack` or `concat`, repeat the last row until the
            batch has one of these numbers, and drop the results of the repetitions. With
            `concat`, the default of `max_weight` is the largest (default: None, no padding).
        device: Device of the tensors, one copy each, also of arrays; results are copied back to the
            CPU, one copy each (default: None, where the tensors are).

    Raises:
        TypeError, ValueError: at the decoration, if the policy or the signature is invalid; at the
            call, if the arguments do not fit the function's parameters or cannot be stacked.
        QueueFull: at the call, if `max_pending` calls wait already.
        RoundTimeout: at the call, if too few calls joined its round in time.
        BatchContractError: at the call, if the function does not return one result per caller.
    """
    if policy is None:
        if "max_concurrency" in fill:
            raise TypeError("max_concurrency= is called max_concurrent_batches=")
        if "max_size" not in fill:
            fill["max_size"] = _most_calls(stack, concat, pad_to, fill.get("max_weight"))
        policy = Fill(**fill)
    elif not isinstance(policy, Policy):
        raise TypeError(
            "batched needs arguments: @batched(max_size=64), or a Fill or a Round, as in "
            f"@batched(Round(4)), got {policy!r}"
        )
    elif fill:
        raise TypeError("batched takes a policy or the arguments of a Fill, not both")
    if stack and concat:
        raise TypeError("batched takes stack=True or concat=True, not both")
    collation = None
    if stack or concat:
        collation = Collation(concat, () if pad_to is None else _check_sizes(pad_to), device)
        policy = _fit(policy, collation)
    elif pad_to is not None or device is not None:
        name = "device" if pad_to is None else "pad_to"
        raise TypeError(f"{name}= requires stack=True or concat=True")
    return functools.partial(Batched, policy=policy, collation=collation)


def _most_calls(stack: bool, concat: bool, pad_to: Sequence[int] | None, max_weight: Any) -> Any:
    """Return the default of `max_size`: as many calls as rows, where those are bounded."""
    if concat and callable(max_weight):
        return max_weight
    if concat and isinstance(max_weight, int | float):
        return max(1, int(max_weight)) if math.isfinite(max_weight) else 1  # `Fill` checks it
    if (stack or concat) and pad_to is not None:
        return _check_sizes(pad_to)[-1]
    more = ", max_weight= or pad_to=" if concat else ""
    raise TypeError(f"batched needs max_size={more}, or a Fill or a Round")


def _check_sizes(pad_to: Sequence[int]) -> tuple[int, ...]:
    wanted = "pad_to must be ascending ints of at least 1, such as (8, 16, 32)"
    if not isinstance(pad_to, Sequence) or any(type(each) is not int for each in pad_to):
        raise TypeError(f"{wanted}, got {pad_to!r}")
    sizes = tuple(pad_to)
    if not sizes or sizes[0] < 1 or sizes != tuple(sorted({*sizes})):
        raise ValueError(f"{wanted}, got {pad_to!r}")
    return sizes


def _fit(policy: Policy, collation: Collation) -> Policy:
    """Return the policy, whose batches fit into the largest of `pad_to`.

    A number that is a function of the object is checked as a batch starts.
    """
    if isinstance(policy, Round):
        if collation.pad_to:
            raise TypeError(
                "pad_to= requires a Fill: the result of a Round is for all callers, and would "
                "include the padding"
            )
        return policy
    if collation.concat and policy.weight is not None:
        raise TypeError("with concat=True a call weighs as much as it has rows: leave out weight=")
    if not collation.pad_to:
        return policy
    largest = collation.pad_to[-1]
    if collation.concat and policy.max_weight is None:
        return replace(policy, max_weight=largest)
    name = "max_weight" if collation.concat else "max_size"
    limit: Any = getattr(policy, name)
    if not callable(limit) and limit > largest:
        raise ValueError(
            f"{name}={limit} is more than the largest of pad_to={collation.pad_to}: lower {name}=, "
            "or add a larger size"
        )
    return policy


class Batched:
    """A `@batched` function. Local and remote calls join the same queue.

    It is a descriptor, not a closure, since only a descriptor knows whether it is a method: torch
    clients call `PS.update` with an RRef as `self`.
    """

    __qualname__: str

    def __init__(
        self, function: Callable[..., Any], policy: Policy, collation: Collation | None
    ) -> None:
        functools.update_wrapper(self, function)
        _check_signature(function)
        if isinstance(policy, Round) and is_generator(function):
            raise TypeError(
                f"{self.__qualname__} is a generator, and a Round gives one result to all of its "
                "callers: give it a Fill"
            )
        warn_if_switch_is_void(function)
        self._function = function
        self._policy = policy
        self._collation = collation
        self._traits_of = traits_function(policy, self.__qualname__, collation)
        has_rows = collation is not None and collation.concat
        self._counters = new_counters(self.__qualname__, policy, has_rows=has_rows)
        self._is_method = False
        self._queues: WeakIdentityDict[Any, BatchQueue] = WeakIdentityDict()
        mark_runs_on_loop(self)
        # torch waits for the returned Future if this attribute exists (rpc/functions.py).
        self._wrapped_async_rpc_function = function

    def __repr__(self) -> str:
        return f"<batched {self.__qualname__} {self._policy}>"

    def __reduce__(self) -> str:
        refuse_by_value(self)
        return self.__qualname__  # by reference, like a function

    def __aiorpc_reduce__(self) -> Any:
        """Return the reduction by value. The state comes later: the function may refer to this."""
        state = self._function, self._policy, self._collation, self._is_method
        return object.__new__, (Batched,), state, None, None, _set_batched_state

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_method = True  # not called under @staticmethod

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        self._is_method = True
        return MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        instance = None
        if self._is_method:
            instance, args = self._take_instance(args)
        bound = self._batch_function.bind(args, kwargs)
        if in_event_loop():
            server = serving()
            caller = LOCAL_CALLER if server is None else server.name
            queue = self._queue(instance)
            if not self._batch_function.is_generator:
                return queue.submit(instance, bound, caller)

            def join(items: LocalItems) -> Callable[[], object]:
                return queue.join(instance, bound, items.settle, caller, items).cancel

            return LocalStream(join, self.__qualname__)
        if self._batch_function.is_generator:
            name = self.__qualname__
            raise TypeError(f"{name}, called without an event loop, is {GENERATOR_HINT}")

        # A torch thread, for a plain torch client: that one needs a torch Future.
        def submit() -> Any:
            return self._queue(instance).submit(instance, bound, "a plain torch client")

        submit.__qualname__ = self.__qualname__  # the name of the call
        future: Any = run_for_torch_client(submit)
        return future

    def __aiorpc_join__(
        self,
        instance: Any,
        on_result: ResultCallback,
        receiver: Any,
        arguments: Arguments,
        caller: str,
    ) -> Callable[[], object]:
        """Enqueue a call from another worker, without a future or task; return how to cancel it.

        `_server.calls.batch_joiner` finds this by its name: the packages do not import each other.
        """
        if receiver is None and self._batch_function.is_generator:
            raise TypeError(f"{self.__qualname__} is {GENERATOR_HINT}")
        args, kwargs = arguments
        if self._is_method and instance is None:
            instance, args = self._take_instance(args)
        if kwargs or len(args) != self._batch_function.positional:
            args = self._batch_function.bind(args, kwargs)
        queue = self._queues.get(self if instance is None else instance)
        if queue is None:
            queue = self._queue(instance)
        if isinstance(self._policy, Round) and (recording := current_record()) is not None:
            recording.drop_graph(self.__qualname__)  # a round is of many contexts
        return queue.join(instance, args, on_result, caller, receiver).cancel

    @property
    def __aiorpc_streams__(self) -> bool:
        """Return whether the function is a generator, whose items are iterated."""
        return self._batch_function.is_generator

    def __aiorpc_running__(self, instance: Any) -> list[Any]:
        """Return the batches that run for an object."""
        queue = self._queues.get(instance)
        return [] if queue is None else queue.running()

    def _take_instance(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if not args:
            raise TypeError(f"{self.__qualname__} is a method: call it on an instance")
        instance, *rest = args
        # `rpc_sync(owner, PS.update, args=(rref, grads))` passes the instance as an RRef.
        if isinstance(instance, RRefBase):
            instance = instance.local_value()
        return instance, tuple(rest)

    @functools.cached_property
    def _batch_function(self) -> BatchFunction:
        return BatchFunction(
            self._function,
            is_method=self._is_method,
            collation=self._collation,
            for_all=isinstance(self._policy, Round),
        )

    def _queue(self, instance: Any) -> BatchQueue:
        # A plain function has one queue, while the function itself is alive.
        owner = self if instance is None else instance
        if (known := self._queues.get(owner)) is not None:
            return known
        if not self._is_method and has_functions(self._policy):
            raise TypeError(
                f"{self.__qualname__} is no method: a number of its policy cannot be a function of "
                f"the object, got {self._policy}"
            )
        queue = BatchQueue(
            self._batch_function,
            self._policy,
            self._traits_of,
            self._counters,
            has_limit=instance is not None and is_limited(instance),
        )
        try:
            self._queues.set(owner, queue)
        except TypeError:
            raise TypeError(
                f"@batched needs weak references to its instances: add '__weakref__' to the "
                f"__slots__ of {type(owner).__name__}"
            ) from None
        return queue


def _set_batched_state(new: Batched, state: tuple[Any, ...]) -> None:
    *given, is_method = state
    new.__init__(*given)  # type: ignore[misc]
    new._is_method = is_method


def _check_signature(function: Callable[..., Any]) -> None:
    if not callable(function) or isinstance(function, staticmethod | classmethod | type):
        raise TypeError(f"batched decorates a function (under @staticmethod), got {function!r}")
    if METHOD_TURNS in getattr(function, "__dict__", ()):
        raise TypeError(
            f"{function.__qualname__} has max_concurrency: use batched(max_concurrent_batches=)"
        )
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"a batched function gets one list per parameter: replace {parameter} of "
                f"{function.__qualname__} by named parameters"
            )
