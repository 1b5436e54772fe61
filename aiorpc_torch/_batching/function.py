"""The decorated function: binds one call's arguments, and runs once for the calls of a batch.

A generator function runs once too, and each of its steps is for all calls of the batch.
"""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .._endpoint.runtime import OwnThread, in_thread
from .._torch.cuda import fence_tree
from .collate import (
    Collation,
    Collator,
    Rows,
    collate,
    collate_key,
    row_count,
    row_counts,
    rows_of,
    with_rows,
)
from .cuda_collate import CudaCollator
from .policies import Policy, Round
from .results import ENDED, split_results, with_ends
from .scheduler import CallTraits

CallArgs = tuple[Any, ...]
"""One call's arguments in the order of the function's parameters."""

TraitsFunction = Callable[[CallArgs, str], CallTraits]
"""Returns the traits of a call from its arguments and its worker's name."""

InThread = Callable[[Callable[[], list[Any]]], Coroutine[Any, Any, list[Any]]]
"""Runs a function in a thread."""

FindRows = Callable[[], Rows]
"""Returns the rows of a batch. It counts them at the first call, in the thread of a plain `def`."""


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether a function, under its decorators, is a generator, async or plain."""
    inner = inspect.unwrap(function)
    return inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner)


class BatchFunction:
    """A function that gets one list per parameter; with a `collation`, one tree of tensors.

    With `for_all`, its result is for all callers.

    Attributes:
        positional: number of arguments of a call that `bind` returns as they are, if none is a
            keyword; -1 if there is a keyword-only parameter.
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
        self.is_generator = is_generator(function)
        is_async_generator = inspect.isasyncgenfunction(inspect.unwrap(function))
        self.is_async = is_async_generator or inspect.iscoroutinefunction(function)
        self._is_method = is_method
        self._stacked = collation is not None
        self._for_all = for_all
        given = Collation() if collation is None else collation
        self._rows = given if given.concat or given.pad_to else None  # else one for each call
        self._concat = given.concat
        self._collator = Collator(given.device, concat=given.concat)
        target = None if given.device is None else torch.device(given.device)
        self._cuda = target if target is not None and target.type == "cuda" else None
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
        is_in_class = "." in self.name.rpartition("<locals>.")[-1]
        if is_in_class and not is_method and parameters and parameters[0].name == "self":
            raise TypeError(
                f"{self.name} is hidden from its class by a decorator above @batched: write "
                "@batched above that one"
            )
        self._signature = inspect.Signature(parameters)
        self._keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.positional = len(parameters) if not self._keywords else -1

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArgs:
        """Return one call's arguments in the order of the parameters, with defaults."""
        if not kwargs and len(args) == self.positional:
            return args
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.name}() {exc}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    async def run(
        self,
        instance: Any,
        calls: Sequence[CallArgs],
        compute: Callable[[Collator], Any] | None = None,
        in_thread: InThread = in_thread,
        rows: FindRows | None = None,
    ) -> list[Any]:
        """Call the function once for all `calls`; return one result per call.

        Args:
            compute: A step of a generator, in place of the function; `rows` are those of its calls.
            in_thread: Runs what a plain `def` does, or waits for a device.
        """
        if compute is None:
            rows = self._find_rows(calls)
            compute = functools.partial(self._call, instance, calls, rows)
        count = len(calls)
        if self._cuda is not None:
            return await self._results_on_cuda(compute, count, rows, in_thread)
        if not self.is_async:
            return await in_thread(lambda: self._split(compute(self._collator), count, rows))
        result = await compute(self._collator)
        fence = fence_tree(result) if self._stacked else None
        if fence is None:
            return self._split(result, count, rows)
        # In a thread: the loop must not wait for a device.
        split = functools.partial(self._split_after, fence.wait, result, count, rows)
        return await in_thread(split)

    def _find_rows(self, calls: Sequence[CallArgs]) -> FindRows | None:
        # Not at once: that takes up to 0.8 ms of the event loop with 64 callers.
        # (tests/unit/batching/test_function.py)
        if self._rows is None:
            return None
        return functools.cache(functools.partial(rows_of, calls, self._rows))

    async def iterate(
        self, instance: Any, calls: Sequence[CallArgs]
    ) -> AsyncGenerator[list[Any], None]:
        """Call the generator function once for all `calls`; yield one result per call and step."""
        source: Any = None
        rows = self._find_rows(calls)
        thread = None if self.is_async else OwnThread()
        run = in_thread if thread is None else thread.run

        def step(collator: Collator) -> Any:
            nonlocal source
            if source is None:
                source = self._call(instance, calls, rows, collator)
            return _next(source) if self.is_async else next(source, ENDED)

        try:
            while (results := await self.run(instance, calls, step, run, rows)) is not ENDED:
                yield results
        finally:  # after the step that runs; `source` may be something else by mistake
            if thread is None:
                if hasattr(source, "aclose"):
                    await source.aclose()
            else:
                try:
                    if hasattr(source, "close"):
                        await thread.run(source.close)
                finally:
                    thread.close()

    @functools.cached_property
    def _cuda_collator(self) -> CudaCollator:
        # Made by the first call: the function may be decorated on a machine without a device.
        assert self._cuda is not None
        return CudaCollator(self._cuda, concat=self._concat)

    async def _results_on_cuda(
        self,
        compute: Callable[[Collator], Any],
        count: int,
        rows: FindRows | None,
        in_thread: InThread,
    ) -> list[Any]:
        collator = self._cuda_collator
        ready = collator.record_event()  # the loop's stream holds the callers' tensors
        if not self.is_async:

            def work() -> list[Any]:
                with collator.on_stream(ready):
                    copied, done = collator.to_host(compute(collator))
                return self._split_after(done.synchronize, copied, count, rows)

            return await in_thread(work)
        with collator.on_stream(ready):
            coroutine = compute(collator)
        result = await collator.run_coroutine(coroutine)
        with collator.on_stream():
            copied, done = collator.to_host(result)
        split = functools.partial(self._split_after, done.synchronize, copied, count, rows)
        return await in_thread(split)

    def _split_after(
        self, wait: Callable[[], object], result: Any, count: int, rows: FindRows | None
    ) -> list[Any]:
        wait()
        return self._split(result, count, rows)

    def _split(self, result: Any, count: int, rows: FindRows | None) -> list[Any]:
        if self.is_generator:
            if result is ENDED:
                return ENDED  # type: ignore[no-any-return]
            result = with_ends(result, count, stacked=self._stacked)
        return split_results(
            result,
            count,
            self.name,
            stacked=self._stacked,
            for_all=self._for_all,
            rows=None if rows is None else rows(),
            verb="yielded" if self.is_generator else "returned",
        )

    def _call(
        self, instance: Any, calls: Sequence[CallArgs], rows: FindRows | None, collator: Collator
    ) -> Any:
        if rows is not None:
            calls = with_rows(calls, rows())
        columns = zip(*calls, strict=True)
        values: list[Any]
        if self._stacked:
            values = [collate(each, collator) for each in columns]
        else:
            values = [*map(list, columns)]
        head = (instance,) if self._is_method else ()
        if not self._keywords:
            return self._function(*head, *values)
        split = len(values) - len(self._keywords)
        keywords = dict(zip(self._keywords, values[split:], strict=True))
        return self._function(*head, *values[:split], **keywords)


