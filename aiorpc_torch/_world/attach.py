"""Serving in a world that `rpc.init_rpc` started, on the running loop.

torch's RPC stays the program's own. There is no directory, so a peer that died has no
replacement process; `Attachments` knows which peers serve. Without a world size, torch's agents
tell each other of the workers that enter and leave (`_endpoint.entry_points`).
"""

import asyncio
import functools
import logging
import os
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

import anyio
import torch

from .._aio.fork import check_not_forked, forks_exit_here
from .._aio.loop_lag import watchdog as ending_if_blocked
from .._aio.tasks import run_to_end
from .._batching.queue import close_queues
from .._client.pool import AGENT_ENDED
from .._endpoint import entry_points
from .._inspection.snapshot_socket import offered
from .._node.attachments import LEAVING
from .._node.config import NodeConfig, watchdog_seconds
from .._node.node import Node
from .._peers.peers import Peers
from .._port import network
from .._server.exports import Export, checked_exports
from .._torch.agent import PeerInfo, adopt_agent, agent_name, init_method, is_running
from .._torch.thread_state import free_dead_thread_states
from ..errors import NotInWorld
from .managers import world_manager
from .startup import start_step
from .worker import Worker

log = logging.getLogger("aiorpc_torch")

# All in seconds.
AGENT_POLL = 0.05  # between two looks whether torch's RPC still runs
TELL_TIMEOUT = 0.5  # for peers to learn that this worker leaves
CANCEL_TIMEOUT = 0.5  # for cancelled calls to end


@world_manager
async def attach(
    *,
    threads: int = 16,
    start_timeout: float = 60.0,
    stop_timeout: float | None = 10.0,
    heartbeat: float = 10.0,
    watchdog: float | None = None,
    interface: str | None = None,
    exports: Sequence[Export] | None = None,
) -> AsyncIterator[Worker]:
    """Serve and call peers in the world that `rpc.init_rpc` started, on the running loop.

        rpc.init_rpc("trainer0", rank=1, world_size=3)
        async with aiorpc.attach() as me:
            ps = await aiorpc.create("ps", ParameterServer)
        rpc.shutdown()

    Exit leaves torch's RPC running, and a process may attach again: an `asyncio.run` for each epoch
    works. `rpc_sync` and `await` may be used side by side. A call to a peer that is not attached is
    held until it attaches; after its deadline or `start_timeout` it raises `WorkerUnreachable`, and
    has not run. Exit does not wait for peers: `await me.serve()` does. Signal handlers, garbage
    collection and device maps stay as they are. A dead peer has no replacement process. In a group
    without a `world_size`, workers may enter and leave later.

    Args:
        threads: Number of threads for plain `def` methods.
        start_timeout: Seconds for which a call to a peer that is not attached is held.
        stop_timeout: Seconds that exit gives the calls being served, which are then cancelled. None
            sets no limit. After an exception they are cancelled at once.
        heartbeat: Seconds of silence after which a connected peer that something waits for is lost.
            The peer's event loop or a thread of torch's answers in time if one of them is free.
        watchdog: As for `worker`.
        interface: Network interface for small messages between hosts (default: as for `worker`).
        exports: As for `worker`.

    Raises:
        NotInWorld: If torch's RPC does not run: call `rpc.init_rpc` first.
        WorldTimeout: If the lookup of the first worker's name does not end in `start_timeout`.
        RuntimeError: If this process is in a world of this library, or attached already.
        ValueError: If an argument is out of range, or there is no such interface.
    """
    config = NodeConfig(
        threads=threads,
        start_timeout=start_timeout,
        stop_timeout=stop_timeout,
        heartbeat=heartbeat,
        watchdog=watchdog_seconds(watchdog),
        exports=None if exports is None else checked_exports(exports),
    )
    check_not_forked()
    if entry_points.here is not None:
        raise RuntimeError(f"{entry_points.IN_A_WORLD}: {entry_points.how_to_leave()}")
    if not is_running():
        raise NotInWorld("attach() needs torch's RPC: call rpc.init_rpc() first")
    _warn_of_many_threads()
    host = await start_step(functools.partial(_host, interface), start_timeout)
    attached = _Attached(config, Peers(agent_name(), is_attached=True))
    # Before torch's table is read: no later change of it is missed.
    entry_points.enter(attached.node)
    with offered(attached.node, init_method()), ending_if_blocked(config.watchdog):
        try:
            attached.enter(host, adopt_agent())
            with forks_exit_here():
                leave = functools.partial(attached.drain, stop_timeout)
                yield Worker._of(attached.node, _leave=leave)
        except BaseException:
            await attached.leave(0.0)
            raise
        else:
            await attached.leave(stop_timeout)


