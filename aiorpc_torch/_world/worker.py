"""A worker's life: it joins its world, serves on the running loop, and leaves."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from .._aio.fork import check_not_forked, forks_exit_here
from .._aio.loop_lag import watchdog as ending_if_blocked
from .._aio.loops import await_on, interruptible
from .._aio.signals import graceful_signals
from .._aio.tasks import run_to_end
from .._aio.threads import run_in_thread
from .._client.introduction import Introductions
from .._directory.meeting import Meeting
from .._directory.record import lease_for
from .._endpoint import entry_points
from .._handles.mistakes import no_attribute
from .._inspection.dump import dump_on_signal
from .._inspection.snapshot_socket import offered
from .._node.config import OnFailure, WorkerConfig, watchdog_seconds
from .._node.membership import Children, Membership
from .._node.node import Node, host_for
from .._peers.changes import Change, Entry
from .._peers.peers import Peer, Peers, State
from .._port.dialer import Dialer
from .._port.network import loopback_only, requested_interface
from .._port.port import Port
from .._port.tls import Tls
from .._server.exports import Export, checked_exports
from .._torch.agent import PeerInfo, is_running
from .._torch.compat import CPP_WARNING, hide_in_cpp_log
from .._torch.devices import DeviceMaps
from ..errors import UnknownWorker, WorkerLost
from .directory_client import DirectoryClient
from .launch import find_port, find_tls, is_single_host, meeting_url, rank_and_size
from .managers import world_manager
from .shutdown import Shutdown, describe_failure
from .startup import OnePort, Startup, host_of_port, start_step

log = logging.getLogger("aiorpc_torch")


@dataclass(frozen=True, slots=True)
class Worker:
    """This process as a member of a world: what `worker()` and `local_world()` yield.

    Attributes:
        name: The name of this worker.
        rank: Its rank, from 0.
        restarts: How often the process of this worker was started again in this world.
    """

    name: str
    rank: int
    restarts: int = 0
    _node: Node = field(repr=False, compare=False, kw_only=True)
    _leave: Callable[[], Coroutine[Any, Any, None]] | None = field(
        default=None, repr=False, compare=False, kw_only=True
    )

    @classmethod
    def _of(cls, node: Node, **more: Any) -> Self:
        """Return the worker of a node whose members are known."""
        own = node.members.own
        return cls(own.name, own.rank, node.members.restarts, _node=node, **more)

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the other workers, in rank order. They follow the changes of the world.

        Lost workers are among them, and workers that have left are not.
        """
        return self._node.members.present()

    @property
    def world_size(self) -> int:
        """Number of workers that are in the world, this one included."""
        return 1 + len(self.peers)

    @property
    def coordinator(self) -> str | None:
        """The name of the worker that keeps the directory of this world now, at the start rank 0.

        Processes enter there. None in a world of `attach`. The guide "Take a machine out" says
        where it moves.
        """
        return self._node.departures.coordinator or None

    @property
    def world(self) -> Any:
        """The context manager of this world, which ends it: a notebook may have no name for it.

            await me.world.__aexit__(None, None, None)  # with `in_thread`: me.world.__exit__(...)

        In `run_local` it is None.
        """
        return self._node.manager

    def __repr__(self) -> str:
        # Ranks are not given again: one that has joined may have any.
        of = f" of {self.world_size}" if self.rank < self.world_size else ""
        return f"<Worker {self.name}, rank {self.rank}{of}>"

    if not TYPE_CHECKING:  # type checkers report the mistake themselves

        def __getattr__(self, name: str) -> NoReturn:
            remedy = ""
            if instead := {"run": "await ...", "iterate": "async for ..."}.get(name):
                remedy = f", which is of the worlds of in_thread(): write `{instead}` in this one"
            elif name in ("close", "shutdown", "__aexit__", "__exit__") and self.world is not None:
                remedy = f": to leave the world, write `{self.world.leave_text}`"
            raise no_attribute(self, name, remedy)

    async def wait_for(self, peer: str) -> None:
        """Wait until `peer` is alive: if it is lost, until it rejoins; else return at once.

            except WorkerLost as lost:
                await me.wait_for(lost.worker)

        A lost worker rejoins when its process is started again (`max_restarts=` of `local_world`
        and `run_local`, or your own supervisor). One that was frozen or unreachable rejoins by
        itself.
        A replacement process holds no objects of the old one: create them again. Bound the wait
        with `aiorpc.timeout`.

        Raises:
            UnknownWorker: if there is no such peer.
            WorkerLost: if it will not rejoin.
            WorkerLeft: if it has left in order.
            NotInWorld: once this worker leaves its world.
        """
        self._check_peer("peer", peer)
        await self._node.membership.wait_until_alive(peer)

    def changes(self) -> AsyncIterator[Change]:
        """Yield each change of this world's membership: workers that join, leave, are lost, return.

            async for change in me.changes():
                if change.kind == "lost":
                    log.warning("%s: %s", change.name, change.reason)

        None is missed from this call on, however slow the loop, and also if a wait for the next one
        is cancelled. Any number of tasks may read, also on other event loops; each sees every
        change, in one order. The iteration ends when this worker has left. In a world of `attach`,
        "joined" and "left" tell of peers that attach and leave; a peer that had attached before
        this worker joins once it has answered.
        """
        return _Changes(self._node.membership)

    async def serve(self, until: str | None = None) -> None:
        """Serve until every live peer has left or serves too; or until one peer has left.

            async with aiorpc.worker() as me:
                ps = await aiorpc.create(me.name, ParameterServer)
                await me.serve()

        A driver and any number of servers end together: when the driver leaves, each server's wait
        ends. Lost peers are not waited for; replacement processes are. After 10 s the log names the
        awaited peers, at level INFO. Bound the wait with `aiorpc.timeout`.

        Args:
            until: Name of a peer, which must leave (default: all must leave, or serve).

        Raises:
            UnknownWorker: if there is no such peer.
            WorkerLost: if the peer `until` is lost.
            NotInWorld: once another process has replaced this one, which was frozen, say.
        """
        departures = self._node.departures
        if until is None:
            await departures.serve()
            return
        self._check_peer("until", until)
        await departures.serve(until)
        if reason := await departures.failure_of(until):
            raise WorkerLost(until, reason) from self._node.members.lost().get(until)

    async def leave(self) -> None:
        """Leave the world while the others go on; return when no call runs here any more.

            except asyncio.CancelledError:  # SIGTERM, say
                await me.leave()
                raise

        Not in a `finally:`: peers would not hear of the exception that ends the block.

        From now on this worker takes no new calls: those of its peers raise `WorkerLeft`, and
        `changes()` tells them "left". The calls that run here get `stop_timeout` seconds, or 10 if
        it is None. Then they are cancelled, and raise `WorkerLeft` with `may_have_run` True. This
        worker may call others until its block ends, which then waits for no peer. A second call
        waits for the same end. Not in a method that a peer has called: that is waited for.
        """
        assert self._leave is not None
        await await_on(self._node.loop, self._leave())

    async def restart(self, name: str) -> None:
        """End a peer's process whatever its state; return when a new one has entered as `name`.

            except CallTimeout:  # the environment hangs
                await me.restart("env0")

        A child of this process is killed and started again, which does not count against
        `max_restarts`. Any other peer is told to end its process, with exit code 1, which it does
        also if its event loop is blocked. Whatever supervises that process must start it again. If
        it is frozen, or C code there keeps the GIL, it is not told: its `watchdog=` ends it.

        Calls that run there raise `WorkerLost`; `remote(ref, retries=)` makes them again.
        Supervised objects are made again. Bound the wait with `aiorpc.timeout`.

        Raises:
            UnknownWorker: if there is no such peer.
            WorkerLost: if no process will take its place.
            WorkerLeft: if it leaves in order just now, or has left and is no child of this process.
            NotInWorld: once this worker leaves its world.
        """
        self._check_peer("name", name)
        peer = self._node.members.peers[name]
        await await_on(self._node.loop, self._restart(peer))

    async def _restart(self, peer: Peer) -> None:
        membership = self._node.membership
        await membership.wait_until_probed(peer.name)
        if peer.state is State.ALIVE:
            membership.tell_to_exit(peer)
        await membership.wait_until_alive(peer.name, peer.worker_id)

    def _check_peer(self, option: str, peer: str) -> None:
        if not isinstance(peer, str) or peer not in self._node.members.peers:
            names = ", ".join(self.peers) or "(no peer)"
            raise UnknownWorker(
                f"{option} must be one of {names}, got {peer!r}. A worker that joins is one of "
                "them once it has entered (`me.changes()` tells)"
            )


