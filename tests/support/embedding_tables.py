"""An embedding table, by itself: workers import it, and it imports little."""

import asyncio
from typing import Any

from torch import Tensor

from examples._language import EmbeddingTable

MICROBATCHES = 3


class Meeting(EmbeddingTable):
    """A table that answers nobody until all microbatches have asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.barrier = asyncio.Barrier(MICROBATCHES)

    async def forward(self, words: Tensor) -> Tensor:  # type: ignore[override]
        async with asyncio.timeout(30.0), self.barrier:
            return super().forward(words)
