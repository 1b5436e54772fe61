"""A language model on two workers: the large matrices on one, the LSTM and the text on the other.

The worker "ps" holds the vectors and the decoder of all words; "trainer" holds the LSTM between
them. A batch goes as several microbatches, each in a task of its own: while one is in
the LSTM, the others are on the wire or on the parameter server. All share one context of
distributed autograd, whose backward goes through both workers.

    python -m examples.rnn --epochs 6
    python -m examples.rnn --device cuda:0      # both parts; vectors travel from device to device
"""

import argparse
import asyncio
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

BATCH, LENGTH = 32, 32  # rows of a batch, and words of a row in a step

# ── the text: the topics of `help()`, which every Python has ────────────────────────────────────


def corpus(topics: Mapping[str, str], size: int) -> list[Tensor]:
    """Return training text and held-out text [N] int64, in numbers of `size` words.

    0 stands for all other words. Every tenth passage of twenty paragraphs is held out. A paragraph
    that several topics share is kept once, so training does not see what is held out.
    """
    paragraphs = dict.fromkeys(
        (*re.findall(r"\w+|[^\w\s]+", text.lower()), "<end>")
        for name in sorted(topics)
        for text in topics[name].split("\n\n")
    )
    texts: tuple[list[str], list[str]] = [], []
    for number, paragraph in enumerate(paragraphs):
        texts[number // 20 % 10 == 9].extend(paragraph)
    numbers = {word: n for n, (word, _) in enumerate(Counter(texts[0]).most_common(size - 1), 1)}
    return [torch.tensor([numbers.get(word, 0) for word in text]) for text in texts]


def chunks(text: Tensor, rows: int, microbatches: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield inputs and targets [B, T] int64 of each microbatch for every step.

    A target is the word after its input. A microbatch has the same rows of the text in every step,
    further on. The text is cut to whole rows, and to a whole number of steps.
    """
    parts = text[: len(text) // rows * rows].view(rows, -1).tensor_split(microbatches)
    for end in range(LENGTH, len(text) // rows, LENGTH):
        yield [(part[:, end - LENGTH : end], part[:, end - LENGTH + 1 : end + 1]) for part in parts]


# ── the model ───────────────────────────────────────────────────────────────────────────────────


class Words(nn.Module):
    """The vectors of all words, and the decoder from the LSTM's output to the next words."""

    def __init__(self, count: int, size: int, device: str, dropout: float = 0.4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.decoder = nn.Embedding(count, size), nn.Linear(size, count)
        self.dropout = nn.Dropout(dropout)
        self.to(device)

    def vectors(self, words: Tensor) -> Tensor:
        """Map words [B, T] int64 to [B, T, size] float32."""
        return self.dropout(self.table(words))  # type: ignore[no-any-return]

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross entropies of targets [B, T] in nats: a scalar travels."""
        scores = self.decoder(self.dropout(hidden)).mT
        return nn.functional.cross_entropy(scores, targets, reduction="sum")


def set_training(part: nn.Module, mode: bool) -> None:
    """Switch dropout and the recording of graphs on or off."""
    part.train(mode).requires_grad_(mode)


class Model:
    """A model of two parts, used on the worker of the LSTM."""

    def __init__(self, words: aiorpc.RRef[Words], size: int, micro: int, device: str) -> None:
        torch.manual_seed(1)
        self.words, self.microbatches, self.device = words, micro, device
        self.lstm = nn.LSTM(size, size, batch_first=True).to(device)
        self.parts = aiorpc.Group[nn.Module]([words, aiorpc.RRef(self.lstm)])

    async def run(self, text: Tensor, rows: int, opt: DistributedOptimizer | None = None) -> Tensor:
        """Read a text, and learn it with `opt`; return the loss of each step in nats a word."""
        await aiorpc.call(self.parts, set_training, opt is not None)
        self.states: list[tuple[Tensor, Tensor] | None] = [None] * self.microbatches
        losses = []
        for batch in chunks(text.to(self.device), rows, self.microbatches):
            async with context() as ctx:
                parts = await asyncio.gather(*map(self._loss, range(len(batch)), batch))
                losses.append(torch.stack(parts).sum() / (rows * LENGTH))
                if opt is not None:
                    await ctx.backward(losses[-1:], timeout=60.0)
                    await opt.step(ctx)
        return torch.stack(losses).detach().cpu()

    async def _loss(self, number: int, chunk: tuple[Tensor, Tensor]) -> Tensor:
        vectors = await aiorpc.call(self.words, Words.vectors, chunk[0])
        hidden, (h, c) = await asyncio.to_thread(self.lstm, vectors, self.states[number])
        self.states[number] = h.detach(), c.detach()  # read on here in the next step
        return await aiorpc.call(self.words, Words.loss, hidden, chunk[1])


async def train(options: argparse.Namespace) -> None:
    """Train for all epochs, each followed by the held-out text."""
    training, held_out = corpus(topics, options.words)
    counts = training.bincount(minlength=options.words) + 1.0
    unigram = (counts.sum() / counts).log()[held_out].mean().exp()
    words = await aiorpc.create("ps", Words, options.words, options.size, options.device)
    model = Model(words, options.size, options.microbatches, options.device)
    params = [each for part in model.parts for each in await parameter_rrefs(part)]
    opt = await DistributedOptimizer.create(torch.optim.Adam, params, lr=options.lr)
    for epoch in range(options.epochs):
        await opt.set(lr=options.lr * (1 - epoch / options.epochs))
        learned = (await model.run(training, BATCH, opt)).mean().exp()
        judged = (await model.run(held_out, BATCH)).mean().exp()
        print(f"epoch {epoch + 1}: perplexity {learned:.1f}, held out {judged:.1f}", flush=True)
    print(f"held-out perplexity: {judged:.1f}, unigram baseline: {unigram:.1f}")


async def main(options: argparse.Namespace) -> None:
    """Train on rank 0; serve on the other worker until rank 0 has left."""
    rank = os.environ.get("RANK")  # of torchrun, or of a terminal for each worker
    local = aiorpc.local_world(["ps"], name="trainer", **options.maps)
    async with aiorpc.worker(["trainer", "ps"][int(rank)], **options.maps) if rank else local as me:
        await (me.serve("trainer") if me.rank else train(options))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6, help="passes over the text")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--words", type=int, default=2000, help="words in the vocabulary")
    parser.add_argument("--size", type=int, default=160, help="of word vectors and of the LSTM")
    parser.add_argument("--lr", type=float, default=0.01, help="Adam's learning rate at first")
    parser.add_argument("--device", default="cpu", help="device of both parts of the model")
    parser.add_argument("--quick", action="store_true", help="a small model for a few seconds")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.words, options.size, options.lr = 1, 500, 48, 0.02
    options.maps = {"device_maps": None if options.device == "cpu" else "auto"}
    asyncio.run(main(options))
