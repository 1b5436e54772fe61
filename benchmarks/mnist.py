"""How fast is a parameter server trained by one, two and four trainers, and what do they learn?

The plain form, one trainer in blocking torch RPC (`examples/_reference/mnist.py`), alternates with
`examples/mnist.py`. Each run is a program in processes of its own. All train on as many images.

    python -m benchmarks.mnist [--quick] [--repeat N]
"""

import argparse
import re
import subprocess
import sys
from statistics import median
from typing import NamedTuple

from ._compare import lay_out, parse, processor, spread

PLAIN = "plain torch, 1 trainer"
WAYS = {
    PLAIN: ["examples._reference.mnist"],
    "1 trainer": ["examples.mnist", "--world-size", "2"],
    "2 trainers": ["examples.mnist", "--world-size", "3"],
    "4 trainers": ["examples.mnist", "--world-size", "5"],
}


class Run(NamedTuple):
    rate: float  # iterations/s
    accuracy: float


def run(way: list[str], given: argparse.Namespace) -> Run:
    size = ["--epochs", "1", "--images", "640" if given.quick else str(given.images)]
    done = subprocess.run(
        [sys.executable, "-m", *way, *size], capture_output=True, text=True, check=False
    )
    found = re.search(r"([\d.]+) iterations/s.*accuracy: ([\d.]+)", done.stdout, re.DOTALL)
    if done.returncode or found is None:
        raise RuntimeError(done.stdout + done.stderr)
    return Run(float(found[1]), float(found[2]))


def measure(given: argparse.Namespace) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    for repetition in range(given.repeat):
        # The machine changes with time, so the order alternates too.
        for name in list(WAYS)[:: -1 if repetition % 2 else 1]:
            runs[name].append(run(WAYS[name], given))
            print(f"{name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    return runs


def show(runs: dict[str, list[Run]]) -> None:
    rows = [("", "iterations/s [min–max]", "against plain", "accuracy [min–max]")]
    for name, each in runs.items():
        rates = [one.rate for one in each]
        ratio = median(one.rate / plain.rate for one, plain in zip(each, runs[PLAIN], strict=True))
        accuracies = spread([one.accuracy for one in each])
        rows.append((name, spread(rates), f"{ratio:.2f}", accuracies))
    lay_out(rows)
    print(f"\nmedians of {len(runs[PLAIN])} runs each; {processor()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=3000, help="training images of each run")
    show(measure(parse(parser)))
