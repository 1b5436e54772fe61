"""A language model on two workers: word vectors and decoder on one, the LSTM on the other.

The worker "ps" holds the large matrices, one row a word, on its device; "trainer" holds the LSTM
and reads the text. A batch goes as several microbatches, each in a task of its own: while one is
in the LSTM, the others are on the wire or on the parameter server. All share one context of
distributed autograd, whose backward goes through both workers.

    python -m examples.rnn --epochs 6
"""

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.optim import Optimizer

import aiorpc_torch as aiorpc
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

from . import _corpus as corpora
from ._language import Chunk, Model, State
from ._launch import add_world, launch
from ._plot import curves

WORKERS = ["trainer", "ps"]
TIMEOUT = 60.0  # seconds, the timeout of a backward
WARM = 0.05  # part of all steps in which the learning rate rises


class History(NamedTuple):
    """The history of a run: nats a word, by step."""

    training: list[float]
    held_out: list[tuple[float, float]]
    unigram: float  # perplexity
    seconds: float  # of training
    sample: str


# ── training ────────────────────────────────────────────────────────────────────────────────────


class Trainer:
    """A trainer that learns a batch a step; the batch's rows are microbatches that overlap."""

    def __init__(self, model: Model, opt: DistributedOptimizer, microbatches: int) -> None:
        self.model, self.opt = model, opt
        self.states: list[State | None] = [None] * microbatches

    @classmethod
    async def create(
        cls, words: int, options: argparse.Namespace, optimizer: type[Optimizer] = torch.optim.Adam
    ) -> "Trainer":
        """Make a model of `words` words, and an optimizer beside each of its parts."""
        model = await Model.create(
            "ps",
            words,
            size=options.size,
            dropout=options.dropout,
            device=options.device,
            seed=options.seed,
        )
        params = [each for part in model.parts for each in await parameter_rrefs(part)]
        opt = await DistributedOptimizer.create(optimizer, params, lr=options.lr)
        return cls(model, opt, options.microbatches)

    async def step(self, batch: Sequence[Chunk], lr: float, clip: float) -> float:
        """Learn one chunk of each microbatch's stream; return the loss in nats a word."""
        async with context() as ctx:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.opt.set(lr=lr))
                running = [
                    tasks.create_task(self.model.loss(chunk, state))
                    for chunk, state in zip(batch, self.states, strict=True)
                ]
            losses, self.states = map(list, zip(*(each.result() for each in running), strict=True))
            loss = torch.stack(losses).sum() / sum(targets.numel() for _, targets in batch)
            await ctx.backward([loss], timeout=TIMEOUT)
            await self.model.clip(ctx, clip)
            await self.opt.step(ctx)
        return loss.item()

    def start_again(self) -> None:
        """Reset the states: the next batch is the start of the text."""
        self.states = [None] * len(self.states)


def batches(rows: Tensor, microbatches: int, length: int) -> Iterator[tuple[Chunk, ...]]:
    """Yield a chunk of every microbatch for each step: the same rows, further on."""
    parts = rows.tensor_split(microbatches)
    return zip(*(corpora.chunks(part, length) for part in parts), strict=True)


def rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: a line up to the peak, then half a cosine down to 0."""
    warm = max(1, round(WARM * steps))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2


async def main(me: aiorpc.Worker, options: argparse.Namespace) -> History | None:
    """Train on rank 0; serve on the other worker until the end."""
    return await train(options) if me.rank == 0 else None


async def train(options: argparse.Namespace) -> History:
    """Train for all epochs, each followed by the held-out text; write a sample at the end."""
    console = Console()
    text = await asyncio.to_thread(corpora.corpus, corpora.python_topics(), options.words)
    rows = corpora.streams(text.training, options.batch)
    held_out = corpora.streams(text.held_out, options.microbatches)
    unigram = corpora.unigram_perplexity(text.training, held_out[:, 1:], len(text.words))
    console.print(
        f"{len(text.training):,} words to learn, {len(text.held_out):,} held out, "
        f"{len(text.words):,} different; unigram perplexity {unigram:.1f}"
    )
    trainer = await Trainer.create(len(text.words), options)
    epoch_steps = math.ceil((rows.shape[1] - 1) / options.length)
    steps, losses, judged, seconds = options.epochs * epoch_steps, list[float](), [], 0.0
    with progress(console) as bar:
        task = bar.add_task("training", total=steps, loss=math.nan)
        for epoch in range(1, options.epochs + 1):
            start = time.monotonic()
            trainer.start_again()
            for batch in batches(rows, options.microbatches, options.length):
                lr = rate(len(losses), steps, options.lr)
                losses.append(await trainer.step(batch, lr, options.clip))
                bar.update(task, advance=1, loss=losses[-1])
            seconds += time.monotonic() - start
            perplexity = await trainer.model.perplexity(held_out, options.length)
            judged.append((float(len(losses)), math.log(perplexity)))
            learned = math.exp(statistics.mean(losses[-epoch_steps:]))
            console.print(f"epoch {epoch}: perplexity {learned:.1f}, held out {perplexity:.1f}")
    sample = await written(trainer.model, text.words, options)
    return History(losses, judged, unigram, seconds, sample)


async def written(model: Model, words: Sequence[str], options: argparse.Namespace) -> str:
    """Return a text that the model writes after the end of a paragraph."""
    first, never = words.index(corpora.END), words.index(corpora.UNKNOWN)
    torch.manual_seed(options.seed)
    numbers = await model.write(first, never, options.sample, options.temperature)
    return corpora.prose(words[number] for number in numbers)


# ── output ──────────────────────────────────────────────────────────────────────────────────────


def progress(console: Console) -> Progress:
    """Return a progress bar of the steps, with the last loss."""
    columns = "{task.description}", "{task.fields[loss]:.2f} nats a word"
    first, last = map(TextColumn, columns)
    return Progress(
        first, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), last, console=console
    )


def report(history: History, options: argparse.Namespace) -> None:
    """Print the figures and a sample, and draw the curves."""
    perplexity = math.exp(history.held_out[-1][1])
    print(f"\n{history.sample}\n")
    print(f"held-out perplexity: {perplexity:.1f}, unigram baseline: {history.unigram:.1f}")
    print(
        f"{len(history.training) / history.seconds:.1f} steps/s "
        f"of {options.batch} x {options.length} words, {options.microbatches} microbatches"
    )
    picture = curves(
        options.plot,
        {"training": history.training, "held out": history.held_out},
        title="An LSTM across two workers",
        xlabel="step",
        ylabel="cross entropy (nats a word)",
        level=("unigram, held out", math.log(history.unigram)),
    )
    print(f"curves: {picture}")


QUICK = {"epochs": 1, "words": 500, "size": 48, "lr": 0.02, "sample": 20}


def arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=int, default=6, help="passes over the text")
    add("--batch", type=int, default=32, help="rows of a batch")
    add("--microbatches", type=int, default=4, help="microbatches in a batch")
    add("--length", type=int, default=32, help="words of a row in a step")
    add("--words", type=int, default=2000, help="words in the vocabulary")
    add("--size", type=int, default=160, help="size of word vectors and of the LSTM")
    add("--dropout", type=float, default=0.4)
    add("--lr", type=float, default=0.01, help="Adam's learning rate at its peak")
    add("--clip", type=float, default=1.0, help="norm of all gradients together, at most")
    add("--sample", type=int, default=60, help="words of the sample at the end")
    add("--temperature", type=float, default=0.8, help="temperature of the sample")
    add("--device", default="cpu", help="device of the parameter server")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, default=Path("out/rnn.png"))
    add("--quick", action="store_true", help="a small model for a few seconds")
    add_world(parser)
    if parser.parse_args(args).quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(args)


if __name__ == "__main__":
    options = arguments()
    if (history := launch(main, WORKERS, options)) is not None:
        report(history, options)
