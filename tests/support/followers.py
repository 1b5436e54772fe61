"""A learner and actors that follow its weights, for tests in several processes."""

import asyncio
from typing import Any

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch import batched
from aiorpc_torch.training import Follower, Weights, follow, receiver
from aiorpc_torch.training.snapshots import Version


class Net(nn.Module):
    """A module whose tensors all hold the same number, if they are of one version."""

    def __init__(self, value: float = 0.0, size: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(4))
        self.fill(value)

    def fill(self, value: float) -> "Net":
        with torch.no_grad():
            for each in self.parameters():
                each.fill_(value)
        return self

    def values(self) -> set[float]:
        return {
            float(value) for each in self.parameters() for value in each.detach().flatten()[::7]
        }


def answer_values(net: Net, pipe: Any) -> None:
    """Answer each message with the values of a module that this process shares."""
    while pipe.recv():
        pipe.send(net.values())


class Counting(Weights):
    """Counts the transfers that are asked for, and the bytes of tensors of each answer."""

    def __init__(self, tree: Any, **options: Any) -> None:
        super().__init__(tree, **options)
        self.asked = 0
        self.sent: list[int] = []

    async def get(self, number: int, *options: Any) -> Version:
        self.asked += 1
        found = await super().get(number, *options)
        self.sent.append(sum(map(len, found[2].values())))
        return found


class Learner:
    """Publishes versions whose tensors hold the version's number. Its process can be replaced."""

    def __init__(self, start: float = 0.0, size: int = 8) -> None:
        self.net = Net(start, size)
        self.weights = Counting(self.net.state_dict())
        aiorpc.register("policy", self.weights)

    async def publish(self, value: float | None = None) -> int:
        self.net.fill(self.weights.version + 1 if value is None else value)
        return await self.weights.publish(self.net.state_dict())

    async def state(self) -> Any:
        return self.weights.state()

    async def sent(self) -> int:
        """Return how many versions were asked for."""
        return self.weights.asked

    async def publish_many(self, count: int) -> int:
        return [await self.publish() for _ in range(count)][-1]


class Actor:
    """Follows the policy of worker "learner"."""

    policy: Follower

    def __init__(self, size: int = 8) -> None:
        self.net = Net(-1.0, size)
        self.seen: list[int] = []

    async def start(self, patience: float = 60.0, host: str = "", **options: Any) -> int:
        receiver.REPLACEMENT_TIMEOUT = patience
        if host:
            self.policy = Follower("policy", "learner", self.net, host=host, **options)
            await self.policy._begin()
        else:
            self.policy = await follow("policy", on="learner", into=self.net, **options)
        return self.policy.version

    async def update(self) -> int:
        return await self.policy.update()

    async def wait(self, version: int) -> int:
        return await self.policy.wait(version)

    async def values(self) -> set[float]:
        return self.net.values()

    async def version(self) -> int:
        return self.policy.version

    async def watch(self, until: int) -> list[int]:
        """Return the versions that are seen, each of which is whole."""
        async for version in self.policy:
            assert len(self.net.values()) == 1
            self.seen.append(version)
            if version >= until:
                break
        return self.seen

    @batched(max_size=8)
    def act(self, xs: Tensor) -> list[tuple[int, int]]:
        """Return version and number of values of each batch, in a thread and in two steps."""
        with self.policy.hold() as version:
            before = self.net.values()
            return [(version, len(before | self.net.values()))] * len(xs)

    @batched(max_size=8)
    async def act_on_loop(self, xs: Tensor) -> list[tuple[int, int]]:
        """The same in a coroutine that awaits."""
        async with self.policy.hold() as version:
            before = self.net.values()
            await asyncio.sleep(0)
            return [(version, len(before | self.net.values()))] * len(xs)

    async def relay(self) -> str | None:
        """Return the worker from which versions come, None for the learner's."""
        return self.policy._receiver._sources[0].relay

    async def close(self) -> None:
        await self.policy.aclose()
