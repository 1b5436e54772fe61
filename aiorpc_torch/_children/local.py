"""Worlds on this machine: this process and its child processes, which die with it."""

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from .._aio.loops import LoopFactory, await_on, new_event_loop
from .._aio.signals import graceful_signals
from .._names import renamed_parameters
from .._node.config import (
    Initializer,
    OnFailure,
    WorkerConfig,
    check_on_failure,
    check_type,
    new_local_url,
    watchdog_seconds,
)
from .._peers.peers import Peer
from .._port.network import loopback_only
from .._server.exports import Export, checked_exports
from .._torch.devices import AUTO, DeviceMaps
from .._wire.by_value import is_by_value
from .._world.managers import world_manager
from .._world.worker import Worker, run_worker
from ..errors import NotInWorld
from .forkserver import Logs, ProcessOptions, Start
from .supervisor import Supervisor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)
class LocalWorker(Worker):
    """The first process of a local world: what `local_world()` yields."""

    _supervisor: Supervisor = field(compare=False, kw_only=True)
    _config: WorkerConfig = field(compare=False, kw_only=True)  # the options of all processes

    async def start(self, name: str) -> None:
        """Start one more child, and return when it has joined the world.

        It serves as the others do, and `max_restarts=` applies to it. A child is added in
        milliseconds, unless it is the first, or `start="spawn"`.

        Raises:
            ValueError: If a living worker has the name, or one that is joining.
            WorkerLost, WorldTimeout: If the child dies, or does not join within `start_timeout`.
            NotInWorld: If this worker's block has ended.
            TypeError: If `exports`, `loop_factory` or `initializer` cannot be imported by children.
        """
        self._check_is_open()
        if name in self.peers and not self._node.pool.is_lost(name):
            raise ValueError(f"two workers have the name {name!r}: the first one is alive")
        _check_for_children(self._config)
        config = replace(self._config, name=name, rank=-1, world_size=-1, join=True)
        joining = self._supervisor.add(config, self._has_joined(name))
        await await_on(self._node.loop, joining)

    async def stop(self, name: str) -> None:
        """Let a child leave in order, and return when its process has ended; the others go on.

        The calls that run there get the `stop_timeout` of the world to end. A child that has not
        ended 2 s later is killed: its event loop is blocked, or it is frozen.

        Raises:
            ValueError: If no such child is alive.
            NotInWorld: If this worker's block has ended.
        """
        check_type("a worker's name", name, str)
        self._check_is_open()
        await await_on(self._node.loop, self._stop(name))

    async def _restart(self, peer: Peer) -> None:
        if peer.name in self._supervisor.config_of:
            await self._supervisor.replace_once(peer.name, lambda: self._replace(peer))
        else:
            await Worker._restart(self, peer)

    async def _replace(self, peer: Peer) -> None:
        if await self._supervisor.replace(peer.name):
            await self._node.membership.wait_until_alive(peer.name, peer.worker_id)
        else:
            await self.start(peer.name)

    def _check_is_open(self) -> None:
        if not self._node.membership.is_open:
            raise NotInWorld("this worker has left its world, and its children have ended")

    async def _stop(self, name: str) -> None:
        process = self._node.members.worker_id_of(name)
        await self._supervisor.remove(name, self._config.stop_timeout or 0.0)
        # Its own message may be on its way. One that has failed is lost.
        if process is not None and not self._node.pool.is_lost(name):
            self._node.membership.on_leave_message(name, process, "left", "")

    async def _has_joined(self, name: str) -> None:
        former = self._node.members.worker_id_of(name)  # it may be frozen, and thaw
        async for change in self.changes():
            is_here = change.name == name and change.kind in ("joined", "returned")
            if is_here and self._node.members.worker_id_of(name) != former:
                return
        raise NotInWorld("this worker has left its world")


