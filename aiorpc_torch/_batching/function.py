"""The decorated function: binds one call's arguments, and runs once for the calls of a batch."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._endpoint.runtime import in_thread
from .._torch.cuda import fence_tree
from .collate import Collation, Collator, collate, rows_of, with_rows
from .cuda_collate import CudaCollator
from .results import split_results
from .traits import CallArgs


class BatchFunction:
    """A function that gets one list per parameter; with a `collation`, one tree of tensors.

    With `for_all`, its result is for all callers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        is_method: bool,
        collation: Collation | None,
        for_all: bool = False,
    ) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._is_method = is_method
        self._stacked = collation is not None
        self._rows = collation if collation is not None and collation.changes_rows else None
        self._for_all = for_all
        device = None if collation is None else collation.device
        self._concat = collation is not None and collation.concat
        self._collator = Collator(device, concat=self._concat)
        target = None if device is None else torch.device(device)
        self._cuda = target if target is not None and target.type == "cuda" else None
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
        self._signature = inspect.Signature(parameters)
        self._keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._positional = len(parameters) if not self._keywords else -1

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArgs:
        """Return one call's arguments in the order of the parameters, with defaults."""
        if not kwargs and len(args) == self._positional:
            return args
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.name}() {exc}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    async def run(self, instance: Any, calls: Sequence[CallArgs]) -> list[Any]:
        """Call the function once for all `calls`; return one result per call.

        Raises:
            BatchContractError: if the function does not return one result per call.
        """
        if self._cuda is not None:
            return await self._run_on_cuda(self._cuda_collator, instance, calls)
        if not self._is_async:
            call = functools.partial(self._call, instance, calls, self._collator)
            return await in_thread(lambda: self._split(call(), calls))
        result = await self._call(instance, calls, self._collator)
        fence = fence_tree(result) if self._stacked else None
        if fence is None:
            return self._split(result, calls)
        # In a thread: the loop must not wait for a device.
        split = functools.partial(self._split_after, fence.wait, result, calls)
        return await in_thread(split)

    @functools.cached_property
    def _cuda_collator(self) -> CudaCollator:
        # Made by the first call: the function may be decorated on a machine without a device.
        assert self._cuda is not None
        return CudaCollator(self._cuda, concat=self._concat)

    async def _run_on_cuda(
        self, collator: CudaCollator, instance: Any, calls: Sequence[CallArgs]
    ) -> list[Any]:
        ready = collator.record_event()  # the loop's stream holds the callers' tensors
        if not self._is_async:
            step = functools.partial(self._run_on_cuda_in_thread, collator, ready, instance, calls)
            return await in_thread(step)
        with collator.on_stream(ready):
            coroutine = self._call(instance, calls, collator)
        result = await collator.run_coroutine(coroutine)
        with collator.on_stream():
            copied, done = collator.to_host(result)
        split = functools.partial(self._split_after, done.synchronize, copied, calls)
        return await in_thread(split)

    def _run_on_cuda_in_thread(
        self,
        collator: CudaCollator,
        ready: torch.cuda.Event,
        instance: Any,
        calls: Sequence[CallArgs],
    ) -> list[Any]:
        with collator.on_stream(ready):
            copied, done = collator.to_host(self._call(instance, calls, collator))
        return self._split_after(done.synchronize, copied, calls)

    def _split_after(
        self, wait: Callable[[], object], result: Any, calls: Sequence[CallArgs]
    ) -> list[Any]:
        wait()
        return self._split(result, calls)

    def _split(self, result: Any, calls: Sequence[CallArgs]) -> list[Any]:
        rows = None if self._rows is None else rows_of(calls, self._rows)
        size, stacked, for_all = len(calls), self._stacked, self._for_all
        return split_results(result, size, self.name, stacked=stacked, for_all=for_all, rows=rows)

    def _call(self, instance: Any, calls: Sequence[CallArgs], collator: Collator) -> Any:
        if self._rows is not None:
            calls = with_rows(calls, rows_of(calls, self._rows))
        columns = zip(*calls, strict=True)
        values = [collate(each, collator) if self._stacked else [*each] for each in columns]
        head = (instance,) if self._is_method else ()
        if not self._keywords:
            return self._function(*head, *values)
        split = len(values) - len(self._keywords)
        keywords = dict(zip(self._keywords, values[split:], strict=True))
        return self._function(*head, *values[:split], **keywords)