def _warn_of_many_threads() -> None:
    """Log that each process of this host uses all its cores, which a launcher would prevent."""
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and threads > 1:
        log.warning(
            "%s: OMP_NUM_THREADS is not set, so torch computes with %d threads in this process. If "
            "others run on this machine, set it before Python starts: to 1, or each one's cores",
            *(agent_name(), threads),
        )


def _host(interface: str | None) -> str | None:
    """Return the address to listen at for peers on other hosts, None for the loopback's."""
    url = urlsplit(init_method())
    first = os.environ.get("MASTER_ADDR") if url.scheme == "env" else url.hostname
    name = network.requested_interface(interface) or network.interface_towards(first)
    hosts = network.addresses().get(name or "", ())
    return next((host for host in hosts if not network.is_loopback_host(host)), None)


class _Attached:
    """An attached worker, from its entry to its exit."""

    def __init__(self, config: NodeConfig, members: Peers) -> None:
        self.node = Node(members, config)
        assert self.node.attachments is not None
        self._attachments = self.node.attachments
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False

    def enter(self, host: str | None, workers: Sequence[PeerInfo]) -> None:
        """Serve, and tell the peers, whose answers are not waited for."""
        self._attachments.open()
        self.node.start(host, workers)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._attachments.tell(True), name="aiorpc-attach"),
            loop.create_task(self._watch_agent(), name="aiorpc-agent"),
        ]

    async def _watch_agent(self) -> None:
        """End all calls once torch's RPC has ended."""
        while self._attachments.has_agent():  # noqa: ASYNC110 - torch tells nobody of its end
            await asyncio.sleep(AGENT_POLL)
        log.info("%s: torch's RPC has ended", self.node.members.name)
        self._attachments.end()
        self.node.pool.refusal = AGENT_ENDED
        await self._close()

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────

    async def leave(self, stop_timeout: float | None) -> None:
        """Let served calls end, close the connections, and leave torch's RPC running."""
        draining = asyncio.create_task(self.drain(stop_timeout))

        async def close() -> None:
            await asyncio.wait((draining,))
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._attachments.close()
            await self._close()
            entry_points.leave(self.node)
            free_dead_thread_states()

        await run_to_end(asyncio.create_task(close()), draining.cancel)

    async def drain(self, stop_timeout: float | None) -> None:
        """Take no new calls, and wait for those that run."""
        self.node.server.retire()
        if self._attachments.has_agent():
            with anyio.move_on_after(TELL_TIMEOUT):
                await self._attachments.tell(False)
            await self.node.server.drain(stop_timeout)

    async def _close(self) -> None:
        """End what waits, in both directions."""
        epoch = str(self._attachments.epoch)
        if not self.node.pool.refusal:  # for other event loops, which may call until the end
            self.node.pool.refusal = LEAVING
        self.node.membership.close()
        self.node.end_changes()
        await close_queues()
        await self.node.pool.close("detached", epoch)
        if not self._is_closed:
            self._is_closed = True
            await self.node.server.close(CANCEL_TIMEOUT, text=epoch, what="detached")
            await close_queues()  # of batches that have begun since