async def _next(source: Any) -> Any:
    return await anext(source, ENDED)


# ── the traits of a call, found once as it arrives ──────────────────────────────────────────────


def traits_function(
    policy: Policy, name: str, collation: Collation | None
) -> TraitsFunction | None:
    """Return the traits function of the batched function `name`; it raises for invalid calls.

    An exception in one of the policy's functions reaches only the caller of that call. None if all
    calls have the default traits.
    """

    def collated(args: CallArgs) -> tuple[Hashable, int | None]:
        """Return the key of a call's trees; with `concat` their rows."""
        if collation is None:
            return None, None
        keys = tuple([collate_key(each, collation) for each in args])
        return keys, _check_rows(args, collation, name) if collation.concat else None

    if isinstance(policy, Round):
        member = policy.member

        def round_traits(args: CallArgs, caller: str) -> CallTraits:
            of = caller if member is None else _check_hashable("member", member(*args))
            return CallTraits(collated(args)[0], member=of)

        return round_traits

    key, weight = policy.key, policy.weight
    if collation is None and key is None and weight is None:
        return None

    def fill_traits(args: CallArgs, _: str) -> CallTraits:
        group = None if key is None else _check_hashable("key", key(*args))
        weighs = 1.0 if weight is None else _check_weight(weight(*args), name)
        if collation is None:
            return CallTraits(group, weighs)
        # Calls that cannot be stacked together wait apart, and delay no other.
        keys, rows = collated(args)
        return CallTraits((group, keys), weighs if rows is None else float(rows))

    return fill_traits


def _check_rows(args: CallArgs, collation: Collation, name: str) -> int:
    if (rows := row_count(args, numbers=True)) is not None:
        collation.padded(rows)
        return rows
    counts = row_counts(args, numbers=True)
    if len(counts) > 1 and None not in counts:
        several = " and ".join(sorted(map(str, counts), key=int))
        raise ValueError(
            f"the arguments of a call of {name} have {several} rows: with concat=True all tensors "
            "and arrays of a call need the same number of rows"
        )
    raise ValueError(
        f"a call of {name} has no rows, or an argument without: with concat=True pass tensors or "
        "arrays whose first dimension is the rows"
    )


def _check_hashable(trait: str, value: Any) -> Hashable:
    # A tensor's hash is its identity: two equal tensors would be two keys.
    if isinstance(value, Tensor):
        raise TypeError(f"a {trait} must be a plain value, got a tensor: return its .item()")
    hash(value)
    return value  # type: ignore[no-any-return]


def _check_weight(weight: Any, name: str) -> float:
    if not isinstance(weight, Real):
        raise ValueError(
            f"the weight of a call of {name} must be a number, got {weight!r}: return float(...)"
        )
    if 0 <= float(weight) < float("inf"):
        return float(weight)
    raise ValueError(
        f"the weight of a call of {name} must be at least 0 and finite, got {weight!r}"
    )