@renamed_parameters(restart="max_restarts")
@world_manager
async def local_world(
    workers: int | Sequence[str] = 0,
    *,
    name: str = "main",
    threads: int = 16,
    transports: Sequence[str] | None = None,
    channels: Sequence[str] | None = None,
    device_maps: DeviceMaps | None = None,
    start_timeout: float = 60.0,
    stop_timeout: float = 10.0,
    heartbeat: float = 10.0,
    watchdog: float | None = None,
    max_restarts: int = 0,
    exports: Sequence[Export] | None = None,
    freeze_gc: bool = True,
    handle_signals: bool = True,
    start: Start = "forkserver",
    preload: Sequence[str] = (),
    loop_factory: LoopFactory | None = None,
    initializer: Initializer | None = None,
    logs: Logs | None = None,
) -> AsyncIterator[LocalWorker]:
    """Be rank 0 of a world whose other workers are children that serve until this process leaves.

        async with aiorpc.local_world(["ps", "trainer0"]) as me:
            ps = await aiorpc.create("ps", ParameterServer)

    `local_world(0)` is a world of one, without children: for tests, notebooks and programs of one
    process. Children import the file of `__main__`: a script needs its
    `if __name__ == "__main__":`. They die with this process, however it ends. They meet at
    an abstract Unix socket and bind to the loopback interface only.

    Args:
        workers: Names of the children, or their number; then they are `worker1`, `worker2`, ...
        name: Name of this process.
        threads: As for `worker`, in each process.
        transports: As for `worker`, of each process.
        channels: As for `worker`, of each process.
        device_maps: As for `worker`, of this process; "auto" applies to each process.
        start_timeout: Seconds until the world must be complete.
        stop_timeout: Seconds that each process waits for the others when it leaves.
        heartbeat: Seconds of silence after which a peer is lost, as for `worker`.
        watchdog: As for `worker`, in each process. With `max_restarts=` a child is started again.
        max_restarts: Number of times altogether that dead children are started again. A child
            rejoins under its name, and one of the first under its rank, without the objects that it
            held. Its callers get `WorkerLost`, may `await me.wait_for(name)`, and create the
            objects again, which `supervised` does.
        exports: As for `worker`, of each process.
        freeze_gc: As for `worker`, in each process.
        handle_signals: As for `worker`, in this process. Children never handle Ctrl-C themselves.
        start: Start of the children. "forkserver": they are forked from a process that has imported
            torch, and start in milliseconds. "spawn": each gets a new interpreter, which takes
            seconds, and 300 MB of its own.
        preload: Names of modules that the process from which children are forked imports too. They
            must start no thread and must not use CUDA while they are imported. With `start="spawn"`
            there is no such process, and they are not imported.
        loop_factory: Function or class at the top level of a module that makes the event loops of
            the children (default: uvloop's where it is installed, else asyncio's). The program
            chooses its own: under `uvloop.run(main())` a call takes a tenth less CPU.
        initializer: Function at the top level of a module that each child calls with its name,
            before its event loop and its world. It may choose the child's device:
            `torch.cuda.set_device`.
        logs: "names": each line that a child prints or logs begins with its name, and the last
            lines of a child that dies are in its `WorkerLost`. C++'s lines too. None: children
            write to the streams of this process themselves.

    Raises:
        WorldTimeout: If children did not start in time.
        WorkerLost: If a child died while it started; its own traceback is on its stderr.
        ValueError: If two workers have one name.
        ImportError: If a module of `preload` cannot be imported.
        RuntimeError: If this process is in a world already. If a module of `preload` started a
            thread or CUDA.
    """
    configs = _configs(
        [name, *_names(workers, first=1)],
        init_method=new_local_url(),
        threads=threads,
        transports=transports,
        channels=channels,
        device_maps=AUTO if device_maps == AUTO else {},
        start_timeout=start_timeout,
        stop_timeout=stop_timeout,
        heartbeat=heartbeat,
        watchdog=watchdog_seconds(watchdog),
        max_restarts=max_restarts,
        exports=exports,
        freeze_gc=freeze_gc,
        loop_factory=loop_factory,
        initializer=initializer,
    )
    mine = replace(configs[0], device_maps=device_maps or {})
    supervisor = Supervisor(
        configs[1:], None, (), max_restarts, ProcessOptions(start, preload, logs)
    )
    with graceful_signals(handle_signals, supervisor.begin_to_stop):
        async with supervisor.running(), contextlib.AsyncExitStack() as stack:
            async with supervisor.raising_failures("stop"):
                me = await stack.enter_async_context(run_worker(mine, supervisor.last))
            supervisor.watch_children(me)
            with supervisor.notifying_on_exit():
                yield LocalWorker._of(
                    me._node, _leave=me._leave, _supervisor=supervisor, _config=configs[0]
                )


