"""A world on an event loop in a thread of its own, for synchronous code and notebooks."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar, overload

from .._aio.deadlines import seconds_left, timeout
from .._aio.fork import forks_exit_here
from .._aio.loops import call_soon, new_event_loop
from ..errors import NotInWorld
from .worker import Worker

T = TypeVar("T")
W = TypeVar("W", bound=Worker)

MOST_ITEMS = 64
"""Items of a remote stream that one step of the event loop hands over, if they are there."""


class WorkerThread(Generic[W]):
    """This process as a worker in a thread: what `in_thread` yields.

    It has the attributes of the worker, such as `name`, `peers` and `start`. `run` awaits what they
    return: `me.run(me.start("env7"))`.

    Attributes:
        worker: what the world yields to `async with`.
    """

    def __init__(self, worker: W, loop: asyncio.AbstractEventLoop) -> None:
        self.worker = worker
        self._loop = loop
        self._failure: BaseException | None = None  # that has ended the world

    def __repr__(self) -> str:
        return f"<in a thread: {self.worker!r}>"

    def __getattr__(self, name: str) -> Any:
        if name == "worker":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.worker, name)

    @overload
    def run(self, what: Awaitable[T], /) -> T: ...

    @overload
    def run(self, what: Callable[..., Awaitable[T]], /, *args: Any) -> T: ...

    @overload
    def run(self, what: Callable[..., T], /, *args: Any) -> T: ...

    def run(self, what: Any, /, *args: Any) -> Any:
        """Run something on the event loop of the world, and return its result.

            y = me.run(aiorpc.remote(model).infer(x))
            loss = me.run(train, 100)           # `async def train(steps)`

        Callable from any other thread; calls from several threads run side by side. A deadline of
        `aiorpc.timeout` around it bounds all of it. An exception of this thread (Ctrl-C) cancels
        what runs.

        Args:
            what: an awaitable; or a function, which runs on the loop, and whose result is awaited
                if it can be.
            args: arguments of the function.

        Raises:
            RuntimeError: in the loop's own thread, which would wait for itself: use `await`.
            NotInWorld: if the block of `in_thread` is left before the end.
            TypeError: if it is neither awaitable nor callable, or an awaitable with arguments.
        """
        if not callable(what) and (args or not inspect.isawaitable(what)):
            raise TypeError(f"run() takes an awaitable, or a function and its arguments: {what!r}")
        return self._run(_awaited(what, args), what)

    def iterate(self, stream: AsyncIterable[T]) -> Iterator[T]:
        """Return an iterator of the items of a stream: a remote one, a map, `changes()`, a policy.

            for batch in me.iterate(aiorpc.remote(loader).batches()): ...

        It asks for an item when the loop asks for one; items of a remote stream that have arrived
        come together. Leaving the loop early closes the stream.

        Raises:
            TypeError: if it cannot be iterated with `async for`.
            RuntimeError, NotInWorld: from a step, as `run`.
        """
        if not isinstance(stream, AsyncIterable):
            raise TypeError(f"iterate() takes what `async for` takes, got {stream!r}")
        return self._items(stream)

    def _items(self, stream: AsyncIterable[T]) -> Iterator[T]:
        iterator = self._run(_opened(stream))
        try:
            is_over = False
            while not is_over:
                items, is_over, failure = self._run(_next_items(iterator))
                yield from items
                if failure is not None:
                    raise failure
        finally:
            # Not awaited: the collector of garbage may do this in any thread.
            call_soon(self._loop, _close_soon, iterator)

    def _run(self, coroutine: Coroutine[Any, Any, T], what: Any = None) -> T:
        """Run a coroutine, which awaits `what`, on the loop."""
        if asyncio._get_running_loop() is self._loop:
            _drop(coroutine, what)
            raise RuntimeError(
                "run() and iterate() would block their own event loop: use `await` there"
            )
        try:
            result = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            _drop(coroutine, what)
            raise self._left() from self._failure
        try:
            return result.result()
        except concurrent.futures.CancelledError:
            raise self._left() from self._failure
        except BaseException:
            result.cancel()
            raise

    def _left(self) -> NotInWorld:
        return NotInWorld("the block of in_thread() was left")


def _drop(*never_run: Any) -> None:
    """Close coroutines, which would warn that they were never awaited."""
    for each in never_run:
        if isinstance(each, Coroutine):
            each.close()


async def _awaited(what: Any, args: tuple[Any, ...]) -> Any:
    with timeout(seconds_left()):
        found = what(*args) if callable(what) else what
        return await found if inspect.isawaitable(found) else found


async def _opened(stream: AsyncIterable[T]) -> AsyncIterator[T]:
    return aiter(stream)  # on the loop: a remote stream is sent now


async def _next_items(iterator: Any) -> tuple[list[Any], bool, BaseException | None]:
    """Return the next items, whether they are the last, and the exception that follows them."""
    items: list[Any] = []
    has_item: Callable[[], bool] = getattr(iterator, "_has_item", bool)
    try:
        with timeout(seconds_left()):
            items.append(await anext(iterator))
            while has_item() and len(items) < MOST_ITEMS:
                items.append(await anext(iterator))
    except StopAsyncIteration:
        return items, True, None
    except Exception as exc:
        return items, True, exc
    return items, False, None


def _close_soon(iterator: Any) -> None:
    if hasattr(iterator, "aclose"):
        closing = asyncio.ensure_future(iterator.aclose())
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())


@contextlib.contextmanager
def in_thread(world: AbstractAsyncContextManager[W]) -> Iterator[WorkerThread[W]]:
    """Enter a world on an event loop in a daemon thread: for synchronous code and notebooks.

        with aiorpc.in_thread(aiorpc.local_world(["server"])) as me:
            policy = me.run(aiorpc.create("server", Policy))
            action = me.run(aiorpc.remote(policy).act(state))
            for batch in me.iterate(aiorpc.remote(policy).batches()): ...

        with aiorpc.in_thread(aiorpc.attach()):  # a passive server beside torch's RPC
            rpc.shutdown()

    Calls of other processes are served by that thread, whatever this one does. Signal handlers stay
    as they are. If the world ends by itself, its exception is raised at the end of the block.

    Args:
        world: what `local_world()`, `worker()` or `attach()` returns, not entered yet.

    Raises:
        TypeError: if it is no world.
        Exception: as the world raises it.
    """
    if not hasattr(type(world), "__aenter__"):
        raise TypeError(
            "in_thread() takes a world that is not entered, as in `with in_thread(local_world()) "
            f"as me:`, got {world!r}"
        )
    running = _Running(world)
    me = running.entered()
    try:
        with forks_exit_here():
            yield me
    except BaseException as exc:
        trace = exc.__traceback__
        running.leave(exc)
        exc.__traceback__ = trace  # without what the thread has added
        raise
    running.leave()
    if me._failure is not None:
        raise me._failure


class _Running(Generic[W]):
    """A world in a thread, from its entry to its end.

    Not anyio's portal, which opens a scope: from the first scope of a process on, each call has to
    ask for deadlines (`_aio.deadlines`).
    """

    def __init__(self, world: AbstractAsyncContextManager[W]) -> None:
        self._world = world
        self._left = asyncio.Event()  # set on the thread's loop
        self._error: BaseException | None = None  # of the block
        self._task: concurrent.futures.Future[asyncio.Task[None]] = concurrent.futures.Future()
        self._entered: concurrent.futures.Future[WorkerThread[W]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="aiorpc-world", daemon=True)
        self._thread.start()

    def entered(self) -> WorkerThread[W]:
        """Wait until the world is entered. Ctrl-C cancels that."""
        try:
            return self._entered.result()
        except BaseException:
            task = self._task.result()
            call_soon(task.get_loop(), task.cancel)
            self._thread.join()
            raise

    def leave(self, error: BaseException | None = None) -> None:
        """End the world, in order or as one whose own block has raised; wait for its end."""
        self._error = error
        call_soon(self._entered.result()._loop, self._left.set)
        self._thread.join()

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task.set_result(task)
        async with self._world as worker:
            self._entered.set_result(WorkerThread(worker, asyncio.get_running_loop()))
            await self._left.wait()
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as exc:
            if self._entered.done():
                self._entered.result()._failure = exc
            else:
                self._entered.set_exception(exc)
