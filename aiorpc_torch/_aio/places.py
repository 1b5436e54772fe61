"""Lines at which tasks and threads stand, and the futures that tasks wait for.

Nothing here runs but for a question: a suspended coroutine keeps its frames, and the interpreter
those of threads. Values of variables are read from frames of this library and of asyncio alone.
"""

import asyncio
import concurrent.futures
import dis
import gc
import inspect
import sys
from asyncio import futures, locks, taskgroups, tasks
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any, NamedTuple

from .own_frames import LIBRARY, is_of_user, outwards
from .tasks import StepContext, Steps, take_step

MOST_LINES = 6
MOST_TASKS = 64  # that one task is followed to
MOST_FRAMES = 40  # of the stack of a thread

_ASYNCIO = str(Path(asyncio.__file__).parent)
_LOCKS = locks.__file__
_NAMES: dict[type, tuple[str, str]] = {
    CoroutineType: ("cr_frame", "cr_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}


class Line(NamedTuple):
    """A line of code: the function, its file and the number of the line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Chain(NamedTuple):
    """A suspended task: its frames, outermost first, and the future that it waits for.

    Or an executor's future, without frames, that such a task waits for among others.
    """

    task: "asyncio.Future[Any]"
    awaited: Sequence[Any]
    """The coroutines and generators of the frames."""
    frames: Sequence[FrameType]
    future: Any


_STEPS = {"async_generator_asend", "async_generator_athrow", "anext_awaitable"}


def awaited_by(awaited: Any) -> Iterator[tuple[Any, FrameType]]:
    """Yield a coroutine and what it awaits with their frames, the outermost first."""
    while awaited is not None:
        if isinstance(awaited, StepContext | Steps):
            awaited = awaited.coroutine
        elif hasattr(type(awaited), "_steps"):  # a call that was made a task
            awaited = awaited._steps
        if (names := _NAMES.get(type(awaited))) is None:
            if isinstance(awaited, asyncio.Future):
                return
            # A step of an asynchronous generator refers to the generator. What else refers to one
            # may be awaited by it: there would be no end.
            if type(awaited).__name__ not in _STEPS:
                return
            inside = (each for each in gc.get_referents(awaited) if inspect.isasyncgen(each))
            if (awaited := next(inside, None)) is None:
                return
            names = _NAMES[AsyncGeneratorType]
        frame = getattr(awaited, names[0])
        if frame is None:
            return
        yield awaited, frame
        awaited = getattr(awaited, names[1])


def chains_of(task: "asyncio.Task[Any]") -> list[Chain]:
    """Return how a task stands, and the tasks that it waits for. On their event loop."""
    found: dict[asyncio.Future[Any], Chain] = {}
    todo: list[asyncio.Future[Any]] = [task]
    while todo and len(found) < MOST_TASKS:
        each = todo.pop(0)
        if each in found or each.done():
            continue
        if not isinstance(each, asyncio.Task):
            found[each] = Chain(each, (), (), each)
            continue
        pairs = [*awaited_by(each.get_coro())]
        frames, future = [frame for _, frame in pairs], getattr(each, "_fut_waiter", None)
        found[each] = Chain(each, [one for one, _ in pairs], frames, future)
        todo += _awaited_futures(frames, future)
    return [*found.values()]


def _awaited_futures(frames: Sequence[FrameType], future: Any) -> "list[asyncio.Future[Any]]":
    """Return what a future stands for: one task, those of `gather`, `wait`, `shield` or a group.

    Among several also the futures of executors.
    """
    found: Iterable[Any] = (future,)
    if (children := getattr(future, "_children", None)) is not None:  # of `gather`
        found = children
    elif frames and (code := frames[-1].f_code).co_filename == tasks.__file__:
        names = frames[-1].f_locals
        found = names.get("fs") or (names.get("fut"),) if "wait" in code.co_name else found
    elif frames and code.co_filename == taskgroups.__file__:
        found = getattr(frames[-1].f_locals.get("self"), "_tasks", ())
    every = [one for each in found for one in (each, *_in_callbacks(each, tasks.__file__))]
    of_executor = [each for each in every if each is not future and work_of_executor(each)]
    return [each for each in every if isinstance(each, asyncio.Task)] + of_executor


WORK_OF_EXECUTOR = "_WorkItem.run"
"""The function of `concurrent.futures` whose `self` has the future of what runs in a thread."""


def work_of_executor(future: Any) -> Any:
    """Return the future of `concurrent.futures` whose end ends this one, None if there is none."""
    # `asyncio.wrap_future` lets a cancellation of the one cancel the other (3.11 to 3.14).
    found = _in_callbacks(future, futures.__file__)
    return next((each for each in found if isinstance(each, concurrent.futures.Future)), None)


def _in_callbacks(future: Any, file: str) -> Iterator[Any]:
    """Yield what a file of asyncio refers to in its callbacks of a future: `shield` to its task."""
    # Other callbacks are the program's: their cells may be empty.
    for callback, *_ in getattr(future, "_callbacks", None) or ():
        if type(callback) is FunctionType and callback.__code__.co_filename == file:
            yield from (cell.cell_contents for cell in callback.__closure__ or ())


def lines_of(frames: Sequence[FrameType]) -> tuple[list[Line], str]:
    """Return the lines of users' code in frames, outermost first, and the function inside of them.

    Of many lines the first and the last ones. The function is one of Python that the last line has
    called, "" if there is none.
    """
    own = [at for at, each in enumerate(frames) if is_of_user(each.f_code.co_filename)]
    lines = [_line(frames[at]) for at in own]
    name = ""
    for each in frames[own[-1] + 1 if own else 0 :]:
        code = each.f_code
        if not code.co_filename.startswith(LIBRARY) and not code.co_name.startswith("_"):
            name = code.co_qualname  # of a function of Python that users know
            break
    return [*lines[:1], *lines[1:][-MOST_LINES + 1 :]], name


def lines_of_loop(thread: int) -> list[Line]:
    """Return the lines at which the thread of an event loop stands, none if it waits for events."""
    found: list[FrameType] = []
    for each in outwards(sys._current_frames().get(thread)):
        code = each.f_code
        if code is take_step.__code__ or code.co_filename.startswith(_ASYNCIO):
            break  # it drives what is inside of it
        found.insert(0, each)
    return lines_of(found)[0]


def _line(frame: FrameType) -> Line:
    return Line(frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno or 0)


# ── threads ─────────────────────────────────────────────────────────────────────────────────────


class ThreadStack(NamedTuple):
    """The stack of a thread."""

    function: str  # name of the method that runs, or of the innermost function of a user's code
    frames: Sequence[str]  # as text, the innermost first


def stack_of_thread(thread: int) -> ThreadStack | None:
    """Return the stack of the thread with that identifier, None if it has ended."""
    if (frame := sys._current_frames().get(thread)) is None:
        return None
    frames = [*outwards(frame)]
    for each in frames:
        if each.f_code is take_step.__code__:  # a coroutine of ours: it has a name
            function = str(each.f_locals.get("name", "?"))
            break
    else:
        own = (each for each in frames if is_of_user(each.f_code.co_filename))
        function = next(own, frame).f_code.co_qualname
    return ThreadStack(function, [str(_line(each)) for each in frames[:MOST_FRAMES]])


# ── locks ───────────────────────────────────────────────────────────────────────────────────────


def awaited_lock(chain: Chain) -> Any:
    """Return the lock or semaphore of asyncio that a task waits for, None if it waits for none."""
    frame = chain.frames[-1] if chain.frames else None
    if frame is None or frame.f_code.co_filename != _LOCKS or frame.f_code.co_name != "acquire":
        return None
    return frame.f_locals.get("self")


def holds_lock(chain: Chain, lock: Any) -> bool:
    """Return whether a task is inside of `async with lock`. False if it has called `acquire`."""
    if awaited_lock(chain) is lock:
        return False
    for awaited in chain.awaited:
        # The block keeps `lock.__aexit__` on the stack of its frame, from CPython 3.14 on in two
        # parts.
        found = gc.get_referents(awaited)
        exits = [each for each in found if getattr(each, "__name__", "") == "__aexit__"]
        owners = [getattr(each, "__self__", None) for each in exits]
        if exits and any(each is lock for each in [*owners, *found]):
            return True
    return False


def is_at_lock(frame: FrameType) -> bool:
    """Return whether the innermost frame of a thread waits in `with lock` or `lock.acquire()`.

    False in code of Python, as in `Event.wait`, whose locks are no locks of the program.
    """
    if not is_of_user(frame.f_code.co_filename):
        return False
    name = ""
    for each in dis.get_instructions(frame.f_code):
        if each.opname.startswith("LOAD_") and isinstance(each.argval, str):
            name = each.argval
        if each.offset == frame.f_lasti:
            is_call = each.opname.startswith(("CALL", "PRECALL"))
            return each.opname == "BEFORE_WITH" or (is_call and name in ("acquire", "__enter__"))
    return False
