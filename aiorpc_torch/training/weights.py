"""The publisher of versioned weights: `Weights`."""

import asyncio
import logging
import secrets
from collections.abc import Collection
from typing import Any

from .._gauges import measure
from .joining import Cuts
from .relays import own_host
from .shards import NOTHING, Slice, Wanted
from .snapshots import (
    Memory,
    Snapshot,
    Taking,
    Version,
    check_shapes,
    in_thread,
    shapes,
)
from .versions import Versions
from .waiting import Changes, Line, ends_at_leave, idles

log = logging.getLogger("aiorpc_torch")


class Weights:
    """Weights that a learner publishes in versions, and that `follow` brings to actors.

        weights = Weights(model.state_dict())
        aiorpc.register("policy", weights)
        version = await weights.publish(model.state_dict())

    A version is an immutable copy. It is announced once it is whole. Followers of one host that
    wait for a version share one transfer. Slow followers skip versions. Tensors of 64 KiB and more
    that have not changed since the version before are found by their bytes, and not sent again. Use
    it on the event loop of its worker.

    Args:
        tree: the first version: a tree of tensors, such as a state dict. Other values in it are
            pickled. Of a DTensor, this process publishes its shard.
        keep: number of versions that stay in memory. One that is still being sent stays until then.
        version: number of the first version, such as that of a checkpoint.

    Raises:
        ValueError: if `keep` or `version` is invalid.
        TypeError: if a module, an optimizer or a generator is in `tree`, or a DTensor that is
            neither sharded nor replicated.
    """

    def __init__(self, tree: Any, *, keep: int = 2, version: int = 0) -> None:
        self._memory = Memory()
        self._shapes = shapes(tree)
        first = Taking(tree, self._memory).take()
        self._versions: Versions[Snapshot] = Versions(first, version, keep)
        self._own_host = own_host()
        self._relays: dict[str, str] = {}  # workers, by host
        self._token = secrets.token_hex(8)
        self._changes = Changes()
        self._publishing = Line()
        self._cuts, self._cutting = Cuts(), asyncio.Lock()
        self._is_publishing = False
        self._is_overtaken = False
        measure(self)

    def __repr__(self) -> str:
        return f"<Weights version {self.version}>"

    @property
    def version(self) -> int:
        """Return the number of the newest version."""
        return self._versions.newest

    async def publish(self, tree: Any) -> int:
        """Copy a tree, and announce it as the next version; return the version's number.

        It returns when the copy is made: the tensors may change then. The version travels
        afterwards. If the call is cancelled or fails, nothing is announced. Versions that are
        published together are announced in the order of the calls.

        Args:
            tree: a tree of tensors, as the first version.

        Raises:
            TypeError: if a module, an optimizer or a generator is in `tree`, or a DTensor that is
                neither sharded nor replicated.
            ValueError: if it lacks a tensor of the first version, or has it in another shape.
        """
        check_shapes(self._shapes, tree)
        await self._publishing.turn(lambda: not self._is_publishing, "publish()")
        self._is_publishing = True
        try:
            before = self._versions.get(self.version)
            taken = await Taking(tree, self._memory, before).take_in_thread()
            number = self._versions.add(taken)
            self._cuts.forget({name for each in self._versions.all() for name in each.blocks})
        finally:
            self._is_publishing = False
            self._publishing.notify()
        self._changes.notify()
        await asyncio.sleep(0)  # a loop that awaits nothing else lets followers have it
        return number

    def state(self, version: int | None = None) -> Any:
        """Return a version that is kept, by default the newest. Do not change its tensors.

        Raises:
            LookupError: if the version is not kept.
        """
        return self._versions.get(self.version if version is None else version).load()

    # ── for followers ───────────────────────────────────────────────────────────────────────────

    async def source(
        self, host: str, worker: str, lost: str | None = None
    ) -> tuple[str | None, str]:
        """Return where a follower receives versions: its relay's worker, and the relay's name.

        The worker is None if the follower receives them here, on the publisher's own host.

        Args:
            host: host of the follower.
            worker: worker of the follower, which becomes the relay if there is none.
            lost: the relay that the follower has found lost.
        """
        relay = None
        if host != self._own_host:
            if self._relays.get(host, lost) == lost:
                self._relays[host] = worker
            relay = self._relays[host]
        return relay, f"relay {self._token}"

    @idles
    @ends_at_leave
    async def kept(self, seen: int, least: int = -1) -> tuple[int, int]:
        """Wait for version `least`; return the numbers of the oldest and the newest that is kept.

        Args:
            seen: the newest version that the follower has.
            least: the version that it waits for.
        """
        self._see(seen)
        await self._changes.until(lambda: self.version >= least, "the wait for a version")
        return self._versions.oldest, self.version

    async def slices(self, number: int) -> dict[str, Slice]:
        """Return what is here of each tensor of a version, by its name in the tree.

        Raises:
            LookupError: if it is not kept.
        """
        return self._versions.get(number).slices()

    @idles
    @ends_at_leave
    async def after(
        self, seen: int, has: Collection[str] = (), wanted: Wanted = NOTHING
    ) -> Version:
        """Wait until a version is newer than `seen`; return the newest, for a follower.

        Args:
            seen: the newest version that the follower has.
            has: names of the blocks that it has, which are not sent again.
            wanted: the slices that it wants of some tensors.
        """
        self._see(seen)
        await self._changes.until(lambda: self.version > seen, "the wait for a version")
        return await self.get(self.version, has, wanted)

    async def get(
        self, number: int, has: Collection[str] = (), wanted: Wanted = NOTHING
    ) -> Version:
        """Return a version that is kept, for a follower.

        Raises:
            LookupError: if it is not kept.
        """
        # Results that many calls return in one step of the event loop are copied once.
        version = self._versions.get(number)
        if wanted:
            async with self._cutting:  # once for all hosts that want the same
                whole = version
                version = await in_thread(lambda: self._cuts.cut(whole, wanted), whole.size)
        return version.sent(number, has)

    def _numbers(self) -> dict[str, float]:
        return {"aiorpc_weights_version": self.version}

    def _see(self, number: int) -> None:
        if number > self._versions.newest and not self._is_overtaken:
            self._is_overtaken = True
            log.warning(
                "followers hold version %d of weights that begin anew here with version %d: a "
                "learner that comes back takes theirs by `await recover(name)`",
                number,
                self.version,
            )
        if self._versions.see(number):
            self._changes.notify()
