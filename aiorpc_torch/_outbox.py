"""The caller: from a call to its result or exception.

One door, `Outbox.call`. It knows who the peers are, deadlines and cancellation; how calls travel is
the link's.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch._C._distributed_rpc import WorkerInfo

from ._deadline import budget, deadline_in
from ._link import Link
from ._wire import Outcome, Target, pack
from .errors import CallTimeout, NotServing


class Outbox:
    """Sends on behalf of worker `name` to any of `workers` (all of the world, in rank order)."""

    def __init__(self, name: str, workers: Sequence[WorkerInfo]) -> None:
        self.name = name
        self._names = [info.name for info in workers]
        self._workers: dict[str | int, WorkerInfo] = {info.name: info for info in workers}
        self._workers.update({info.id: info for info in workers})
        # Each loop that calls has links of its own, so nothing here needs a lock.
        self._links: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Link]]
        self._links = WeakKeyDictionary()
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        links = [link for links in self._links.values() for link in links.values()]
        return f"<Outbox of {self.name}: {links}>"

    def find(self, worker: str | int | WorkerInfo) -> str:
        """The name of a worker of this world.

        Raises:
            ValueError: if there is none; the message names those there are.
        """
        key = worker.name if isinstance(worker, WorkerInfo) else worker
        try:
            return self._workers[key].name
        except (KeyError, TypeError):
            names = ", ".join(self._names)
            raise ValueError(f"no worker {worker!r} in this world; there are: {names}") from None

    async def call(
        self,
        worker: str,
        target: Target,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Run `target` on `worker` and return its result, or raise what it raised."""
        left = budget(deadline_in(timeout))
        if left is not None and left <= 0.0:
            raise CallTimeout(f"the deadline had passed before the call to {worker!r} was sent")
        link = self.link(worker)
        work = (link.shorten(target), args, kwargs or {})
        # `target` keeps its RRef, and with it the object, alive until the answer is here.
        number, outcome = link.call(pack(work), left)
        try:
            answer = await _within(outcome, left)
        except TimeoutError:
            link.cancel(number)
            raise CallTimeout(f"no answer from worker {worker!r} within {left:.3g} s") from None
        except asyncio.CancelledError:
            link.cancel(number)
            raise
        return answer.get()

    def link(self, worker: str) -> Link:
        """From the running loop to `worker`."""
        loop = asyncio.get_running_loop()
        links = self._links.get(loop)
        if links is None:
            links = self._links[loop] = {}
        link = links.get(worker)
        if link is None:
            number = next(self._numbers)
            link = links[worker] = Link(self.name, number, self._workers[worker])
        return link

    def close(self) -> None:
        """This process leaves its world: every call that is still awaited ends. On any loop."""
        for loop, links in list(self._links.items()):
            for link in links.values():
                with contextlib.suppress(RuntimeError):  # that loop is closed
                    loop.call_soon_threadsafe(link.close)


async def _within(outcome: "asyncio.Future[Outcome]", seconds: float | None) -> Outcome:
    if seconds is None:
        return await outcome
    async with asyncio.timeout(seconds):
        return await outcome


_current: Outbox | None = None


def use(outbox: Outbox | None) -> None:
    """Let `outbox` send for this process; None: nobody does."""
    global _current
    _current = outbox


def current() -> Outbox:
    """The outbox of this process's worker.

    Raises:
        NotServing: if this process is in no world.
    """
    if _current is None:
        raise NotServing("this process is in no world: enter worker() or local_world() first")
    return _current