@renamed_parameters(restart="max_restarts")
def run_local(
    main: Callable[..., Awaitable[T]],
    workers: int | Sequence[str],
    *,
    args: Sequence[Any] = (),
    threads: int = 16,
    transports: Sequence[str] | None = None,
    channels: Sequence[str] | None = None,
    device_maps: DeviceMaps | None = None,
    start_timeout: float = 60.0,
    heartbeat: float = 10.0,
    watchdog: float | None = None,
    max_restarts: int = 0,
    on_failure: OnFailure = "stop",
    exports: Sequence[Export] | None = None,
    freeze_gc: bool = True,
    handle_signals: bool = True,
    start: Start = "forkserver",
    preload: Sequence[str] = (),
    loop_factory: LoopFactory | None = None,
    initializer: Initializer | None = None,
    logs: Logs | None = None,
) -> T:
    """Run `main(me, *args)` in every worker of a world on this machine; the first is this process.

    Return the result of this process's `main`, once every worker's has returned. A worker whose
    `main` has returned serves the others until then. The first exception, in any process, ends the
    world and is raised here. Ctrl-C and SIGTERM end it in order, a second Ctrl-C at once.

    Args:
        main: An `async def` at the top level of a module, since children import it.
        workers: Names of the workers, or their number; then they are `worker0`, `worker1`, ...
        args: Further arguments of `main`, in every process.
        threads: As for `worker`, in each process.
        transports: As for `worker`, of each process.
        channels: As for `worker`, of each process.
        device_maps: As for `worker`, of each process; it may name the process itself.
        start_timeout: Seconds until the world must be complete.
        heartbeat: Seconds of silence after which a peer is lost, as for `worker`.
        watchdog: As for `worker`, in each process. With `max_restarts=` a child is started again.
        max_restarts: Number of times altogether that failed or dead children are started again,
            as for `local_world`. Its `main` runs anew, with `me.restarts` above 0.
        on_failure: Effect of a failure beyond that. "stop": the world ends at once. "continue": the
            other workers go on, and the failure is raised here when all have ended. The failure of
            a child that the world lacks at its start always ends it.
        exports: As for `worker`, of each process.
        freeze_gc: As for `worker`, in each process.
        handle_signals: As for `worker`, in this process. Children never handle Ctrl-C themselves.
        start: As for `local_world`.
        preload: As for `local_world`.
        loop_factory: As for `local_world`, in every process.
        initializer: As for `local_world`, in every process, this one included.
        logs: As for `local_world`.

    Raises:
        WorldTimeout, WorkerLost, ValueError, ImportError: As `local_world`.
        TypeError: If children cannot import `main`: one of a notebook, for which `local_world` is.
        SystemExit: With code 143, if SIGTERM ended the world.
        RuntimeError: If an event loop runs in this thread: use `local_world` there.
    """
    names = _names(workers, first=0)
    check_on_failure(on_failure)
    if not names:
        raise ValueError("run_local needs at least one worker")
    if len(names) > 1:
        _check_importable("main must be", main)
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            "run_local() makes an event loop, and one runs in this thread: use `async with "
            "local_world(...)` there"
        )
    configs = _configs(
        names,
        init_method=new_local_url(),
        threads=threads,
        transports=transports,
        channels=channels,
        device_maps=device_maps or {},
        start_timeout=start_timeout,
        stop_timeout=None,  # the processes are supervised: a worker waits while its peers live
        heartbeat=heartbeat,
        watchdog=watchdog_seconds(watchdog),
        max_restarts=max_restarts,
        exports=exports,
        freeze_gc=freeze_gc,
        loop_factory=loop_factory,
        initializer=initializer,
    )
    processes = ProcessOptions(start, preload, logs)
    supervisor = Supervisor(configs[1:], main, tuple(args), max_restarts, processes)
    configs[0].initialize()
    with asyncio.Runner(loop_factory=configs[0].loop_factory) as runner:
        return runner.run(_run(main, configs[0], supervisor, on_failure, handle_signals))


