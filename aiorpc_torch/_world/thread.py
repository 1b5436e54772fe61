"""A world on an event loop in a thread of its own, for synchronous code and notebooks."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, TypeVar, overload

from .._aio.deadlines import LATER, seconds_left, timeout
from .._aio.fork import check_not_forked, forks_exit_here
from .._aio.loops import call_soon, new_event_loop
from .._aio.own_frames import behind_own_frames
from ..errors import NotInWorld
from .managers import thread_manager
from .worker import Worker

T = TypeVar("T")
W = TypeVar("W", bound=Worker)

MOST_ITEMS = 64
"""Items of a remote stream that one step of the event loop hands over, if they are there."""

Step = tuple[list[Any], bool, BaseException | None]
"""Items of a stream, whether they are the last, and the exception that follows them."""


class WorkerThread(Generic[W]):
    """This process as a worker in a thread: what `in_thread` yields.

    It has the attributes of the worker, such as `name`, `peers` and `start`. `run` awaits what they
    return: `me.run(me.start("env7"))`.

    Attributes:
        worker: what the world yields to `async with`.
    """

    def __init__(self, worker: W, thread: "_WorldThread[Any]") -> None:
        self.worker = worker
        self._thread = thread

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
            RuntimeError: in the loop's own thread, which would wait for itself: use `await`. And
                for a future of another event loop, as `asyncio.gather` makes it in a notebook.
            NotInWorld: if the block of `in_thread` is left before the end.
            TypeError: if it is neither awaitable nor callable, or an awaitable with arguments.
        """
        if not callable(what) and (args or not inspect.isawaitable(what)):
            raise TypeError(
                "run() takes an awaitable, or a function and its arguments, and iterate() a "
                f"stream: {what!r}"
            )
        if asyncio.isfuture(what) and what.get_loop() is not self._thread.loop:
            raise RuntimeError(
                "run() got a future of another event loop: make the calls in an `async def "
                "main()`, which may `gather` them, and write `run(main)`"
            )
        running = _awaited(what, args)
        try:
            return self._thread.run(running)
        finally:
            if inspect.getcoroutinestate(running) == inspect.CORO_CREATED:
                for each in (running, what):  # they would warn that they were never awaited
                    if isinstance(each, Coroutine):
                        with contextlib.suppress(ValueError):  # it starts now, in the other thread
                            each.close()

    def iterate(self, stream: AsyncIterable[T]) -> Iterator[T]:
        """Return an iterator of the items of a stream: a remote one, a map, `changes()`, versions.

            for batch in me.iterate(aiorpc.remote(loader).batches()): ...

        It asks for an item when the loop asks for one; items of a remote stream that have arrived
        come together. One task of the event loop runs all of the stream. Leaving the loop early
        closes it.

        Raises:
            TypeError: if it cannot be iterated with `async for`.
            RuntimeError, NotInWorld: from a step, as `run`.
        """
        if not isinstance(stream, AsyncIterable):
            raise TypeError(f"iterate() takes what `async for` takes, got {stream!r}")
        return _items(stream, self._thread)


def _items(stream: AsyncIterable[T], thread: "_WorldThread[Any]") -> Iterator[T]:
    """Yield the items of a stream, which one task runs, step by step.

    So what an asynchronous generator enters, it leaves in the same task and context.
    """
    task: asyncio.Task[None] | None = None
    asked: asyncio.Queue[tuple[concurrent.futures.Future[Step], float | None] | None]
    asked = asyncio.Queue()

    iterator: Any = None

    def opened() -> Any:
        nonlocal iterator
        if iterator is None:
            iterator = aiter(stream)  # a remote stream is sent now
        return iterator

    async def run() -> None:
        try:
            while (step := await asked.get()) is not None:
                await thread.complete(step[0], _next_items(opened, step[1]))
                if step[0].exception() is not None or step[0].result()[1]:
                    return
        finally:
            if hasattr(iterator, "aclose"):
                with contextlib.suppress(Exception):
                    await iterator.aclose()

    def ask(future: "concurrent.futures.Future[Step]", seconds: float | None) -> None:
        nonlocal task
        if not thread.refuses(future):
            if task is None:  # the context is that of the reading thread
                task = thread.loop.create_task(run(), name="aiorpc-iterate")
            asked.put_nowait((future, seconds))
            # Other code may cancel the task before it takes this step, or has done so before.
            task.add_done_callback(partial(thread.on_task_end, future))

    try:
        is_over = False
        while not is_over:
            future: concurrent.futures.Future[Step] = thread.future()
            call_soon(thread.loop, ask, future, seconds_left())
            items, is_over, failure = thread.wait(
                future, lambda: task is not None and task.cancel()
            )
            yield from items
            if failure is not None:
                raise failure
    finally:  # not awaited: the collector of garbage may do this in any thread
        call_soon(thread.loop, asked.put_nowait, None)


async def _next_items(opened: Callable[[], Any], seconds: float | None) -> Step:
    items: list[Any] = []
    try:
        iterator = opened()
        has_item: Callable[[], bool] = getattr(iterator, "_has_item", bool)
        # Not `timeout`: a generator would keep its deadline beyond the step.
        async with asyncio.timeout(None if seconds is None else max(seconds, 0.0) + LATER):
            items.append(await anext(iterator))
            while has_item() and len(items) < MOST_ITEMS:
                items.append(await anext(iterator))
    except StopAsyncIteration:
        return items, True, None
    except Exception as exc:
        return items, True, exc
    return items, False, None


async def _awaited(what: Any, args: tuple[Any, ...]) -> Any:
    with timeout(seconds_left()):
        found = what(*args) if callable(what) else what
        return await found if inspect.isawaitable(found) else found


