"""The same `@batched` method, called in its own process, for `benchmarks.batchers`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from ._batchers_ours import Agent
from ._batchers_work import Figures, asked


def figures(clients: Sequence[int], seconds: float) -> dict[int, Figures]:
    return asyncio.run(_figures(clients, seconds))


async def _figures(clients: Sequence[int], seconds: float) -> dict[int, Figures]:
    act: Any = Agent().act  # typed as what is called with a whole batch
    return {each: await asked(act, [*torch.rand(each, 4)], seconds) for each in clients}
