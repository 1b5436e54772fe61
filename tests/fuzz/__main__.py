"""Fuzz the readers with atheris (`pip install atheris`), from the corpus and into it.

    python -m tests.fuzz [--seconds N] [--corpus PATH]

What it finds is kept in `corpus/`, whose files a test of `make test` reads again. A crash is a file
`crash-…` in the current directory: its first byte names the reader.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
INSTRUMENTED = (
    "aiorpc_torch._wire",
    "aiorpc_torch._carrier",
    "aiorpc_torch._channel",
    "aiorpc_torch._context",
    "aiorpc_torch._directory",
    "aiorpc_torch._endpoint",
    "aiorpc_torch._node.departures",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=3600, metavar="N", help="(3600)")
    parser.add_argument("--corpus", type=Path, default=CORPUS, metavar="PATH", help="(corpus/)")
    given = parser.parse_args()
    atheris = import_module("atheris")
    with atheris.instrument_imports(include=[*INSTRUMENTED]):
        read_any = import_module("tests.fuzz.readers").read_any
    limits = ["-max_len=4096", "-rss_limit_mb=2048", "-timeout=20"]
    options = [*limits, f"-max_total_time={given.seconds}", str(given.corpus)]
    atheris.Setup([sys.argv[0], *options], read_any)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
