"""`@batched`: a method that is called once for many callers.

Binds each call's arguments and finds the queue of its instance. When a batch leaves is the
batcher's to decide, running it is the queue's, and of RPC this room knows one name: the way in for
plain torch clients.
"""

import functools
import inspect
import weakref
from collections.abc import Awaitable, Callable
from types import MethodType
from typing import Any

from torch._C._distributed_rpc import PyRRef

from ._batcher import Fill, Round
from ._doors import answer_torch, on_a_loop
from ._jobs import wants_loop
from ._message import Work
from ._queue import Body, Queue, Settle

__all__ = ("batched",)

Policy = Fill | Round


def batched(
    policy: Policy | None = None, *, max_size: int | None = None, max_wait: float = 0.0
) -> "Callable[[Callable[..., Any]], Batched]":
    """Call the decorated function once for many callers.

    The call is per item, `await remote(agent).select(state)`; the body gets one list for each
    parameter, in order of arrival, and returns a list or tuple of the same length, a tensor whose
    first dimension is the batch, or `Broadcast(value)`. An exception *instance* among the results
    is raised for that caller alone; an exception that the body raises is raised for each.

        @batched(max_size=64, max_wait=0.002)
        async def select(self, states: list[Tensor]) -> list[int]: ...

        @batched(Round(size=5))
        def update(self, grads: list[Grads]): ...; return Broadcast(self.parameters())

    An `async def` body runs on the loop, a plain `def` in a thread; one batch at a time, and what
    arrives meanwhile forms the next. Each instance has its own queue. A caller that is cancelled
    before its batch leaves is not in it. Plain torch clients may call it too, with `rpc_sync` and
    `rref.rpc_sync()`. Works on methods, static methods (`@staticmethod` outside) and functions.

    Args:
        policy: a `Fill` or a `Round`; or, for a `Fill`, its arguments:
        max_size: most callers in a batch.
        max_wait: seconds that the first caller waits for company while nothing runs.

    Raises:
        TypeError, ValueError: at the decoration, for a policy or a signature that cannot be; at
            the call, for arguments that do not fit the body's parameters.
    """
    if policy is None:
        if max_size is None:
            raise TypeError("batched needs max_size=, a Fill or a Round")
        policy = Fill(max_size, max_wait)
    elif not isinstance(policy, Policy):
        raise TypeError(
            f"batched takes a Fill or a Round first, as in @batched(max_size=64), not {policy!r}"
        )
    elif max_size is not None or max_wait:
        raise TypeError("batched takes a policy or the arguments of a Fill, not both")
    return functools.partial(Batched, policy=policy)


class Batched:
    """A `@batched` function. Awaited locally it joins the same queue as remote calls do."""

    __qualname__: str

    def __init__(self, body: Callable[..., Any], policy: Policy) -> None:
        functools.update_wrapper(self, body)
        _check_signature(body)
        self._function = body
        self._policy = policy
        self._is_method = False
        self._queues: dict[int, tuple[weakref.ref[Any], Queue]] = {}
        wants_loop(self)
        # What torch looks for to wait for the Future that is returned (rpc/functions.py).
        self._wrapped_async_rpc_function = body

    def __repr__(self) -> str:
        return f"<batched {self.__qualname__} {self._policy}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # by reference, as a function is pickled

    def __set_name__(self, owner: type, name: str) -> None:
        self._is_method = True  # a staticmethod around it does not pass this on

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        self._is_method = True
        return MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        instance = None
        if self._is_method:
            instance, args = self._instance(args)
        row = self._body.bind(args, kwargs)
        if on_a_loop():
            return self._queue(instance).ask(instance, row)
        # On a thread of torch's, called by a plain torch client, who wants a torch Future.
        joined: Any = answer_torch(lambda: self._queue(instance).ask(instance, row))
        return joined  # type: ignore[no-any-return]

    def _aiorpc_join(self, instance: Any, settle: Settle, work: Work) -> Callable[[], object]:
        """How a call from another worker joins: without a future and a task of its own."""
        args, kwargs = work
        if self._is_method and instance is None:
            instance, args = self._instance(args)
        place = self._queue(instance).join(instance, self._body.bind(args, kwargs), settle)
        return place.leave

    def _instance(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if not args:
            raise TypeError(f"{self.__qualname__} is a method: it is called on an instance")
        instance, *rest = args
        # `rpc_sync(owner, PS.update, args=(rref, grads))`: torch's way to name the instance.
        if isinstance(instance, PyRRef):
            instance = instance.local_value()
        return instance, tuple(rest)

    @functools.cached_property
    def _body(self) -> Body:
        return Body(self._function, is_method=self._is_method)

    def _queue(self, instance: Any) -> Queue:
        # A function has one queue, for as long as the function itself lives.
        owner = self if instance is None else instance
        key = id(owner)
        known = self._queues.get(key)
        if known is not None and known[0]() is owner:
            return known[1]
        # Weakly, by identity: an instance may define equality and forbid hashing, and a queue must
        # not keep it alive.
        queue = Queue(self._body, self._policy)
        self._queues[key] = (_weak(owner, self._queues, key), queue)
        return queue


def _weak(owner: Any, queues: dict[int, Any], key: int) -> "weakref.ref[Any]":
    try:
        return weakref.ref(owner, lambda _: queues.pop(key, None))
    except TypeError:
        raise TypeError(
            f"@batched needs weak references to its instances: add '__weakref__' to the "
            f"__slots__ of {type(owner).__name__}"
        ) from None


def _check_signature(body: Callable[..., Any]) -> None:
    if not callable(body) or isinstance(body, staticmethod | classmethod | type):
        raise TypeError(f"batched decorates a function (under @staticmethod), not {body!r}")
    for parameter in inspect.signature(body).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"a batched body gets one list for each parameter, and {parameter} of "
                f"{body.__qualname__} stands for any number of them"
            )
