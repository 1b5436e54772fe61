"""How does the language model of the examples learn: cross entropy by step, against unigrams?

Training as in `examples.rnn`, with its default options, and the curves as a figure.

    python -m benchmarks.rnn [--quick] [--epochs N] [--plot PATH]
"""

import argparse
import asyncio
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean

import torch
from torch import Tensor

from aiorpc_torch import create, local_world
from aiorpc_torch.autograd import DistributedOptimizer, parameter_rrefs
from examples.rnn import BATCH, Model, Words, corpus

from ._compare import lay_out, machine
from ._plot import OTHER, OURS, RAW, Curve, Panel, draw

WORDS, SIZE, MICROBATCHES, LR = 2000, 160, 4, 0.01
MEAN = 10  # steps of a point


async def learn(given: argparse.Namespace, training: Tensor, held_out: Tensor) -> list[Curve]:
    """Train for all epochs and print a line for each; return the curves."""
    learned, judged, steps, rows = [], [], [0.0], []
    async with local_world(["ps"], name="trainer"):
        model = Model(await create("ps", Words, WORDS, SIZE, "cpu"), SIZE, MICROBATCHES, "cpu")
        params = [each for part in model.parts for each in await parameter_rrefs(part)]
        opt = await DistributedOptimizer.create(torch.optim.Adam, params, lr=LR)
        for epoch in range(given.epochs):
            start = time.monotonic()
            await opt.set(lr=LR * (1 - epoch / given.epochs))
            losses = await model.run(training, BATCH, opt)
            rate = len(losses) / (time.monotonic() - start)
            learned += losses.tolist()
            judged.append((await model.run(held_out, BATCH)).mean())
            steps.append(float(len(learned)))
            perplexities = losses.mean().exp(), judged[-1].exp()
            rows.append([str(epoch + 1), *(f"{each:.1f}" for each in perplexities), f"{rate:.1f}"])
    lay_out([("epoch", "training", "held out", "steps/s"), *rows])
    means = [[mean(learned[n : n + MEAN])] for n in range(0, len(learned), MEAN)]
    return [
        Curve(f"training, mean of {MEAN}", OTHER, range(0, len(learned), MEAN), means),
        Curve("held out", OURS, steps[1:], [[each.item()] for each in judged]),
    ]


def main(given: argparse.Namespace) -> None:
    training, held_out = corpus(topics, WORDS)
    if given.quick:
        given.epochs, training = 1, training[:20_000]
    counts = training.bincount(minlength=WORDS) + 1.0
    unigram = (counts.sum() / counts).log()[held_out].mean()
    curves = asyncio.run(learn(given, training, held_out))
    print(f"\n{len(training):,} words to learn, {len(held_out):,} held out")
    print(f"unigram baseline: {unigram.exp():.1f}\n{machine()}")
    if given.plot:
        level = [[unigram.item()]] * 2
        curves.append(Curve("unigram, held out", RAW, [0, curves[0].xs[-1]], level))
        title = "An LSTM across two workers"
        draw([Panel(title, "step", "cross entropy (nats a word)", curves, log="")], given.plot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6, help="passes over the text")
    parser.add_argument("--quick", action="store_true", help="one epoch of a part, as a check")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    main(parser.parse_args())
