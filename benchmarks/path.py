"""How much of the library does one call run through? Its modules, functions and lines, counted.

A lone call of a warm connection, with a tensor of four floats, between two processes that trace
what they execute (`sys.settrace`). A line counts once, however often it runs. `stream` is a stream
of two items, `group` a call of two objects with one large tensor, which goes in shared memory.

    python -m benchmarks.path [--kind async|def|batched|stream|group]
"""

import argparse
import asyncio
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, RRef, call, create, remote

from ._compare import lay_out

LIBRARY = f"{Path(aiorpc.__file__).parent}/"
METHODS = {"async": "on_loop", "def": "plain", "batched": "batch"}
KINDS = (*METHODS, "stream", "group")
WARM_UP = 10
BEGIN, END = 0.2, 0.6  # seconds after `record` between which the callee is recorded
MARGIN = 0.1  # seconds before the call, and after its result

Function = tuple[str, str, int]
"""A function: its module, its qualified name, and its first line."""

Line = tuple[str, int]
"""A module, and the number of a line in it."""

Trail = tuple[set[Function], set[Line]]


class Server:
    def plain(self, x: Tensor) -> Tensor:
        return x

    async def on_loop(self, x: Tensor) -> Tensor:
        return x

    @aiorpc.batched(max_size=64)
    async def batch(self, xs: list[Tensor]) -> list[Tensor]:
        return xs

    async def items(self, x: Tensor) -> AsyncIterator[Tensor]:
        yield x
        yield x

    async def size(self, x: Tensor) -> int:
        return x.numel()


# ── recording in a process ──────────────────────────────────────────────────────────────────────


class Tracer:
    """A tracer that records the library's executed code while it is on.

    It covers every Python thread in which it is installed. Code that began before is recorded from
    the moment at which the tracer is turned on.
    """

    def __init__(self) -> None:
        self.on = False
        self.functions: set[CodeType] = set()
        self.lines: set[tuple[CodeType, int]] = set()

    def install(self) -> None:
        """Install the tracer in this thread and in all later ones."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def path(self) -> Trail:
        """Return the recorded code."""
        functions = {
            (_module(each), each.co_qualname, each.co_firstlineno) for each in self.functions
        }
        return functions, {(_module(code), line) for code, line in self.lines}

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if self.on:
            self.functions.add(frame.f_code)
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if self.on and event == "line":
            self.functions.add(frame.f_code)
            self.lines.add((frame.f_code, frame.f_lineno))
        return self._line


def _module(code: CodeType) -> str:
    return code.co_filename.removeprefix(LIBRARY).removesuffix(".py").replace("/", ".")


tracer = Tracer()


async def install() -> None:
    """Install the tracer in the process that runs this."""
    tracer.install()


async def record() -> None:
    """Record this process for a while, without the call of this function."""
    loop = asyncio.get_running_loop()
    loop.call_later(BEGIN, setattr, tracer, "on", True)
    loop.call_later(END, setattr, tracer, "on", False)


async def recorded() -> Trail:
    """Return the code that was executed meanwhile."""
    return tracer.path()


# ── one call ────────────────────────────────────────────────────────────────────────────────────


SMALL, LARGE = torch.rand(4), torch.rand(100_000)


async def _one_call(kind: str, server: RRef[Server], objects: Group[Server]) -> None:
    if kind == "stream":
        async for _ in remote(server).items(SMALL):
            pass
    elif kind == "group":
        await remote(objects).size(LARGE)
    else:
        await getattr(remote(server), METHODS[kind])(SMALL)


async def measure(kind: str) -> tuple[Trail, Trail]:
    """Return the code that one call executes at the caller and at the callee."""
    tracer.install()
    async with aiorpc.local_world(["server"]):
        await call("server", install)
        server = await create("server", Server)
        objects = Group([server, await create("server", Server)])
        for _ in range(WARM_UP):
            await _one_call(kind, server, objects)
        await call("server", record)
        await asyncio.sleep(BEGIN + MARGIN)
        tracer.on = True
        await _one_call(kind, server, objects)
        await asyncio.sleep(MARGIN)  # let earlier work finish
        tracer.on = False
        await asyncio.sleep(END - BEGIN)
        return tracer.path(), await call("server", recorded)


def show(kind: str, caller: Trail, callee: Trail) -> None:
    functions, lines = caller[0] | callee[0], caller[1] | callee[1]
    modules = {module for module, *_ in functions}
    print(
        f"one warm lone call, {kind}: {len(lines)} lines of {len(functions)} functions "
        f"in {len(modules)} modules\n"
    )
    heads = ("module", "lines", "caller", "callee", "functions", "caller", "callee")
    columns = [_count(each) for each in (lines, caller[1], callee[1])]
    columns += [_count(each) for each in (functions, caller[0], callee[0])]
    by_lines = sorted(modules, key=lambda module: (-columns[0][module], module))
    table = [(module, *(f"{column[module]}" for column in columns)) for module in by_lines]
    total = ("total", *(f"{column.total()}" for column in columns))
    lay_out([heads, *table, total])
    sides = [len({module for module, *_ in path[0]}) for path in (caller, callee)]
    print(f"\nmodules at the caller: {sides[0]}, at the callee: {sides[1]}")


def _count(found: set[Any]) -> Counter[str]:
    return Counter(module for module, *_ in found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Count the library's code that one call runs.")
    parser.add_argument("--kind", choices=KINDS, default="async", help="kind of the method")
    given = parser.parse_args()
    show(given.kind, *asyncio.run(measure(given.kind)))
