"""The user's function behind `@batched`: from rows of arguments, one a caller, to columns.

Binds and calls; it does not know who waits, nor when a batch leaves.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._aio.tasks import Within
from .._protocol.runtime import in_thread
from .._torch.cuda import fence_of
from .collate import Device, Here, Where, stack
from .cuda_collate import Stage
from .results import outcomes
from .traits import Row


class Body:
    """Called once for many. With `stacked` it gets nests of tensors instead of lists."""

    def __init__(
        self, function: Callable[..., Any], *, is_method: bool, stacked: bool, device: Device
    ) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._is_method = is_method
        self._stacked = stacked
        self._where = Here(device)
        there = None if device is None else torch.device(device)
        self._cuda = there if there is not None and there.type == "cuda" else None
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
        self._signature = inspect.Signature(parameters)
        self._keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._plain = len(parameters) if not self._keywords else -1

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row:
        """One caller's arguments in the order of the parameters, defaults filled in."""
        if not kwargs and len(args) == self._plain:
            return args
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.name}() {exc}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    async def run(self, instance: Any, rows: Sequence[Row]) -> list[Any]:
        """Call the function once for all rows; whose is what of its result.

        Raises:
            BatchContractError: if it is not one for each.
        """
        if self._cuda is not None:
            return await self._run_staged(self._stage, instance, rows)
        if not self._is_async:
            return await in_thread(functools.partial(self._run_here, instance, rows))
        result = await self._call(instance, rows, self._where)
        ready = fence_of(result) if self._stacked else None
        if ready is None:
            return self._split(result, len(rows))
        # The loop does not wait for a device.
        split = functools.partial(self._split_after, ready.wait, result, len(rows))
        return await in_thread(split)

    def _run_here(self, instance: Any, rows: Sequence[Row]) -> list[Any]:
        return self._split(self._call(instance, rows, self._where), len(rows))

    @functools.cached_property
    def _stage(self) -> Stage:
        # Not before somebody calls: a function is also decorated where there is no device.
        assert self._cuda is not None
        return Stage(self._cuda)

    async def _run_staged(self, stage: Stage, instance: Any, rows: Sequence[Row]) -> list[Any]:
        ready = stage.mark()  # what callers sent is on the loop's stream
        if not self._is_async:
            step = functools.partial(self._run_on, stage, ready, instance, rows)
            return await in_thread(step)
        with stage.entered(ready):
            coroutine = self._call(instance, rows, stage)
        result = await Within(stage.entered, coroutine)
        with stage.entered():
            fetched, done = stage.fetch(result)
        split = functools.partial(self._split_after, done.synchronize, fetched, len(rows))
        return await in_thread(split)

    def _run_on(
        self, stage: Stage, ready: torch.cuda.Event, instance: Any, rows: Sequence[Row]
    ) -> list[Any]:
        with stage.entered(ready):
            fetched, done = stage.fetch(self._call(instance, rows, stage))
        return self._split_after(done.synchronize, fetched, len(rows))

    def _split_after(self, wait: Callable[[], object], result: Any, size: int) -> list[Any]:
        wait()
        return self._split(result, size)

    def _split(self, result: Any, size: int) -> list[Any]:
        return outcomes(result, size, self.name, stacked=self._stacked)

    def _call(self, instance: Any, rows: Sequence[Row], where: Where) -> Any:
        columns = [self._column(column, where) for column in zip(*rows, strict=True)]
        split = len(columns) - len(self._keywords)
        head = (instance,) if self._is_method else ()
        keywords = dict(zip(self._keywords, columns[split:], strict=True))
        return self._function(*head, *columns[:split], **keywords)

    def _column(self, values: Sequence[Any], where: Where) -> Any:
        return stack(values, where) if self._stacked else list(values)
