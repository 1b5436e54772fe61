"""The words of a language model, by themselves: workers import this, and it imports little."""

import asyncio
from typing import Any

from torch import Tensor

from examples.rnn import Words

MICROBATCHES = 3


class Meeting(Words):
    """Words that answer nobody until all microbatches have asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.barrier = asyncio.Barrier(MICROBATCHES)

    async def vectors(self, words: Tensor) -> Tensor:  # type: ignore[override]
        async with asyncio.timeout(10), self.barrier:
            return super().vectors(words)
