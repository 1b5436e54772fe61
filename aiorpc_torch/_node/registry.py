"""The objects that the workers of a world have registered under the names that are watched here.

A worker that watches a name asks each peer once, and each peer that enters later: the answer is the
peer's object of that name, or None. From then on the peer tells of changes. Nothing is sent while
nothing changes, and no worker is in between: the work for a change is that of those who watch.

All of it is ordinary calls, which give order, and errors for peers that are lost.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from .._aio.loops import call_soon
from .._client.answers import is_interrupted, is_own
from .._client.call import RemoteCall
from .._endpoint.names import NameTable, State, take_state, watch_state
from .._peers.peers import Peers
from .._torch.compat import RRef
from .._wire.handshake import Party
from .._wire.targets import FunctionTarget
from ..errors import RpcError, WorkerGone, WorkerUnreachable

log = logging.getLogger("aiorpc_torch")

UNREACHED_PAUSE = 0.2  # seconds before a peer that could not be reached is called again


class Registry:
    """The registered names of one world, as one worker sees and tells them. On the node's loop."""

    def __init__(
        self,
        members: Peers,
        table: NameTable,  # the objects of this worker
        wait_until_alive: Callable[[str], Coroutine[Any, Any, None]],  # waits for a lost peer
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        self._members = members
        self._table = table
        self._wait_until_alive = wait_until_alive
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._states: dict[str, dict[Party, State]] = {}  # of watched names, by process
        # Of names here: the state that each process that watches one was told last.
        self._watchers: dict[tuple[str, Party], State] = {}
        self._telling: dict[tuple[str, Party], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: dict[str, dict[asyncio.Task[None], str]] = {}  # peers, by watched name
        table.watch(self._on_table_change)

    def close(self) -> None:
        """Tell peers of no further change: this worker leaves."""
        self.is_closed = True
        self._table.unwatch(self._on_table_change)
        for task in [*self._tasks]:
            task.cancel()
        self._notify(*self._listeners)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        # Without the deadline and the context variables of whoever has caused it.
        context = contextvars.Context()
        task = self.loop.create_task(coroutine, name="aiorpc-registry", context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ── names that are watched here ─────────────────────────────────────────────────────────────

    def watch(self, name: str, on_change: Callable[[], None]) -> None:
        """Call `on_change` after each change, and once this worker leaves, until `unwatch`."""
        if name not in self._listeners:
            self._listeners[name], self._asking[name] = [], {}
            for peer in [*self._members.peers]:
                self._ask_soon(peer, name)
        self._listeners[name].append(on_change)

    def unwatch(self, name: str, on_change: Callable[[], None]) -> None:
        """Call `on_change` no more."""
        listeners = self._listeners[name]
        listeners.remove(on_change)
        if not listeners:  # peers learn it with the next change
            del self._listeners[name]
            self._states.pop(name, None)
            for task in self._asking.pop(name):
                task.cancel()

    def living(self, name: str) -> list[RRef[Any]]:
        """Return the objects of the living workers, in rank order."""
        states = self._states.get(name, {})
        workers = {each.name: each for each in self._members.workers.values()}
        found = []
        for worker in sorted(workers.values(), key=lambda each: each.rank):
            _, rref = states.get(Party(worker.name, worker.worker_id), (0, None))
            if worker.name == self._members.name:
                rref = self._table.find(name)
            if rref is not None and self._is_alive(worker.name):
                found.append(rref)
        return [] if self.is_closed else found

    async def all_told(self, name: str) -> None:
        """Wait until each worker has told its object of a watched name, or is lost."""
        changed = asyncio.Event()
        self.watch(name, changed.set)
        try:
            while any(map(self._is_alive, self._asking[name].values())):
                changed.clear()
                await changed.wait()
        finally:
            self.unwatch(name, changed.set)

    def _is_alive(self, worker: str) -> bool:
        if worker == self._members.name:
            return True
        return self._members.is_here(worker) and not self._members.peers[worker].is_lost

    def on_change(self, peer: str) -> None:
        """Note that a peer has joined or left, was lost or has returned."""
        if not (self._listeners or self._watchers):  # no name is watched, here or from here
            return
        for name in self._listeners:
            self._ask_soon(peer, name)
        gone = [key for key in self._watchers if not self._is_current(key[1])]
        for key in gone:
            del self._watchers[key]
        for states in self._states.values():
            for party in [each for each in states if not self._is_current(each)]:
                del states[party]
        self._notify(*self._listeners)

    def _is_current(self, party: Party) -> bool:
        is_process = self._members.get(party.name, party.worker_id) is not None
        return is_process and (
            party.name == self._members.name or self._members.is_here(party.name)
        )

    def _ask_soon(self, peer: str, name: str) -> None:
        if self._is_alive(peer):
            task, asking = self._start(self._ask(peer, name)), self._asking[name]
            asking[task] = peer

            def on_end(task: asyncio.Task[None]) -> None:
                del asking[task]
                self._notify(name)

            task.add_done_callback(on_end)

    async def _ask(self, peer: str, name: str) -> None:
        """Ask a peer for the state of a name, until it answers or is gone."""
        me, target = self._members.me, FunctionTarget(watch_state)
        try:
            while self._members.is_here(peer):
                process = self._members.peers[peer].worker_id
                try:
                    state = await RemoteCall(peer, target, None, name, me.name, me.worker_id)
                except WorkerGone as exc:
                    await self._wait_after(exc, peer)
                else:
                    self.take(name, Party(peer, process), state)
                    return
        # It has left, or does not return. Or it was lost as its answer came, with an object of it:
        # its return is a change, and it is asked again.
        except (RpcError, ReferenceError) as exc:
            log.debug("%s: no answer from %r on %r: %r", self._members.name, peer, name, exc)

    async def _wait_after(self, exc: WorkerGone, peer: str) -> None:
        """Wait until a peer may be called again: no change of it may follow. Else raise."""
        if not is_interrupted(exc):
            if not (is_own(exc) and isinstance(exc, WorkerUnreachable)):
                raise exc
            await asyncio.sleep(UNREACHED_PAUSE)  # it is alive, and may be reached later
        await self._wait_until_alive(peer)

    def take(self, name: str, owner: Party, state: State) -> bool:
        """Note the state of a name in a process; return whether it is watched here."""
        if name not in self._listeners:
            return False
        states = self._states.setdefault(name, {})
        # The answer to a question may come after what was told later: on another connection.
        if self._is_current(owner) and states.get(owner, (-1, None))[0] < state[0]:
            states[owner] = state
            self._notify(name)
        return True

    def _notify(self, *names: str) -> None:
        for name in names:
            for on_change in [*self._listeners.get(name, ())]:
                on_change()

    # ── names of this worker ────────────────────────────────────────────────────────────────────

    def add_watcher(self, name: str, watcher: Party) -> State:
        """Return the state of a name; tell its changes to that process from now on."""
        state = self._watchers[name, watcher] = self._table.state(name)
        return state

    def _on_table_change(self) -> None:
        """Tell what has changed. In any thread."""
        call_soon(self.loop, self._tell_all)

    def _tell_all(self) -> None:
        self._notify(*self._listeners)  # of this worker itself
        for key, told in self._watchers.items():
            telling = self._telling.get(key)
            # Other code may have cancelled it before its first step.
            is_over = telling is None or telling.done()
            if is_over and self._table.find(key[0]) is not told[1]:
                self._telling[key] = self._start(self._tell(key))

    async def _tell(self, key: tuple[str, Party]) -> None:
        """Tell a process of a name until it knows the last state, or does not watch it any more."""
        (name, watcher), me, target = key, self._members.me, FunctionTarget(take_state)
        try:
            while (told := self._watchers.get(key)) is not None:
                state = self._table.state(name)
                try:
                    is_watched = await RemoteCall(
                        watcher.name, target, None, name, me.name, me.worker_id, state
                    )
                except WorkerGone as exc:
                    await self._wait_after(exc, watcher.name)
                    continue
                if self._watchers.get(key) is not told:
                    continue  # it has asked again meanwhile: this answer may be from before
                if not is_watched:
                    del self._watchers[key]
                    return
                self._watchers[key] = state
                if self._table.find(name) is state[1]:
                    return
        except (RpcError, ReferenceError) as exc:
            log.debug("%s does not tell %r of %r: %r", self._members.name, watcher, name, exc)
            if isinstance(exc, RpcError):  # it has left, or does not return. Else it asks again
                self._watchers.pop(key, None)
        finally:
            self._telling.pop(key, None)
