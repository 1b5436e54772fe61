"""The user's function behind `@batched`: from rows of arguments, one a caller, to columns.

Binds and calls; it does not know who waits, nor when a batch leaves.
"""

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

from ._admission import Row
from ._answers import outcomes
from ._doors import in_thread
from ._stacking import Device, stack


class Body:
    """Called once for many. With `stacked` it gets nests of tensors instead of lists."""

    def __init__(
        self, function: Callable[..., Any], *, is_method: bool, stacked: bool, device: Device
    ) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        # Of a body that may be done without waiting: no thread has to do with it.
        quick = self._is_async and device is None
        self.code: types.CodeType | None = getattr(function, "__code__", None) if quick else None
        self._is_method = is_method
        self._stacked = stacked
        self._device = device
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
        if not self._is_async:
            return await in_thread(functools.partial(self._run_here, instance, rows))
        result = await self._call(instance, rows)
        if self._device is None:
            return self._split(result, len(rows))
        # The loop does not wait for a device.
        return await in_thread(functools.partial(self._split, result, len(rows)))

    def _run_here(self, instance: Any, rows: Sequence[Row]) -> list[Any]:
        return self._split(self._call(instance, rows), len(rows))

    def _split(self, result: Any, size: int) -> list[Any]:
        return outcomes(result, size, self.name, stacked=self._stacked)

    def _call(self, instance: Any, rows: Sequence[Row]) -> Any:
        columns = [self._column(column) for column in zip(*rows, strict=True)]
        split = len(columns) - len(self._keywords)
        head = (instance,) if self._is_method else ()
        keywords = dict(zip(self._keywords, columns[split:], strict=True))
        return self._function(*head, *columns[:split], **keywords)

    def _column(self, values: Sequence[Any]) -> Any:
        return stack(values, self._device) if self._stacked else list(values)