async def _run(
    main: Callable[..., Awaitable[T]],
    config: WorkerConfig,
    supervisor: Supervisor,
    on_failure: OnFailure,
    handle_signals: bool,
) -> T:
    with graceful_signals(handle_signals, supervisor.begin_to_stop):
        async with supervisor.running():
            entering = run_worker(config, supervisor.last)
            async with supervisor.raising_failures(on_failure), entering as me:
                supervisor.watch_children(me)
                with supervisor.notifying_on_exit():
                    result = await main(me, *supervisor.args)
    if supervisor.failures:
        raise supervisor.failures[0]
    return result


def _names(workers: int | Sequence[str], *, first: int) -> list[str]:
    if isinstance(workers, int):
        if workers < 0:
            raise ValueError(f"workers must be a number from 0 or a list of names, got {workers}")
        return [f"worker{rank}" for rank in range(first, first + workers)]
    if isinstance(workers, str) or not isinstance(workers, Iterable):
        raise TypeError(f"workers must be a number or a list of names, got {workers!r}")
    return list(workers)


def _configs(names: list[str], **options: Any) -> list[WorkerConfig]:
    """Return the configurations of the workers of a local world; `options` are WorkerConfig's."""
    exports, factory = options["exports"], options["loop_factory"]
    check_type("max_restarts", options["max_restarts"], int)
    if options["max_restarts"] < 0:
        raise ValueError(f"max_restarts must be at least 0, got {options['max_restarts']}")
    options["exports"] = None if exports is None else checked_exports(exports)
    options["loop_factory"] = new_event_loop if factory is None else factory
    if not callable(options["loop_factory"]):
        raise TypeError(f"loop_factory must make an event loop when called, got {factory!r}")
    options |= {"world_size": len(names), "interface": loopback_only(), "is_local": True}
    configs = [WorkerConfig(name, rank, **options) for rank, name in enumerate(names)]
    if len(set(names)) < len(names):
        raise ValueError(f"two workers have one name: {', '.join(names)}")
    if len(names) > 1:
        _check_for_children(configs[0])
    return configs


def _check_for_children(config: WorkerConfig) -> None:
    for each in config.exports or ():
        _check_importable("exports must hold", each)
    _check_importable("loop_factory must be", config.loop_factory, is_pickled=True)
    _check_importable("initializer must be", config.initializer, is_pickled=True)


def _check_importable(rule: str, value: Any, *, is_pickled: bool = False) -> None:
    """Raise TypeError for a function or class that children cannot import.

    With `is_pickled` also for another object that cannot be pickled. `main` may hold locks and
    queues of multiprocessing, which are pickled as a process starts only.
    """
    if isinstance(value, str):
        return
    try:
        is_importable = not (hasattr(value, "__qualname__") and is_by_value(value))
        if is_pickled:
            pickle.dumps(value)
    except Exception:
        is_importable = False
    if not is_importable:
        raise TypeError(
            f"{rule} what child processes can import, got {value!r}: put it into a module"
        )
