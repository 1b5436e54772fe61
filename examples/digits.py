"""Synthetic handwritten digits, written to the files of MNIST.

python -m examples.digits out/digits
"""

import argparse
from pathlib import Path

from ._digits import write

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--train", type=int, default=6000, help="training images")
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(write(given.root, train=given.train, test=given.test, seed=given.seed))
