"""Optimizers beside the parameters that they change, and one that speaks to all of them.

Knows contexts by their number, and calls; torch.optim's classes are used as they are.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.rpc import RRef
from torch.optim import Optimizer

from .._client.api import call, create
from .._client.pool import current as world
from .._torch.compat import RRefBase, get_gradients
from ..errors import said
from .context import Context, outside

__all__ = ("DistributedOptimizer", "parameter_rrefs")


# ── on the owners ───────────────────────────────────────────────────────────────────────────────

# One step at a time: two optimizers may have parameters in common, and steps of two contexts have.
_stepping = threading.Lock()


class LocalOptimizer:
    """An optimizer for parameters of this worker."""

    def __init__(
        self, optimizer: type[Optimizer], rrefs: Sequence[RRef[Tensor]], options: dict[str, Any]
    ) -> None:
        self._parameters = [_parameter(rref.local_value()) for rref in rrefs]
        self._optimizer = optimizer(self._parameters, **options)

    def step(self, context: int) -> None:
        """Step with the gradients of that context; what has none there stays as it is."""
        with _stepping:
            gradients = _gradients(context)
            before = [parameter.grad for parameter in self._parameters]
            try:
                for parameter in self._parameters:
                    parameter.grad = gradients.get(parameter)
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(self._parameters, before, strict=True):
                    parameter.grad = gradient

    def set(self, options: dict[str, Any]) -> None:
        """Change options of all its groups.

        Raises:
            ValueError: for one that this optimizer does not have.
        """
        known = self._optimizer.defaults
        if unknown := options.keys() - known.keys():
            raise ValueError(
                f"{type(self._optimizer).__name__} has no {', '.join(sorted(unknown))}; there are: "
                + ", ".join(known)
            )
        with _stepping:
            for group in self._optimizer.param_groups:
                group.update(options)


def _gradients(context: int) -> dict[Tensor, Tensor]:
    try:
        return get_gradients(context)
    except RuntimeError as exc:
        if "find autograd context" not in said(exc):
            raise
        return {}  # no call in it has come here, so torch (2.13 and 2.15) knows it not


def _parameter(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise TypeError(f"an optimizer takes RRefs of tensors, and one is of a {type(value).__name__}")


def _rrefs(module: Any) -> list[RRef[Tensor]]:
    if not callable(getattr(module, "parameters", None)):
        raise TypeError(f"a {type(module).__name__} has no parameters(): it is no module")
    return [RRef(parameter) for parameter in module.parameters()]


# ── for all of them ─────────────────────────────────────────────────────────────────────────────


async def parameter_rrefs(module: "torch.nn.Module | RRef[Any]") -> list[RRef[Tensor]]:
    """RRefs of the parameters of a module of this worker, or of the one behind an RRef.

    They are those of `module.parameters()`, in its order, for a `DistributedOptimizer`.

    Raises:
        TypeError: if it is no module, that is, has no `parameters()`.
        NotServing: if this process is in no world.
    """
    world()
    if not isinstance(module, RRef | RRefBase):
        return _rrefs(module)
    with outside():
        return await call(module, _rrefs)


class DistributedOptimizer:
    """An optimizer of parameters on many workers: one of its class beside each worker's.

    params = await aiorpc.autograd.parameter_rrefs(rref)
    opt = await aiorpc.autograd.DistributedOptimizer.create(torch.optim.SGD, params, lr=0.05)
    async with aiorpc.autograd.context() as ctx:
        ...
        await opt.step(ctx)
    """

    def __init__(self, optimizers: Sequence[RRef[LocalOptimizer]], name: str) -> None:
        self._optimizers = [*optimizers]
        self._name = name

    def __repr__(self) -> str:
        owners = ", ".join(each.owner_name() for each in self._optimizers)
        return f"<DistributedOptimizer {self._name} on {owners}>"

    @classmethod
    async def create(
        cls, optimizer: type[Optimizer], params: Iterable[RRef[Tensor]], **options: Any
    ) -> "DistributedOptimizer":
        """Make `optimizer(parameters, **options)` on each worker that owns some of `params`.

        Args:
            optimizer: any class of `torch.optim`, or one like them, importable on the owners. Its
                `step` is called without arguments.
            params: RRefs of tensors that require gradients, as `parameter_rrefs` returns them.
            options: the optimizer's arguments.

        Raises:
            TypeError, ValueError: if `params` are no RRefs, or none, or not of tensors; and
                whatever the class raises for its arguments, as it raises it.
            NotServing: if this process is in no world.
        """
        owners: dict[str, list[RRef[Tensor]]] = {}
        for rref in params:
            if not isinstance(rref, RRefBase):
                raise TypeError(f"an optimizer takes RRefs of parameters, not {rref!r}")
            owners.setdefault(rref.owner_name(), []).append(rref)
        if not owners:
            raise ValueError("an optimizer needs a parameter")
        made = await _all(
            create(owner, LocalOptimizer, optimizer, rrefs, options)
            for owner, rrefs in owners.items()
        )
        return cls(made, optimizer.__name__)

    async def step(self, context: Context) -> None:
        """Step on every owner, with the gradients that `context.backward` has computed.

        A parameter without a gradient in this context stays as it is, and `.grad` is not touched.

        Raises:
            RuntimeError: outside the context; and whatever a step raises, as it raises it.
        """
        number = context.id
        await _all(call(each, LocalOptimizer.step, number) for each in self._optimizers)

    async def set(self, **options: Any) -> None:
        """Change arguments of the optimizers while training: `await opt.set(lr=0.01)`.

        Raises:
            ValueError: for one that they do not have.
        """
        await _all(call(each, LocalOptimizer.set, options) for each in self._optimizers)


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of calls that are part of no context; the first error, once all have ended."""
    first, *others = calls
    with outside():
        if not others:  # it needs no task of its own
            return [await first]
        results = await asyncio.gather(first, *others, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