@world_manager
async def worker(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    join: bool = False,
    init_method: str | None = None,
    threads: int = 16,
    transports: Sequence[str] | None = None,
    channels: Sequence[str] | None = None,
    device_maps: DeviceMaps | None = None,
    start_timeout: float = 60.0,
    stop_timeout: float | None = None,
    heartbeat: float = 10.0,
    watchdog: float | None = None,
    interface: str | None = None,
    port: int | None = None,
    tls: Tls | None = None,
    on_failure: OnFailure = "continue",
    exports: Sequence[Export] | None = None,
    freeze_gc: bool = True,
    handle_signals: bool = True,
) -> AsyncIterator[Worker]:
    """Be a worker of a world: `async with worker("trainer0", rank=1, world_size=3) as me`.

    The worker serves on the running loop from entry to exit. Exit serves on until every live peer
    leaves too, and always returns. An exception inside ends the worker at once and is sent to the
    peers. Their calls to this worker then raise `WorkerLost`.

    Args:
        name: Name for the peers' calls (default: `worker{rank}`).
        rank: Rank of this worker, from 0 (default: RANK in the environment, as torchrun sets it,
            else Slurm's or Kubernetes' number of this process).
        world_size: Number of workers (default: WORLD_SIZE in the environment, else Slurm's number
            of tasks).
        join: Whether to enter a world that runs, at the same `init_method` or MASTER_ADDR, from a
            process that was in no world before. The worker needs a name and gets the next rank. Its
            exit does not wait for its peers to leave. It gives the calls that run here
            `stop_timeout` seconds, by default 10.
        init_method: URL at which the workers meet: `tcp://host:port` of rank 0, `file:///path`, or
            `etcd://host:port/name` with the extra `etcd` (default: MASTER_ADDR and MASTER_PORT in
            the environment, else Slurm's first host). A world of one that none joins needs none.
        threads: Number of threads of torch's RPC, and as many again for plain `def` methods.
        transports: TensorPipe's transports for large and CUDA tensors, in order of preference
            (default: `["uv"]`, TCP, which costs nothing when idle). Shared memory
            (`["shm", "uv"]`) is faster on one host, and takes most of a core for polling.
        channels: TensorPipe's channels for the tensors of a message, in order of preference
            (default: AIORPC_TORCH_CHANNELS in the environment, separated by commas, else all that
            work between two workers, the fastest first). On a host whose processes see different
            GPUs, CUDA IPC may raise when workers connect: pass `["cuda_basic", "basic"]`, which
            copy through the CPU.
        device_maps: Map for each peer from this worker's CUDA devices to the peer's, as torch's
            `device_maps`: `{"ps": {"cuda:0": "cuda:1"}}`. Arguments arrive on the peer's device,
            results on this worker's. "auto" maps each index to itself, for every peer that is in
            the world when this worker starts; one that joins later needs a map under its name. A
            tensor on a device without a map cannot be sent.
        start_timeout: Seconds until the world must be complete.
        stop_timeout: Seconds that exit waits for peers, still serving (default: as long as live
            peers are inside). Lost peers are not waited for. A cancellation, Ctrl-C or SIGTERM ends
            the wait. After 10 s the log names who is awaited.
        heartbeat: Seconds of silence after which a peer that something waits for is lost: it is
            frozen or unreachable. At least 0.05. (A peer that dies is detected at once.)
        watchdog: Seconds after which the process ends, with a non-zero exit code, if its event loop
            has not run: a method blocks it, C code keeps the GIL, or the process was frozen. It
            ends an eighth later at most, and never before. The stacks of its threads are printed on
            stderr. At least 1 (default: AIORPC_TORCH_WATCHDOG in the environment, else no
            watchdog). Whatever supervises the process starts a new one.
        interface: Network interface of this worker, such as `"eth1"` (default: AIORPC_INTERFACE in
            the environment, else TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, else the interface that
            leads to rank 0's address).
        port: TCP port of this worker, the only one that others need to reach beside MASTER_PORT
            (default: AIORPC_TORCH_PORT in the environment, plus LOCAL_RANK or SLURM_LOCALID, else
            random ports). Every worker of a world needs one.
        tls: Certificate of this worker (default: the files AIORPC_TORCH_TLS_CERT,
            AIORPC_TORCH_TLS_KEY and AIORPC_TORCH_TLS_CA of the environment, else no TLS). All
            between hosts is encrypted then, on one port for each worker, and a peer without a
            certificate of the same authority is refused. Every worker of a world needs one.
        on_failure: Effect of an exception in a peer's block, or of a peer's death. "continue": this
            worker's calls to that peer raise `WorkerLost`. "stop": the block is cancelled, and
            `WorkerLost` raised from it.
        exports: Classes, functions and names of modules that calls may reach (default: everything
            that can be imported). A class stands for the public methods of its instances,
            inherited ones and subclasses too, and for `create`. A module stands for all that it
            and its submodules define. Any other call raises `NotExported` at its caller, and its
            arguments are not unpickled. Holders of an RRef may always `fetch` it. This is no
            sandbox: pickled arguments may name anything, and torch's own `rpc_sync` runs anything.
        freeze_gc: Whether garbage collection ignores, until the world ends, the objects that exist
            at its start (`gc.freeze`). torch alone has 200,000. With them a full collection takes
            about 0.1 s, in which this worker does not answer.
        handle_signals: Whether SIGTERM cancels the block, and a second Ctrl-C ends the process at
            once. Both hold under `asyncio.run` in the main thread, if the program has no handlers.

    Raises:
        WorldTimeout: If ranks are missing after `start_timeout`; it names them.
        ValueError: If arguments and environment do not describe the world, or if there is no such
            interface. If two workers have one rank or one name, or differ in the world size; it
            names both. If a device map names an unknown device, or one of the peer's devices twice;
            it names the worker. If a worker that joins has the name of a living one, or is given no
            name, a rank or a world size; if it cannot reach the others, or they it. If another
            program listens at the address of rank 0. If a certificate is not valid, or refused at
            the directory; it names the file.
        TypeError: If an argument is of another type; it names the argument.
        OSError: At rank 0, if another process listens at its address. If `port` is in use.
        RuntimeError: If this process is in a world already, or joins and was in one before.
    """
    rank, world_size = rank_and_size(name, rank, world_size, join=join)
    local = loopback_only() if is_single_host(init_method, world_size) else None
    config = WorkerConfig(
        name=name or f"worker{rank}",
        rank=rank,
        world_size=world_size,
        join=join,
        init_method=meeting_url(init_method, world_size),
        threads=threads,
        transports=transports,
        channels=channels,
        device_maps=device_maps or {},
        start_timeout=start_timeout,
        stop_timeout=stop_timeout,
        heartbeat=heartbeat,
        watchdog=watchdog_seconds(watchdog),
        interface=requested_interface(interface) or local,
        port=find_port(port),
        tls=tls,
        on_failure=on_failure,
        exports=None if exports is None else checked_exports(exports),
        freeze_gc=freeze_gc,
    )
    with graceful_signals(handle_signals):
        tls = await start_step(partial(find_tls, tls), config.start_timeout)
        async with run_worker(replace(config, tls=tls)) as me:
            yield me


