"""A worker process of the fault matrix: it obeys commands and reports events."""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiorpc_torch as aiorpc
from aiorpc_torch import RpcError, WorldTimeout, call

from . import _faults_processes as processes
from ._faults_states import MAKE, SHORT, Scene, end_backward, end_of, hang, hello

log = logging.getLogger("aiorpc_torch")


def live(heard: int, told: int, given: dict[str, Any]) -> None:
    """Run the process until it is told to end."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if namespace := given.pop("namespace", None):
        processes.enter(namespace)
    sys.exit(asyncio.run(Member(heard, told, given).live()))


class Member:
    """A worker that reads commands from one pipe and writes events to another.

    `given` holds the arguments of `aiorpc.worker`.
    """

    def __init__(self, heard: int, told: int, given: dict[str, Any]) -> None:
        self._heard, self._told = heard, told
        self._given = given
        self._me: aiorpc.types.Worker | None = None
        self._text = b""
        self._words: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._steps: dict[str, Callable[..., Awaitable[Any]]] = {
            "make": self._make,
            "hang": self._hang,
            "ends": self._ends,
            "still": self._still,
            "prove": self._prove,
            "again": self._again,
            "await leaves": self._await_leaves,
        }
        self._scene = Scene()

    def _listen(self) -> None:
        data = os.read(self._heard, 65536)
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._words.put_nowait(json.loads(line))
        if not data:
            asyncio.get_running_loop().remove_reader(self._heard)

    def tell(self, event: str, value: Any = None) -> None:
        os.write(self._told, json.dumps([event, value]).encode() + b"\n")

    async def live(self) -> int:
        """Enter a world when told so, again after each failure; return the exit code."""
        asyncio.get_running_loop().add_reader(self._heard, self._listen)
        while True:
            word, *given = await self._words.get()
            if word == "end":
                return int(given[0])
            start = time.monotonic()
            starting = asyncio.create_task(self._enter(*given))
            failing = asyncio.create_task(self._fails(starting)) if word == "enter, fail" else None
            try:
                await starting
            except (WorldTimeout, ValueError) as exc:
                took = time.monotonic() - start
                missing = getattr(exc, "missing", None)
                self.tell("failed", [type(exc).__name__, str(exc), missing, took])
            except asyncio.CancelledError:
                assert failing is not None
                raise LookupError("a's own") from None
            else:
                return 0

    async def _fails(self, starting: "asyncio.Task[None]") -> None:
        """Cancel the start when the next command comes, as other code of a process could."""
        await self._words.get()
        starting.cancel()

    async def _enter(self, more: dict[str, Any] | None = None) -> None:
        try:
            async with aiorpc.worker(**self._given | (more or {})) as me:
                self._me = me
                self.tell("in", list(me.peers))
                await self._obey()
                self.tell("leaves")
                start = time.monotonic()
            self.tell("left", time.monotonic() - start)
            self.tell("rest", await self._ends(2.0, new=""))
        finally:
            await end_backward()

    async def _obey(self) -> None:
        while (each := await self._words.get())[0] != "leave":
            word, *given = each
            if word == "raise":
                raise LookupError("a's own")
            if word == "leave alone":
                assert self._me is not None
                await self._me.leave()
                return
            self.tell(word, await self._steps[word](*given))

    # ── steps ───────────────────────────────────────────────────────────────────────────────────

    async def _make(self, state: str) -> None:
        await MAKE[state](self._scene)

    async def _hang(self, state: str, how: str) -> None:
        await hang(self._scene, state, how)

    async def _ends(self, within: float, new: str) -> dict[str, Any]:
        """Return how and when each wait ended; None for a wait that has not.

        `new` adds new calls: "now" makes them at once, "until it is gone" repeats them until `a`
        refuses; "" makes none.
        """
        waits = dict(self._scene.waits)
        if new:
            for name, relic in self._scene.relics.items():
                waits[name] = asyncio.ensure_future(end_of(relic()))
            new_call = call("a", os.getpid) if new == "now" else _until_refused()
            waits["new call"] = asyncio.ensure_future(end_of(new_call))
            if new == "now":
                waits["new call with a timeout"] = asyncio.ensure_future(end_of(_in_time()))
        if waits:
            await asyncio.wait(waits.values(), timeout=within)
        return {name: _end(future) for name, future in waits.items()}

    async def _still(self) -> list[str]:
        """Return the names of the waits that have not ended."""
        return [name for name, future in self._scene.waits.items() if not future.done()]

    async def _prove(self, how: str) -> None:
        """Check that the others can call each other; `a` is "lost", or has "left"."""
        async with asyncio.timeout(processes.PATIENCE / 2):
            assert await call("b", hello, "main") == "HELLO"
            for proof in self._scene.proofs:
                await proof(how)

    async def _again(self) -> str:
        """Call `a` until it answers and has called `b`; return the answer or the last error."""
        end = time.monotonic() + processes.PATIENCE / 2
        while True:
            try:
                with aiorpc.timeout(1.0):
                    return str(await call("a", hello, "b"))
            except RpcError as exc:
                if time.monotonic() > end:
                    return repr(exc)
                await asyncio.sleep(0.05)

    async def _await_leaves(self) -> None:
        """Wait until the others have left, and so wait for this worker."""
        assert self._me is not None
        departures = self._me._node.departures
        for peer in ("main", "b"):
            while not await departures.is_done(peer):  # noqa: ASYNC110  there is no event
                await asyncio.sleep(0.01)


async def _until_refused() -> None:
    """Call `a` until it refuses: after an exception it serves until its peers have left."""
    while True:
        await call("a", os.getpid)


async def _in_time() -> int:
    with aiorpc.timeout(SHORT):
        return await call("a", os.getpid)


def _end(future: "asyncio.Future[Any]") -> Any:
    if not future.done():
        return None
    if exc := future.exception():
        return f"{type(exc).__name__}: {exc}", time.monotonic()
    return future.result()
