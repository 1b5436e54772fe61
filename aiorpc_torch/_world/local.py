"""Worlds on this machine: this process and children of it, which die with it.

Knows who is in such a world and what each runs; the processes are `_crew`'s subject, and how a
worker joins and leaves is `_world`'s.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .._aio.signals import orderly
from .._server.exports import Export, as_exports
from .._torch.devices import AUTO, DeviceMaps
from .config import OnFailure, Place, Worker
from .environment import new_meeting_place
from .network import only_here
from .supervisor import Crew
from .worker import take_place

__all__ = ("local_world", "run_local")

T = TypeVar("T")


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
    restart: int = 0,
    exports: Sequence[Export] | None = None,
    freeze_gc: bool = True,
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
        device_maps: of this process, as for `worker`; "auto" is for each.
        start_timeout: seconds for the world to be complete.
        stop_timeout: seconds that each process waits for the others when it leaves.
        heartbeat: seconds of silence after which a peer is lost, as for `worker`.
        restart: how many times altogether a child that died is started again. It comes back under
            its name and rank, with nothing of what it held: whoever called it gets `WorkerLost`,
            may `await me.wait_for(name)`, and creates its objects anew.
        exports: what each process answers to, as for `worker`.
        freeze_gc: in each process, as for `worker`.

    Raises:
        WorldTimeout: if children did not come in time.
        WorkerLost: if a child died while it started; its own words are on its stderr.
        ValueError: if two workers have one name.
        RuntimeError: if this process is in a world already.
    """
    names = [name, *_names(workers, first=1)]
    theirs = AUTO if device_maps == AUTO else None
    with _places(
        names,
        threads,
        transports,
        theirs,
        start_timeout,
        stop_timeout,
        heartbeat,
        exports,
        freeze_gc,
    ) as places:
        mine = replace(places[0], device_maps=device_maps or {})
        crew = Crew(places[1:], None, (), restart)
        with orderly():
            async with crew.aboard():
                async with contextlib.AsyncExitStack() as stack:
                    async with crew.watched("stop"):
                        me = await stack.enter_async_context(take_place(mine))
                    crew.complete(me._give_up)
                    with crew.last_word():
                        yield me


def run_local(
    main: Callable[..., Awaitable[T]],
    workers: int | Sequence[str],
    *,
    args: Sequence[Any] = (),
    threads: int = 16,
    transports: Sequence[str] | None = None,
    device_maps: DeviceMaps | None = None,
    start_timeout: float = 60.0,
    heartbeat: float = 10.0,
    restart: int = 0,
    on_failure: OnFailure = "stop",
    exports: Sequence[Export] | None = None,
    freeze_gc: bool = True,
) -> T:
    """Run `main(me, *args)` in every worker of a world on this machine; the first is this process.

    Returns what this process's `main` returned, once every worker's has. A worker whose `main` is
    done serves the others until they are. The first exception, in whichever process, ends the
    world and is raised here. Ctrl-C and SIGTERM end it in order, a second Ctrl-C at once.

    Args:
        main: an `async def` at the top of a module, since children import it.
        workers: their names, or how many, called `worker0`, `worker1`, ...
        args: passed on to `main` in every process.
        threads: in each process, as for `worker`.
        transports: of each process, as for `worker`.
        device_maps: of each process, as for `worker`; it may name the process itself.
        start_timeout: seconds for the world to be complete.
        heartbeat: seconds of silence after which a peer is lost, as for `worker`.
        restart: how many times altogether a child that failed or died is started again, as for
            `local_world`: its `main` runs anew, and `me.comeback` tells that it does.
        on_failure: what a failure beyond that means: "stop", the end of the world, at once;
            "continue", that the others go on without this worker, and the failure is raised here
            when all have ended.
        exports: what each process answers to, as for `worker`.
        freeze_gc: in each process, as for `worker`.

    Raises:
        WorldTimeout, WorkerLost, ValueError: as `local_world`.
        SystemExit: with code 143, if SIGTERM ended the world.
        RuntimeError: if an event loop runs in this thread: there, use `local_world`.
    """
    names = _names(workers, first=0)
    if not names:
        raise ValueError("run_local needs at least one worker")
    # No stop_timeout: the processes are watched, so nobody waits for the dead, however long the
    # living take.
    with _places(
        names, threads, transports, device_maps, start_timeout, None, heartbeat, exports, freeze_gc
    ) as places:
        crew = Crew(places[1:], main, tuple(args), restart)
        return asyncio.run(_run(main, tuple(args), places[0], crew, on_failure))


async def _run(
    main: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    place: Place,
    crew: Crew,
    on_failure: OnFailure,
) -> T:
    with orderly():
        async with crew.aboard():
            async with crew.watched(on_failure), take_place(place) as me:
                crew.complete(me._give_up)
                with crew.last_word():
                    result = await main(me, *args)
    if crew.failures:
        raise crew.failures[0]
    return result


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
    device_maps: DeviceMaps | None,
    start_timeout: float,
    stop_timeout: float | None,
    heartbeat: float,
    exports: Sequence[Export] | None,
    freeze_gc: bool,
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
                device_maps=device_maps or {},
                start_timeout=start_timeout,
                stop_timeout=stop_timeout,
                heartbeat=heartbeat,
                interfaces=only_here(),
                exports=answers,
                freeze_gc=freeze_gc,
                is_local=True,
            )
            for rank, name in enumerate(names)
        ]
