"""Training as a user writes it: checked by mypy and pyright, never run."""

from collections.abc import Sequence
from typing import Any, assert_type

import torch
from torch import Tensor

from aiorpc_torch import RRef, call, register, remote
from aiorpc_torch.training import (
    Follower,
    Replay,
    SampleLimit,
    StalenessLimit,
    Ticket,
    Uniform,
    Weights,
    follow,
)


class Rows:
    """A storage as that of another library."""

    def extend(self, items: Sequence[Any], /) -> int:
        return len(items)

    def sample(self, size: int, /) -> Tensor:
        return torch.ones(size)


class NoStorage:
    def sample(self, size: int, /) -> list[int]:
        return []


async def learner(model: torch.nn.Module, limit: StalenessLimit, replay: Replay) -> None:
    weights = Weights(model.state_dict(), keep=2)
    assert_type(register("policy", weights), RRef[Weights])
    version = await weights.publish(model.state_dict())
    assert_type(version, int)
    assert_type(await limit.advance(version), int)
    assert_type((limit.version, limit.in_flight), tuple[int, int])
    await replay.sample(64)
    assert_type(replay.version, int | None)
    await weights.publish()  # type: ignore[call-arg]  # pyright: ignore
    Weights(model.state_dict(), keep="2")  # type: ignore[arg-type]  # pyright: ignore


async def actor(model: torch.nn.Module, limit: RRef[StalenessLimit], replay: RRef[Replay]) -> None:
    policy = await follow("policy", on="learner", into=model)
    assert_type(policy, Follower)
    async with remote(limit).ticket() as ticket:
        assert_type(await policy.wait(ticket.version), int)
        await call(replay, Replay.insert, 1, ticket)
    async with policy.hold() as version:
        assert_type(version, int)
    with policy.hold() as version:
        assert_type(version, int)
    async for version in policy:
        assert_type(version, int)
    assert_type(await policy.update(), int)


async def followers(model: torch.nn.Module) -> None:
    """A version enters a module, a dict of tensors or a function, or none of these."""
    await follow("policy", on=0)
    await follow("policy", on=0, into=model.state_dict(), poll=1.0)
    await follow("policy", on=0, into=lambda tree: print(tree))
    await follow("policy")
    await follow("policy", on=0, into=3)  # type: ignore[arg-type]  # pyright: ignore


async def limits(limit: StalenessLimit) -> None:
    StalenessLimit(None, 16, version=3)
    StalenessLimit(2)  # type: ignore[call-arg]  # pyright: ignore
    async with limit.ticket() as ticket:
        assert_type(ticket, Ticket)
        assert_type((ticket.version, ticket.number), tuple[int, int])
    rule = SampleLimit(8, min_size=1_000, slack=512)
    Replay(Uniform(50_000, seed=0), rule)
    Replay(Rows(), limit=rule)
    Replay(NoStorage())  # type: ignore[arg-type]  # pyright: ignore
    Replay(limit=8)  # type: ignore[arg-type]  # pyright: ignore