@thread_manager
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
    Ctrl-C while the block waits for the end of the world cancels the wait.

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
    running = _WorldThread(world)
    worker = running.entered()
    try:
        with forks_exit_here():
            yield WorkerThread(worker, running)
    except BaseException as exc:
        trace = exc.__traceback__
        running.leave(exc)
        BaseException.with_traceback(exc, trace)  # without what the thread has added
        raise
    running.leave()
    if running.failure is not None:
        raise running.failure


class _WorldThread(Generic[W]):
    """A world in a thread, from its entry to its end, and the waits of other threads for its loop.

    Not anyio's portal, which opens a scope: from the first scope of a process on, each call has to
    ask for deadlines (`_aio.deadlines`).
    """

    loop: asyncio.AbstractEventLoop  # once it runs

    def __init__(self, world: AbstractAsyncContextManager[W]) -> None:
        self._world = world
        self._left = asyncio.Event()  # set on the thread's loop
        self._error: BaseException | None = None  # of the block
        self.failure: BaseException | None = None  # that has ended the world
        self._is_ending = False  # the world has ended: what still runs is cancelled next
        self._lock = threading.Lock()
        self._futures: set[concurrent.futures.Future[Any]] | None = set()  # None: the loop is over
        self._task: concurrent.futures.Future[asyncio.Task[None]] = concurrent.futures.Future()
        self._entered: concurrent.futures.Future[W] = concurrent.futures.Future()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiorpc-world", daemon=True)
        self._thread.start()

    def entered(self) -> W:
        """Wait until the world is entered; return its worker."""
        return self._join_if_interrupted(self._entered.result)

    def leave(self, error: BaseException | None = None) -> None:
        """End the world, in order or as one whose own block has raised; wait for its end."""
        self._error = error

        def end() -> None:
            call_soon(self._task.result().get_loop(), self._left.set)
            self._join()

        self._join_if_interrupted(end)

    def _join_if_interrupted(self, step: Callable[[], T]) -> T:
        """Return `step()`; what interrupts it, as Ctrl-C does, cancels the world."""
        try:
            return step()
        except BaseException:
            with contextlib.suppress(Exception):  # no loop could be made
                task = self._task.result()
                call_soon(task.get_loop(), task.cancel)
            self._join()
            raise

    def _join(self) -> None:
        # In CPython before 3.13 an interrupted `join` takes the thread for stopped.
        self._is_over.wait()
        self._thread.join()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a task of the loop, and return its result. In another thread."""
        future: concurrent.futures.Future[T] = self.future()
        tasks: list[asyncio.Task[None]] = []

        def start() -> None:
            if not self.refuses(future):
                running = self.complete(future, coroutine)
                tasks.append(self.loop.create_task(running, name="aiorpc-run"))
                tasks[0].add_done_callback(partial(self.on_task_end, future))

        call_soon(self.loop, start)
        return self.wait(future, lambda: [task.cancel() for task in tasks])

    def future(self) -> "concurrent.futures.Future[Any]":
        """Return a future that the loop's thread completes, at the latest when the loop is over."""
        check_not_forked()
        if asyncio._get_running_loop() is self.loop:
            raise RuntimeError(
                "run() and iterate() would block their own event loop: use `await` there"
            )
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._futures is None:
                raise self._gone() from self.failure
            self._futures.add(future)
        return future

    def wait(self, future: "concurrent.futures.Future[T]", cancel: Callable[[], object]) -> T:
        """Wait for a future; if something else ends the wait (Ctrl-C), cancel what runs for it."""
        try:
            return future.result()
        except BaseException:
            if not future.done():
                call_soon(self.loop, cancel)
            raise
        finally:
            with self._lock:
                if self._futures is not None:
                    self._futures.discard(future)

    # ── in the thread ───────────────────────────────────────────────────────────────────────────

    def refuses(self, future: "concurrent.futures.Future[Any]") -> bool:
        """Fail a future, and return True, if the world has ended: nothing starts any more."""
        if self._is_ending:
            future.set_exception(self._gone())
        return self._is_ending

    async def complete(
        self, future: "concurrent.futures.Future[Any]", coroutine: Coroutine[Any, Any, Any]
    ) -> None:
        """Complete a future with what a coroutine returns or raises, whatever it raises."""
        try:
            result = await coroutine
        except BaseException as exc:
            is_end = self._is_ending and isinstance(exc, asyncio.CancelledError)
            # Not by `exc.__traceback__ =`, which a user's class may refuse.
            BaseException.with_traceback(exc, behind_own_frames(exc.__traceback__))
            future.set_exception(self._gone() if is_end else exc)
        else:
            future.set_result(result)

    def on_task_end(
        self, future: "concurrent.futures.Future[Any]", _: "asyncio.Task[None]"
    ) -> None:
        """Cancel a future that its task has not completed: it was cancelled before it could."""
        if not future.done():
            future.set_exception(self._gone() if self._is_ending else asyncio.CancelledError())

    def _gone(self) -> NotInWorld:
        return NotInWorld("the block of in_thread() was left")

    def _run(self) -> None:
        serving = self._serve()
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(serving)
        except BaseException as exc:
            self.failure = exc
        serving.close()  # if there is no loop
        with self._lock:
            futures, self._futures = self._futures or (), None
        for each in futures:
            if not each.done():
                each.set_exception(self._gone())
        for start in (self._task, self._entered):
            if self.failure is not None and not start.done():
                start.set_exception(self.failure)
        self._is_over.set()

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.loop = asyncio.get_running_loop()
        self._task.set_result(task)
        try:
            async with self._world as worker:
                self._entered.set_result(worker)
                await self._left.wait()
                if self._error is not None:
                    raise self._error
        finally:
            self._is_ending = True
