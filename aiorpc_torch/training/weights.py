"""The publisher of versioned weights: `Weights`."""

import asyncio
import logging
import secrets
from typing import Any

from torch import nn

from .memory import Memory
from .relays import Hosts, Version
from .shapes import check_shapes, shapes
from .snapshots import Snapshot, snapshot, snapshot_in_thread
from .versions import Versions
from .waiting import Changes, Line, ends_at_leave

log = logging.getLogger("aiorpc_torch")


class Weights:
    """Weights that a learner publishes in versions, and that `follow` brings to actors.

        weights = Weights(model.state_dict())
        aiorpc.register("policy", weights)
        version = await weights.publish(model.state_dict())

    A version is an immutable copy. It is announced once it is whole. Followers of one host that
    wait for a version share one transfer. Slow followers skip versions. Use it on the event loop of
    its worker.

    Args:
        tree: the first version: a tree of tensors, such as a state dict. Other values in it are
            pickled.
        keep: number of versions that stay in memory. One that is still being sent stays until then.
        version: number of the first version, such as that of a checkpoint.

    Raises:
        ValueError: if `keep` or `version` is invalid.
        TypeError: if `tree` is a module, or has DTensors.
    """

    def __init__(self, tree: Any, *, keep: int = 2, version: int = 0) -> None:
        self._memory = Memory()
        first = snapshot(_checked(tree), self._memory)
        self._shapes = shapes(tree)
        self._versions: Versions[Snapshot] = Versions(first, version, keep)
        self._hosts = Hosts()
        self._token = secrets.token_hex(8)
        self._changes = Changes()
        self._publishing = Line()
        self._is_publishing = False
        self._is_overtaken = False

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
            TypeError: if `tree` is a module, or has DTensors.
            ValueError: if it lacks a tensor of the first version, or has it in another shape.
        """
        check_shapes(self._shapes, _checked(tree))
        await self._publishing.turn(lambda: not self._is_publishing, "publish()")
        self._is_publishing = True
        try:
            number = self._versions.add(await snapshot_in_thread(tree, self._memory))
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

        The worker is None if the follower receives them here.
        """
        relay = self._hosts.relay_for(host, worker, lost)
        return relay, f"relay {self._token}"

    async def newest(self, seen: int) -> int:
        """Return the number of the newest version, to a follower that has `seen` that one."""
        self._see(seen)
        return self.version

    @ends_at_leave
    async def after(self, seen: int) -> Version:
        """Wait until a version is newer than `seen`; return the newest, for a follower."""
        self._see(seen)
        await self._changes.until(lambda: self.version > seen, "the wait for a version")
        # Results that many calls return in one step of the event loop are copied once.
        number = self.version
        return number, *self._versions.get(number)

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


def _checked(tree: Any) -> Any:
    """Return a tree that is no module: followers could not put that into theirs."""
    if isinstance(tree, nn.Module):
        kind = type(tree).__name__
        raise TypeError(f"a version is a tree of tensors, such as `model.state_dict()`, got {kind}")
    return tree
