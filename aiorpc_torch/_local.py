"""Worlds on this machine: this process and children of it, which die with it.

Knows who is in such a world and what each runs; a process is `_child`'s subject, and how a worker
joins and leaves is `_world`'s.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ._child import Child, Main, Word, close_all
from ._exports import Export, as_exports
from ._world import DeviceMaps, Place, Worker, new_meeting_place, take_place

__all__ = ("local_world", "run_local")

T = TypeVar("T")

# Seconds for children to end: those who have left their world, and those told to stop now.
EXIT = 5.0
STOP = 0.7


@contextlib.asynccontextmanager
async def local_world(
    workers: int | Sequence[str] = 0,
    *,
    name: str = "main",
    threads: int = 16,
    transports: Sequence[str] | None = None,
    device_maps: DeviceMaps | None = None,
    start_timeout: float = 60.0,
    stop_timeout: float = 10.0,
    heartbeat: float = 10.0,
    exports: Sequence[Export] | None = None,
) -> AsyncIterator[Worker]:
    """A world embedded in this process: it is rank 0, and its children serve until it leaves.

        async with local_world(["ps", "trainer0"]) as me:
            ps = await create("ps", ParameterServer)

    `local_world(0)` is a world of one, without children: for tests, notebooks and programs of one
    process. Children are started as `multiprocessing` starts them with "spawn": a script needs its
    `if __name__ == "__main__":`. They die with this process, whatever kills it. They meet through a
    file and bind to the loopback interface alone.

    Args:
        workers: the children's names, or how many, called `worker1`, `worker2`, ...
        name: of this process.
        threads: in each process, as for `worker`.
        transports: of each process, as for `worker`.
        device_maps: of this process, as for `worker`.
        start_timeout: seconds for the world to be complete.
        stop_timeout: seconds that each process waits for the others when it leaves.
        heartbeat: seconds of silence after which a peer is lost, as for `worker`.
        exports: what each process answers to, as for `worker`.

    Raises:
        WorldTimeout: if children did not come in time.
        WorkerLost: if a child died while it started; its own words are on its stderr.
        ValueError: if two workers have one name.
        RuntimeError: if this process is in a world already.
    """
    names = [name, *_names(workers, first=1)]
    with _places(
        names, threads, transports, start_timeout, stop_timeout, heartbeat, exports
    ) as places:
        mine = replace(places[0], device_maps=device_maps or {})
        async with _children(places[1:], None, ()) as children:
            async with contextlib.AsyncExitStack() as stack:
                async with _unless_one_fails(children):
                    me = await stack.enter_async_context(take_place(mine))
                with _last_word(children):
                    yield me


def run_local(
    main: Callable[..., Awaitable[T]],
    workers: int | Sequence[str],
    *,
    args: Sequence[Any] = (),
    threads: int = 16,
    transports: Sequence[str] | None = None,
    start_timeout: float = 60.0,
    heartbeat: float = 10.0,
    exports: Sequence[Export] | None = None,
) -> T:
    """Run `main(me, *args)` in every worker of a world on this machine; the first is this process.

    Returns what this process's `main` returned, once every worker's has. A worker whose `main` is
    done serves the others until they are. The first exception, in whichever process, ends the
    world and is raised here; Ctrl-C ends it in order.

    Args:
        main: an `async def` at the top of a module, since children import it.
        workers: their names, or how many, called `worker0`, `worker1`, ...
        args: passed on to `main` in every process.
        threads: in each process, as for `worker`.
        transports: of each process, as for `worker`.
        start_timeout: seconds for the world to be complete.
        heartbeat: seconds of silence after which a peer is lost, as for `worker`.
        exports: what each process answers to, as for `worker`.

    Raises:
        WorldTimeout, WorkerLost, ValueError: as `local_world`.
        RuntimeError: if an event loop runs in this thread: there, use `local_world`.
    """
    names = _names(workers, first=0)
    if not names:
        raise ValueError("run_local needs at least one worker")
    # No stop_timeout: the processes are watched, so nobody waits for the dead, however long the
    # living take.
    with _places(names, threads, transports, start_timeout, None, heartbeat, exports) as places:
        return asyncio.run(_run(main, places, tuple(args)))


async def _run(main: Callable[..., Awaitable[T]], places: list[Place], args: tuple[Any, ...]) -> T:
    async with _children(places[1:], main, args) as children:
        async with _unless_one_fails(children), take_place(places[0]) as me:
            with _last_word(children):
                return await main(me, *args)


# ── who is there ────────────────────────────────────────────────────────────────────────────────


def _names(workers: int | Sequence[str], *, first: int) -> list[str]:
    if isinstance(workers, int):
        return [f"worker{rank}" for rank in range(first, first + workers)]
    if isinstance(workers, str):
        raise TypeError(f"workers is a number or a list of names, not the name {workers!r}")
    return list(workers)


@contextlib.contextmanager
def _places(
    names: list[str],
    threads: int,
    transports: Sequence[str] | None,
    start_timeout: float,
    stop_timeout: float | None,
    heartbeat: float,
    exports: Sequence[Export] | None,
) -> Iterator[list[Place]]:
    answers = None if exports is None else as_exports(exports)
    if len(set(names)) < len(names):
        raise ValueError(f"two workers have one name: {', '.join(names)}")
    with new_meeting_place() as where:
        yield [
            Place(
                name=name,
                rank=rank,
                world_size=len(names),
                init_method=where,
                threads=threads,
                transports=transports,
                start_timeout=start_timeout,
                stop_timeout=stop_timeout,
                heartbeat=heartbeat,
                exports=answers,
                is_local=True,
            )
            for rank, name in enumerate(names)
        ]


# ── from their start to their end ───────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def _children(
    places: list[Place], main: Main | None, args: tuple[Any, ...]
) -> AsyncIterator[list[Child]]:
    children: list[Child] = []
    patience = STOP
    try:
        for place in places:
            children.append(Child(place, main, args))  # noqa: PERF401 - one by one: if the next fails
        yield children
        patience = EXIT
    finally:
        if patience == STOP:
            _tell(children, Word.CANCEL)
        await close_all(children, patience)


@contextlib.contextmanager
def _last_word(children: list[Child]) -> Iterator[None]:
    """Before this process leaves the world, let the children know how."""
    try:
        yield
    except BaseException:
        _tell(children, Word.CANCEL)
        raise
    _tell(children, Word.LEAVE)


def _tell(children: list[Child], word: Word) -> None:
    for child in children:
        child.tell(word)


@contextlib.asynccontextmanager
async def _unless_one_fails(children: list[Child]) -> AsyncIterator[None]:
    """Interrupt the block when a child fails, and raise what it raised."""
    failures: list[BaseException] = []
    # Not for the time: the standard library's one way to interrupt a block, and only that block.
    interruption = asyncio.timeout(None)

    def look(ended: "asyncio.Future[BaseException | None]") -> None:
        if (failure := ended.result()) is not None and not failures:
            failures.append(failure)
            with contextlib.suppress(RuntimeError):  # the block has just ended
                interruption.reschedule(0.0)

    try:
        async with interruption:
            for child in children:
                child.ended.add_done_callback(look)
            try:
                yield
            finally:
                for child in children:
                    child.ended.remove_done_callback(look)
    except TimeoutError:
        if not failures:
            raise
        raise failures[0]  # noqa: B904 - its cause is the traceback in the child
