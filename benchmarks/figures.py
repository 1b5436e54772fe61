"""Run every benchmark, draw every figure, and put the printed tables into docs/benchmarks.md.

Each runs in a process of its own, one after the other. The machine should do nothing else.

    python -m benchmarks.figures [--quick] [--only NAME ...]

`--only soak` runs the soak and puts its table there.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

FIGURED = ["calls", "streams", "batching", "memory", "threshold", "cartpole"]
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"
TEXT = ROOT / "out" / "benchmarks.txt"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every benchmark, with its figure.")
    names = [*FIGURED, "soak"]
    parser.add_argument("--quick", action="store_true", help="as a check; the page stays")
    parser.add_argument("--only", nargs="+", choices=names, default=FIGURED, metavar="NAME")
    return parser.parse_args()


def run(name: str, *, quick: bool) -> str:
    """Run a benchmark and return its output."""
    figure = (TEXT.parent if quick else FIGURES) / f"{name}.svg"
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    command += ["--plot", str(figure)] if name in FIGURED else []
    command += ["--quick"] if quick else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{name} failed")
    return re.sub(r"\n+drawn: .*\n", "\n", done.stdout).strip("\n")


def insert(page: str, name: str, text: str) -> str:
    """Return the page with `text` in the fenced block between the marks of `name`."""
    block = f"<!-- {name} -->\n\n```text\n{text}\n```\n\n<!-- end -->"
    pattern = rf"<!-- {name} -->\n.*?<!-- end -->"
    if not re.search(pattern, page, re.DOTALL):
        raise ValueError(f"{PAGE.name} has no marks for {name}: <!-- {name} --> ... <!-- end -->")
    return re.sub(pattern, lambda _: block, page, count=1, flags=re.DOTALL)


def main() -> None:
    given = arguments()
    TEXT.parent.mkdir(exist_ok=True)
    texts = []
    for name in given.only:
        start = time.monotonic()
        text = run(name, quick=given.quick)
        print(f"── {name} ({time.monotonic() - start:.0f} s)\n\n{text}\n", flush=True)
        page = insert(PAGE.read_text(), name, text)
        texts.append(f"── {name}\n\n{text}\n")
        TEXT.write_text("\n".join(texts))
        if not given.quick:
            PAGE.write_text(page)


if __name__ == "__main__":
    main()
