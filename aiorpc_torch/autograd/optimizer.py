"""Optimizers on the workers that own the parameters, and one that calls all of them.

torch.optim's classes are used as they are.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._client.api import call, create
from .._client.pool import current as current_pool
from .._client.proxies import RemoteProxy
from .._handles.handles import of_handle
from .._torch.compat import RRef, RRefBase, get_gradients
from .._torch.rrefs import owner_name
from ..errors import safe_str
from .context import Context, unrecorded

# ── on the owners ───────────────────────────────────────────────────────────────────────────────

# One step at a time: a step sets `.grad`, and another step may be of the same parameters.
_step_lock = threading.Lock()


class LocalOptimizer:
    """An optimizer of parameters that this worker owns."""

    def __init__(
        self, optimizer: type[Optimizer], rrefs: Sequence[RRef[Tensor]], options: dict[str, Any]
    ) -> None:
        self._parameters = [rref.local_value() for rref in rrefs]
        for each in self._parameters:
            if not isinstance(each, Tensor):
                kind = type(each).__name__
                raise TypeError(f"params must be RRefs of tensors, got one of a {kind}")
        self._optimizer = optimizer(self._parameters, **options)

    def step(self, context: int) -> None:
        """Step with the gradients of a context; parameters without a gradient stay as they are."""
        with _step_lock:
            try:
                gradients = get_gradients(context)
            except RuntimeError as exc:
                if "find autograd context" not in safe_str(exc):
                    raise
                gradients = {}  # no call in it has reached this worker (torch 2.13, 2.15)
            before = [parameter.grad for parameter in self._parameters]
            try:
                for parameter in self._parameters:
                    parameter.grad = gradients.get(parameter)
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(self._parameters, before, strict=True):
                    parameter.grad = gradient

    def set(self, options: dict[str, Any]) -> None:
        """Change options of all parameter groups."""
        known = self._optimizer.defaults
        if unknown := options.keys() - known.keys():
            raise ValueError(
                f"{type(self._optimizer).__name__} has no option {', '.join(sorted(unknown))}; "
                f"its options are {', '.join(known)}"
            )
        with _step_lock:
            for group in self._optimizer.param_groups:
                group.update(options)


def _rrefs(module: Any) -> list[RRef[Tensor]]:
    if not callable(getattr(module, "parameters", None)):
        raise TypeError(f"module must have parameters(), got a {type(module).__name__}")
    return [RRef(parameter) for parameter in module.parameters()]


# ── on the caller ───────────────────────────────────────────────────────────────────────────────


async def parameter_rrefs(
    module: "torch.nn.Module | RRef[Any] | RemoteProxy[Any]",
) -> list[RRef[Tensor]]:
    """Return RRefs of `module.parameters()`, in this order, for a `DistributedOptimizer`.

    Args:
        module: a module of this worker, or an RRef of a module, or `remote` of one.

    Raises:
        TypeError: if `module` has no `parameters()`.
        NotInWorld: if this process is in no world.
    """
    current_pool()
    module = of_handle(module)
    if not isinstance(module, RRefBase):
        return _rrefs(module)
    with unrecorded():
        return await call(module, _rrefs)


class DistributedOptimizer:
    """An optimizer of parameters on many workers, with one `torch.optim` optimizer on each.

    params = await aiorpc.autograd.parameter_rrefs(rref)
    opt = await aiorpc.autograd.DistributedOptimizer.create(torch.optim.SGD, params, lr=0.05)
    async with aiorpc.autograd.context() as ctx:
        ...
        await opt.step(ctx)
    """

    _optimizers: Sequence[RRef[LocalOptimizer]]
    _name: str

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "the constructor cannot wait for other workers: write `await DistributedOptimizer."
            "create(torch.optim.SGD, params, lr=0.1)`"
        )

    def __repr__(self) -> str:
        owners = ", ".join(owner_name(each) for each in self._optimizers)
        return f"<DistributedOptimizer {self._name} on {owners}>"

    @classmethod
    async def create(
        cls, optimizer: type[Optimizer], params: Iterable[RRef[Tensor]], **options: Any
    ) -> "DistributedOptimizer":
        """Make `optimizer(parameters, **options)` on each worker that owns some of `params`.

        Args:
            optimizer: class of `torch.optim`, or one like them, importable on the owners. Its
                `step` is called without arguments.
            params: RRefs of tensors that require gradients, as `parameter_rrefs` returns them.
            options: arguments of the optimizer.

        Raises:
            TypeError, ValueError: if `params` is empty, or contains other than RRefs of tensors.
                Exceptions of the class itself are raised as they are.
            NotInWorld: if this process is in no world.
        """
        owners: dict[str, list[RRef[Tensor]]] = {}
        for rref in params:
            if not isinstance(rref, RRefBase):
                raise TypeError(f"params must be RRefs of parameters, got {rref!r}")
            owners.setdefault(owner_name(rref), []).append(rref)
        if not owners:
            raise ValueError("params must not be empty")
        made = await _all(
            create(owner, LocalOptimizer, optimizer, rrefs, options)
            for owner, rrefs in owners.items()
        )
        found = cls.__new__(cls)
        found._optimizers, found._name = made, optimizer.__name__
        return found

    async def step(self, context: Context) -> None:
        """Step on every owner, with the gradients that `context.backward` has computed.

        A parameter without a gradient in this context stays as it is, and `.grad` is not touched.

        Args:
            context: open autograd context.

        Raises:
            RuntimeError: if the context is not open. Exceptions of a step are raised as they are.
            TypeError: if `context` is not a context.
        """
        if not isinstance(context, Context):
            raise TypeError(f"step() takes the context itself, not its number, got {context!r}")
        context_id = context.id
        await _all(call(each, LocalOptimizer.step, context_id) for each in self._optimizers)

    async def set(self, **options: Any) -> None:
        """Change options of the optimizers while training: `await opt.set(lr=0.01)`.

        Raises:
            ValueError: if the optimizers have no such option.
        """
        await _all(call(each, LocalOptimizer.set, options) for each in self._optimizers)


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await unrecorded calls; once all have ended, return the results or raise the first error."""
    first, *others = calls
    with unrecorded():
        if not others:  # without a task
            return [await first]
        results = await asyncio.gather(first, *others, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
