"""The followers of published weights: `follow`, and the `Follower` that it returns."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import NotInWorld, WorkerGone, WorkerLeft
from .._gauges import measure
from .holds import Holds
from .numbers import is_count, is_number
from .placing import ForwardHolds, Into, needed_by, place
from .receiver import Receiver
from .recovery import hold_copies
from .snapshots import in_thread


async def follow(
    name: str,
    *,
    on: str | int | Sequence[str | int] | None = None,
    into: Into = None,
    poll: float | None = None,
    copy: bool = False,
) -> "Follower":
    """Follow the weights that a worker has registered as `name`; the newest are in `into` then.

        policy = await follow("policy", into=model)

    It waits until the name is registered, within the deadline of `aiorpc.timeout`. Later versions
    are received as they are published, and enter `into` in `update`, `wait` and `async for`. If the
    publisher is lost, the follower keeps its version, and goes on with the publisher's replacement
    process. Without `on`, it goes on with any next publisher, also after the last one has left.

    Args:
        name: name given to `register`.
        on: the learner's worker, by name or rank (default: any). With a list or tuple, each worker
            of it publishes a part of every version: other tensors, or shards of DTensors. A version
            is complete when all have published it. Of a tensor that several have, the first one's
            counts.
        into: a module, or a dict of tensors, that gets each version as `load_state_dict` would; or
            a function that is called with each on the event loop. Default: `Follower.state` alone.
        poll: seconds between two versions, which the follower then puts into `into` by itself.
        copy: True to copy each version into the memory of `into`, for what else uses that memory: a
            NumPy view, a `functional_call` with detached parameters. By default, CPU tensors get
            the version's own memory, without a copy. Tensors in shared memory (`share_memory()`)
            keep theirs in any case. So do DTensors, which get the slices of their shards.

    Raises:
        CallTimeout, WorkerGone, ValueError, NotInWorld: as `lookup`.
        ValueError: if the names or shapes of the version and of `into` differ, if the publishers
            named lack a part of a tensor, or if `copy` has no module or dict to copy into.
        TypeError: if `on` or `into` is none of these, or if the object of that name is no
            `Weights`.
    """
    if isinstance(on, list | tuple):
        if not on or len({*on}) < len(on):
            raise ValueError(f"on must name one worker or several different ones, got {on!r}")
    elif isinstance(on, Iterable) and not isinstance(on, str):
        raise TypeError(f"on must be a worker, or a list or tuple of workers, got {on!r}")
    if copy and not isinstance(into, torch.nn.Module | Mapping):
        raise ValueError(f"copy=True needs a module or a dict of tensors as into, got {into!r}")
    if poll is not None and not (is_number(poll) and poll > 0):
        raise ValueError(f"poll must be a positive number of seconds, got {poll!r}")
    if not (into is None or isinstance(into, Mapping) or callable(into)):  # modules can be called
        raise TypeError(f"into must be a module, a dict of tensors or a function, got {into!r}")
    policy = Follower(name, on, into, poll, copy=copy)
    await policy._begin()
    return policy


class Follower:
    """Weights that follow those of a learner. Made by `follow`; confined to its event loop.

        async for version in policy: ...  # each time that a newer one is in; may skip versions

    The iteration ends when this worker leaves the world. Following ends with `aclose`, at the end
    of an `async with` of the policy, with the world, or when the policy is dropped. With `poll`, it
    is not dropped.

    Attributes:
        version: number of the version that is in.
        state: the tree of that version, whose tensors are this process's own.
        pause: seconds for which the last change of the version held the event loop.
    """

    def __init__(
        self,
        name: str,
        on: str | int | Sequence[str | int] | None,
        into: Into,
        poll: float | None = None,
        host: str | None = None,  # as for `Receiver`
        *,
        copy: bool = False,
    ) -> None:
        self.version = -1
        self.state: Any = None
        self.pause = 0.0
        self._name = name
        self._into = into
        self._copy = copy
        self._holds = Holds()
        self._hooks: ForwardHolds | None = None
        self._loop = asyncio.get_running_loop()
        on_version = None if poll is None else self._put_in
        self._receiver = Receiver(name, on, poll, on_version, host, needed_by(into))
        self._changed = time.monotonic()
        measure(self, name)

    def __repr__(self) -> str:
        return f"<Follower of version {self.version}, {self._receiver!r}>"

    async def update(self) -> int:
        """Put the newest version in, if there is a newer one; return the number that is in.

        If the publisher is lost, or has left, the version stays as it is.

        Raises:
            CallTimeout: if the deadline passes.
            RuntimeError: inside of `hold()`, or after `aclose`.
        """
        self._check()
        await self._receiver.update()
        with contextlib.suppress(WorkerGone, NotInWorld):
            await self._put_in()
        return self.version

    async def wait(self, version: int) -> int:
        """Wait until this version or a later one is in; return the number that is in.

        Raises:
            CallTimeout: if the deadline passes.
            WorkerLost: if the publisher is lost, and no replacement process has come within 60 s,
                or will come.
            WorkerLeft: if the publisher's worker has left the world: worker `on` at once, any other
                if no publisher has come within 60 s.
            NotInWorld: if this worker has.
            RuntimeError: inside of `hold()`, or after `aclose`.
            ValueError: if `version` is no number of a version.
        """
        self._check()
        if not is_count(version, -1):  # the version before the first
            raise ValueError(f"version must be a number of a version, got {version!r}")
        while self.version < version:
            await self._receiver.until(version)
            await self._put_in()
        return self.version

    def __aiter__(self) -> AsyncIterator[int]:
        return _Versions(self)

    def hold(self) -> "Hold":
        """Return a context in which the version does not change: for code of several steps.

            async with policy.hold() as version:  # in a coroutine; `with` in a thread
                ...

        A forward of the module `into` in a thread needs none, nor does code on the event loop that
        awaits nothing. A newer version waits until the holds that exist have ended.
        """
        return Hold(self)

    async def aclose(self) -> None:
        """Stop following. The last version stays in its place."""
        self._receiver.close()
        if self._hooks is not None:
            self._hooks.remove()
        await asyncio.sleep(0)  # the pending call is cancelled

    async def __aenter__(self) -> "Follower":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._loop.is_closed():  # in any thread
            self._loop.call_soon_threadsafe(self._receiver.close)

    async def _begin(self) -> None:
        """Put the newest version in, and start to receive later ones."""
        await self._receiver.first()
        await hold_copies(self._name, self._receiver)
        await self._put_in()
        if isinstance(self._into, torch.nn.Module):
            self._hooks = ForwardHolds(self._into, self._holds)
        self._receiver.start()

    async def _put_in(self) -> None:
        """Put the newest version in, all of it in one step of the event loop."""
        receiver = self._receiver
        while receiver.newest is not None and receiver.version != self.version:
            async with self._holds.writing():
                number, snapshot = receiver.newest
                entries = self._holds.entries
                is_changed = await in_thread(snapshot.changed, snapshot.size)
                with self._holds.placing() as is_free:
                    # Who has entered meanwhile, out of patience, may have written into it.
                    if is_free and self._holds.entries == entries and not is_changed:
                        begun, tree = time.perf_counter(), snapshot.load()
                        place(tree, self._into, copy=self._copy)
                        self.version, self.state = number, tree
                        self.pause, self._changed = time.perf_counter() - begun, time.monotonic()
                        break
            if is_changed and not await receiver.restore():
                return
        receiver.changes.notify()

    def _numbers(self) -> dict[str, float]:
        age = time.monotonic() - self._changed
        return {"aiorpc_follower_version": self.version, "aiorpc_follower_age_seconds": age}

    def _check(self) -> None:
        self._receiver.check_open()
        if self._holds.is_held_here():
            raise RuntimeError("the version cannot change inside of hold(): leave it first")


class _Versions(AsyncIterator[int]):
    """The versions of a follower. Unlike an async generator it outlives a cancelled wait."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._version = follower.version
        self._is_over = False

    async def __anext__(self) -> int:
        if self._is_over:
            raise StopAsyncIteration
        try:
            self._version = await self._follower.wait(self._version + 1)
        except (WorkerLeft, NotInWorld):
            raise StopAsyncIteration from None
        return self._version

    async def aclose(self) -> None:
        """End the iteration; the follower goes on."""
        self._is_over = True


class Hold:
    """A context in which a policy's version does not change. Made by `Follower.hold`."""

    def __init__(self, policy: Follower) -> None:
        self._policy = policy
        self._inner: Any = None

    def __enter__(self) -> int:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("`with policy.hold()` is for threads: use `async with` here")
        self._inner = self._policy._holds.in_thread()
        self._inner.__enter__()
        return self._policy.version

    def __exit__(self, *exc: object) -> None:
        self._inner.__exit__(*exc)

    async def __aenter__(self) -> int:
        self._inner = self._policy._holds.in_task()
        await self._inner.__aenter__()
        return self._policy.version

    async def __aexit__(self, *exc: object) -> None:
        await self._inner.__aexit__(*exc)
