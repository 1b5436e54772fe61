"""The command line of a soak and its end, which all soaks have alike."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

MOST = 20  # problems that are printed


def parse_sizes(parser: argparse.ArgumentParser, **sizes: tuple[int, int]) -> argparse.Namespace:
    """Parse the command line. `sizes` are options with their defaults: with `--quick`, without."""
    given = parser.parse_args()
    for name, (quick, usual) in sizes.items():
        if getattr(given, name) is None:
            setattr(given, name, quick if given.quick else usual)
    return given


def end(problems: Sequence[str], what: str = "") -> NoReturn:
    """Print what is wrong, after `what`, and exit with 1 if anything is."""
    for problem in problems[:MOST]:
        print(f"WRONG  {problem}")
    print(f"{what}{len(problems)} things are wrong" if problems else f"{what}all is well")
    sys.exit(bool(problems))
