"""The soak's server: every kind of method, and a count of the calls of each."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from torch import Tensor

from aiorpc_torch import RRef, batched, remote

ENDLESS = 1_000_000  # items, more than any client takes


class Refused(Exception):
    """An exception with arguments other than its text, which `pickle` alone cannot rebuild."""

    def __init__(self, token: int, *, why: str) -> None:
        super().__init__(f"{token} was refused: {why}")
        self.token = token
        self.why = why


class Unreadable:
    """A value that can be pickled but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse_to_be_read, ()


def refuse_to_be_read() -> NoReturn:
    raise ValueError("this cannot be read")


class Server:
    """A server that counts its calls: `ran` those that must run once, `open` those that run now."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.peers: list[RRef[Server]] = []
        self._lock = threading.Lock()  # methods run in several threads

    async def meet(self, peers: "list[RRef[Server]]") -> None:
        self.peers = peers

    def tally(self) -> tuple[Counter[str], Counter[str]]:
        with self._lock:
            return self.ran.copy(), +self.open

    def _count(self, kind: str, opened: int = 0) -> None:
        with self._lock:
            if opened:
                self.open[kind] += opened
            else:
                self.ran[kind] += 1

    # ── with a result ──────────────────────────────────────────────────────────────────────────

    def plain(self, token: int) -> int:
        self._count("plain")
        return token

    async def on_loop(self, token: int, *, twice: bool = False) -> int:
        self._count("on_loop")
        return 2 * token if twice else token

    def tensor(self, x: Tensor) -> Tensor:
        self._count("tensor")
        return x + 1.0

    @batched(max_size=64)
    async def batch(self, tokens: list[int]) -> list[Any]:
        with self._lock:
            self.ran["batch"] += len(tokens)
        return [Refused(token, why="odd") if token % 8 == 7 else -token for token in tokens]

    @batched(max_size=32, max_wait=0.005)
    def slow_batch(self, tokens: list[int]) -> list[int]:
        return [-token for token in tokens]

    async def relay(self, token: int, path: list[int]) -> int:
        """Pass the token on to the peers on the path and return the last answer."""
        self._count("relay")
        if not path:
            return token
        answer: int = await remote(self.peers[path[0]]).relay(token + 1, path[1:])
        return answer

    # ── failing ─────────────────────────────────────────────────────────────────────────────────

    async def refuse(self, token: int) -> NoReturn:
        self._count("refuse")
        raise Refused(token, why="it was asked for")

    def refuse_in_thread(self, token: int) -> NoReturn:
        self._count("refuse")
        raise Refused(token, why="it was asked for")

    async def unsendable(self) -> Any:
        self._count("unsendable")
        return threading.Lock()

    async def unreadable(self) -> Any:
        self._count("unreadable")
        return Unreadable()

    # ── waiting until cancelled ─────────────────────────────────────────────────────────────────

    async def hang(self) -> None:
        self._count("hang", 1)
        try:
            await asyncio.sleep(3_600)
        finally:
            self._count("hang", -1)

    async def hang_there(self, peer: int) -> None:
        """Wait for a peer until the caller gives up; the peer's call must then be cancelled."""
        self._count("hang_there", 1)
        try:
            await remote(self.peers[peer]).hang()
        finally:
            self._count("hang_there", -1)

    async def nap(self, seconds: float) -> float:
        self._count("nap", 1)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._count("nap", -1)
        return seconds

    # ── streams ─────────────────────────────────────────────────────────────────────────────────

    async def stream(self, start: int, count: int) -> AsyncIterator[int]:
        self._count("stream", 1)
        try:
            for token in range(start, start + count):
                yield token
        finally:
            self._count("stream", -1)

    def stream_in_thread(self, start: int, count: int) -> Iterator[int]:
        self._count("stream", 1)
        try:
            yield from range(start, start + count)
        finally:
            self._count("stream", -1)

    async def broken_stream(self, start: int, count: int) -> AsyncIterator[int]:
        async for token in self.stream(start, count):
            yield token
        raise Refused(start, why="the stream ends so")