class _Changes(AsyncIterator[Change]):
    """The changes of a world from now on, also after a cancelled wait."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._entry: Entry | None = membership.log.end  # None: the iteration is over
        self._is_awaited = False

    async def __anext__(self) -> Change:
        self._check_not_awaited()
        if self._entry is None:
            raise StopAsyncIteration
        self._is_awaited = True
        try:
            self._entry = await self._membership.next_change(self._entry)
        finally:
            self._is_awaited = False
        if self._entry is None:
            raise StopAsyncIteration
        return self._entry.change

    async def aclose(self) -> None:
        """End the iteration."""
        self._check_not_awaited()
        self._entry = None

    def _check_not_awaited(self) -> None:
        if self._is_awaited:  # as for an async generator
            raise RuntimeError("another task waits for the next change")


def check_is_free() -> None:
    """Raise RuntimeError if this process is in a world, one of `init_rpc` too, or is a fork."""
    check_not_forked()
    if is_running():
        raise RuntimeError(
            f"this process is in a world already: {entry_points.how_to_leave()}. "
            "torch allows one at a time"
        )


@contextlib.asynccontextmanager
async def run_worker(
    config: WorkerConfig, children: Children | None = None
) -> AsyncIterator[Worker]:
    """Be the worker of `config` during the block; `children` are as for `Membership`."""
    check_is_free()
    end = asyncio.get_running_loop().time() + config.start_timeout
    make = partial(Meeting, config.init_method, config.interface)
    meeting = await start_step(make, config.start_timeout)  # the files of an etcd:// URL
    one_port: OnePort | None = None
    if config.has_one_port:
        find_host = partial(host_of_port, config.interface, meeting.host)
        left = end - asyncio.get_running_loop().time()
        one_port = OnePort(config, await start_step(find_host, config.start_timeout, left))
        meeting.port = one_port.port
    try:
        async with _entered(config, children, meeting, one_port, end) as me:
            yield me
    finally:
        if one_port is not None:
            closing = run_in_thread(one_port.port.close, "aiorpc-stop")
            await run_to_end(asyncio.create_task(closing))


@contextlib.asynccontextmanager
async def _entered(
    config: WorkerConfig,
    children: Children | None,
    meeting: Meeting,
    one_port: OnePort | None,
    end: float,
) -> AsyncIterator[Worker]:
    registration, port, members = config.registration(), meeting.port, Peers(config.name)
    if one_port is not None:
        registration = one_port.registration(registration)
    introductions = None if port is None else Introductions(members, dialer=Dialer(port.tls))
    node = Node(members, config, children, introductions)
    lease = lease_for(config.heartbeat)
    directory = DirectoryClient(meeting, registration, config.start_timeout, port, lease, end)
    entry_points.enter(node)  # before torch starts: a quicker peer may call already
    try:
        with hide_in_cpp_log(CPP_WARNING):
            startup = Startup(config, directory, node.server.set_device_routes, one_port)
            agent, workers = await startup.run()
            watched = offered(node, config.init_method)
            ends = ending_if_blocked(config.watchdog)
            with _gc_frozen(config.freeze_gc), dump_on_signal(), watched, ends:
                shutdown = Shutdown(node, agent, directory, config.stop_timeout)
                async with _running(config, shutdown, workers, port) as me:
                    yield me
    finally:
        entry_points.leave(node)
        await run_to_end(asyncio.create_task(directory.close()))


FROZEN_BY_PYTHON = 10_000
"""Frozen objects of a process that has frozen none: Python 3.12 begins with 375. A program that
freezes any has imported torch, so it freezes 200,000."""


@contextlib.contextmanager
def _gc_frozen(wanted: bool) -> Iterator[None]:
    """Exclude existing objects from garbage collection, unless the program has frozen some."""
    if not wanted or gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def _running(
    config: WorkerConfig, shutdown: Shutdown, workers: list[PeerInfo], port: Port | None
) -> AsyncIterator[Worker]:
    """Serve and call peers, from the start of torch's RPC to its end."""
    node, directory = shutdown.node, shutdown.directory
    registration = directory.registration
    [own] = (each for each in workers if each.name == config.name)
    failure, node.leaves_alone = "", config.join
    try:
        node.start(host_for(workers, own), workers, shutdown.agent, port)
        node.members.coordinator = directory.coordinator
        directory.follow(node)
        if registration.entry:
            for peer in await directory.entered():
                node.membership.probe(peer)
        node.members.restarts = registration.restarts
        me = Worker._of(node, _leave=shutdown.leave_alone)
        log.info("%r has entered its world", me)
        async with interruptible() as interrupt:
            if config.on_failure == "stop":
                node.membership.report_losses(interrupt)
            with forks_exit_here():
                yield me
    except BaseException as exc:
        failure = describe_failure(exc)
        raise
    finally:
        await shutdown.run(failure)
