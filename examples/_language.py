"""A language model in three parts on two workers.

The parts are modules on either worker. In training mode they make a graph, in evaluation mode none.
This module has no optimizer and no vocabulary.
"""

import asyncio
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.autograd import get_gradients  # type: ignore[attr-defined]

from aiorpc_torch import RRef, call, create
from aiorpc_torch.autograd import Context

from ._corpus import chunks

State = tuple[Tensor, Tensor]  # of an LSTM: hidden and cell, [layers, B, size] each
Chunk = tuple[Tensor, Tensor]  # inputs and targets, [B, T] int64 each


# ── the parts on the parameter server ───────────────────────────────────────────────────────────


class EmbeddingTable(nn.Module):
    """A table with the vector of each word."""

    def __init__(self, words: int, size: int, dropout: float, device: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(words, size)
        self.dropout = nn.Dropout(dropout)
        self.device = torch.device(device)
        self.to(self.device)

    def forward(self, words: Tensor) -> Tensor:
        """Map [B, T] int64 to [B, T, size] float32.

        Both are on the CPU, since tensors between devices of two workers need a device map.
        """
        with torch.set_grad_enabled(self.training):
            vectors: Tensor = self.dropout(self.table(words.to(self.device)))
            return vectors.cpu()


class Decoder(nn.Module):
    """A decoder from the LSTM's output to the next words."""

    def __init__(self, size: int, words: int, dropout: float, device: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(size, words)
        self.device = torch.device(device)
        self.to(self.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, size] to logits [B, T, words], on the CPU."""
        with torch.set_grad_enabled(self.training):
            return self._logits(hidden).cpu()

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross entropies of targets [B, T], in nats.

        It is computed beside the logits, so a scalar travels instead of a number for each word of
        the vocabulary and each target.
        """
        with torch.set_grad_enabled(self.training):
            logits, expected = self._logits(hidden), targets.to(self.device)
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), expected.flatten(), reduction="sum"
            )
            return loss.cpu()

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.dropout(hidden.to(self.device)))
        return logits


# ── called with an RRef of a part: `call(rref, set_training, True)` ─────────────────────────────


def set_training(part: nn.Module, mode: bool) -> None:
    """Call `train(mode)` without sending the module back."""
    part.train(mode)


def squared_norm(part: nn.Module, context: int) -> float:
    """Return the squared norm of the part's gradients in that distributed autograd context."""
    return sum(float(gradient.square().sum()) for gradient in _gradients(part, context))


def scale_gradients(part: nn.Module, context: int, factor: float) -> None:
    """Multiply the part's gradients in that context, in place."""
    for gradient in _gradients(part, context):
        gradient.mul_(factor)


def _gradients(part: nn.Module, context: int) -> list[Tensor]:
    found = get_gradients(context)
    return [found[parameter] for parameter in part.parameters() if parameter in found]


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────


class Model:
    """A model of three parts on two workers, used on the worker of the LSTM."""

    def __init__(
        self, embeddings: RRef[EmbeddingTable], lstm: nn.LSTM, decoder: RRef[Decoder]
    ) -> None:
        self.embeddings, self.lstm, self.decoder = embeddings, lstm, decoder
        self.parts: list[RRef[Any]] = [embeddings, RRef(lstm), decoder]

    @classmethod
    async def create(
        cls, ps: str, words: int, *, size: int, dropout: float, device: str, seed: int
    ) -> "Model":
        """Make the parts, two of them on `ps`, with weights from `seed`."""
        embeddings = await create(ps, EmbeddingTable, words, size, dropout, device, seed)
        decoder = await create(ps, Decoder, size, words, dropout, device, seed + 1)
        torch.manual_seed(seed + 2)
        return cls(embeddings, nn.LSTM(size, size, batch_first=True), decoder)

    async def read(self, words: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the LSTM's output [B, T, size] for words [B, T], and the new state."""
        vectors = await call(self.embeddings, EmbeddingTable.forward, words)
        return await asyncio.to_thread(self._recur, vectors, state)  # other calls go on meanwhile

    def _recur(self, vectors: Tensor, state: State | None) -> tuple[Tensor, State]:
        with torch.set_grad_enabled(self.lstm.training):
            hidden, (h, c) = self.lstm(vectors, state)
        return hidden, (h.detach(), c.detach())

    async def loss(self, chunk: Chunk, state: State | None) -> tuple[Tensor, State]:
        """Return the sum over the chunk's targets, in nats, and the state for the next chunk."""
        inputs, targets = chunk
        hidden, state = await self.read(inputs, state)
        return await call(self.decoder, Decoder.loss, hidden, targets), state

    async def train(self, mode: bool) -> None:
        """Set the mode of every part: in training, a graph and dropout."""
        await asyncio.gather(*(call(part, set_training, mode) for part in self.parts))

    async def clip(self, ctx: Context, limit: float) -> None:
        """Scale the gradients of all parts together, so that their norm is at most `limit`."""
        squares = await asyncio.gather(*(call(part, squared_norm, ctx.id) for part in self.parts))
        if (norm := math.sqrt(sum(squares))) > limit:
            factor = limit / norm
            await asyncio.gather(
                *(call(part, scale_gradients, ctx.id, factor) for part in self.parts)
            )

    async def perplexity(self, rows: Tensor, chunk_length: int) -> float:
        """Return the perplexity of held-out rows [B, N], each read by a task of its own."""
        await self.train(False)
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(self._nats(row.unsqueeze(0), chunk_length)) for row in rows
            ]
        await self.train(True)
        return math.exp(sum(each.result() for each in readers) / rows[:, 1:].numel())

    async def _nats(self, rows: Tensor, chunk_length: int) -> float:
        total, state = 0.0, None
        for chunk in chunks(rows, chunk_length):
            loss, state = await self.loss(chunk, state)
            total += loss.item()
        return total

    async def write(self, first: int, never: int, length: int, temperature: float) -> list[int]:
        """Sample `length` words after `first`, without the word `never`."""
        await self.train(False)
        words, state = [first], None
        for _ in range(length):
            hidden, state = await self.read(torch.tensor([words[-1:]]), state)
            logits = await call(self.decoder, Decoder.forward, hidden)
            logits[..., never] = -math.inf
            weights = torch.softmax(logits.flatten() / temperature, dim=0)
            words.append(int(torch.multinomial(weights, num_samples=1)))
        await self.train(True)
        return words[1:]
