"""`@batched`: a method that is called once for many callers.

Binds each call's arguments and finds the queue of its instance. When a batch leaves is the
batcher's to decide, running it is the queue's, and of RPC this room knows one name: the way in for
plain torch clients.
"""

import functools
import inspect
import weakref
from collections.abc import Awaitable, Callable, Hashable
from types import MethodType
from typing import Any, Literal, overload

from .._protocol.endpoints import serving
from .._protocol.messages import Work
from .._protocol.runtime import answer_torch, on_a_loop, wants_loop
from .._torch.compat import RRefBase
from ._typing import ListDecorator, StackDecorator
from .collate import Device
from .function import Body
from .policies import Fill, Policy
from .queue import Queue, Settle
from .stats import new_tally
from .traits import admission

__all__ = ("batched",)

Function = Callable[..., Any]


@overload
def batched(
    policy: Policy | None = None,
    *,
    max_size: int | None = None,
    max_wait: float = 0.0,
    max_concurrency: int = 1,
    max_pending: int | None = None,
    key: Callable[..., Hashable] | None = None,
    weight: Callable[..., float] | None = None,
    max_weight: float | None = None,
    stack: Literal[True],
    device: Device = None,
) -> StackDecorator: ...


@overload
def batched(
    policy: Policy | None = None,
    *,
    max_size: int | None = None,
    max_wait: float = 0.0,
    max_concurrency: int = 1,
    max_pending: int | None = None,
    key: Callable[..., Hashable] | None = None,
    weight: Callable[..., float] | None = None,
    max_weight: float | None = None,
    stack: Literal[False] = False,
) -> ListDecorator: ...


def batched(
    policy: Policy | None = None, *, stack: bool = False, device: Device = None, **fill: Any
) -> Any:
    """Call the decorated function once for many callers.

    The call is per item, `await remote(agent).select(state)`; the body gets one list for each
    parameter, in order of arrival, and returns a list or tuple of the same length, a tensor (or a
    dict or dataclass of tensors) whose first dimension is the batch, or `Broadcast(value)`. An
    exception *instance* among the results is raised for that caller alone; an exception that the
    body raises is raised for each.

        @batched(max_size=64, max_wait=0.002)
        async def select(self, states: list[Tensor]) -> list[int]: ...

        @batched(max_size=64, stack=True, device="cuda")
        def infer(self, states: Tensor) -> Tensor: ...  # [B, ...] in, [B, ...] out

        @batched(Round(size=5, quorum=4, timeout=10.0))
        def update(self, grads: list[Grads]): ...; return Broadcast(self.parameters())

    An `async def` body runs on the loop, a plain `def` in a thread; what arrives meanwhile forms
    the next batch. Each instance has its own queue. A caller that is cancelled, whose time is over
    or whose worker is lost before its batch leaves is not in it. Plain torch clients may call it
    too, with `rpc_sync` and `rref.rpc_sync()`. Works on methods, static methods (`@staticmethod`
    outside) and functions.

    Args:
        policy: a `Fill` or a `Round`; or, for a `Fill`, its arguments: `max_size`, `max_wait`,
            `max_concurrency`, `max_pending`, `key`, `weight` and `max_weight`.
        stack: the body gets each parameter stacked: a tensor with the batch as its first
            dimension, or a dict, tuple, list or dataclass of such. Calls whose structure, dtypes or
            shapes differ are in separate batches. It may return a tuple of tensors as well.
        device: where stacked tensors are put, with one copy each; results come back to the CPU
            with one copy each.

    Raises:
        TypeError, ValueError: at the decoration, for a policy or a signature that cannot be; at
            the call, for arguments that do not fit the body's parameters or cannot be stacked.
        QueueFull: at the call, if `max_pending` wait already.
        RoundTimeout: at the call, if its round did not come about.
        BatchContractError: at the call, if the body's answer is not one for each.
    """
    if policy is None:
        if "max_size" not in fill:
            raise TypeError("batched needs max_size=, a Fill or a Round")
        policy = Fill(**fill)
    elif not isinstance(policy, Policy):
        raise TypeError(
            f"batched takes a Fill or a Round first, as in @batched(max_size=64), not {policy!r}"
        )
    elif fill:
        raise TypeError("batched takes a policy or the arguments of a Fill, not both")
    if device is not None and not stack:
        raise TypeError("device is where stacked tensors are put: it needs stack=True")
    return functools.partial(Batched, policy=policy, stack=stack, device=device)


class Batched:
    """A `@batched` function. Awaited locally it joins the same queue as remote calls do."""

    __qualname__: str

    def __init__(self, body: Function, policy: Policy, *, stack: bool, device: Device) -> None:
        functools.update_wrapper(self, body)
        _check_signature(body)
        self._function = body
        self._policy = policy
        self._stack = stack
        self._device = device
        self._admission = admission(policy, self.__qualname__, stacked=stack)
        self._tally = new_tally(self.__qualname__, _most(policy))
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
            server = serving()
            here = "a local caller" if server is None else server.name
            return self._queue(instance).ask(instance, row, here)
        # On a thread of torch's, called by a plain torch client, who wants a torch Future.
        joined: Any = answer_torch(
            lambda: self._queue(instance).ask(instance, row, "a plain torch client")
        )
        return joined  # type: ignore[no-any-return]

    def _aiorpc_join(
        self, instance: Any, settle: Settle, work: Work, caller: str
    ) -> Callable[[], object]:
        """How a call from another worker joins: without a future and a task of its own."""
        args, kwargs = work
        if self._is_method and instance is None:
            instance, args = self._instance(args)
        row = self._body.bind(args, kwargs)
        return self._queue(instance).join(instance, row, settle, caller).leave

    def _instance(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if not args:
            raise TypeError(f"{self.__qualname__} is a method: it is called on an instance")
        instance, *rest = args
        # `rpc_sync(owner, PS.update, args=(rref, grads))`: torch's way to name the instance.
        if isinstance(instance, RRefBase):
            instance = instance.local_value()
        return instance, tuple(rest)

    @functools.cached_property
    def _body(self) -> Body:
        return Body(
            self._function,
            is_method=self._is_method,
            stacked=self._stack,
            device=self._device,
        )

    def _queue(self, instance: Any) -> Queue:
        # A function has one queue, for as long as the function itself lives.
        owner = self if instance is None else instance
        key = id(owner)
        known = self._queues.get(key)
        if known is not None and known[0]() is owner:
            return known[1]
        # Weakly, by identity: an instance may define equality and forbid hashing, and a queue must
        # not keep it alive.
        queue = Queue(self._body, self._policy, self._admission, self._tally)
        self._queues[key] = (_weak(owner, self._queues, key), queue)
        return queue


def _most(policy: Policy) -> int:
    return policy.max_size if isinstance(policy, Fill) else policy.size


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
