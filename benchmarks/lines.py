"""How many lines of code has each program of the examples, beside the tutorial that it replaces?

Both sides are formatted by ruff at 100 columns. Blank lines, comments and docstrings are not
counted. A helper of the examples, and the package's own module, count fully in each program that
imports them. The tutorials are those of pytorch/examples; their counts are kept in `TUTORIALS`.
With the path of a checkout they are counted anew.

    python -m benchmarks.lines [--tutorials PATH]
"""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ._compare import lay_out

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"  # of pytorch/examples, as counted below
WIDTH = 100


class Tutorial(NamedTuple):
    """Files of a tutorial in `distributed/rpc`, and their lines of code."""

    files: Sequence[str]
    lines: int


TUTORIALS = {
    "cartpole": Tutorial(["batch/reinforce.py"], 171),
    "reinforce": Tutorial(["rl/main.py"], 155),
    "parameter_server": Tutorial(["batch/parameter_server.py"], 105),
    "mnist": Tutorial(["parameter_server/rpc_parameter_server.py"], 223),
    "pipeline": Tutorial(["pipeline/main.py"], 185),
    "rnn": Tutorial(["rnn/main.py", "rnn/rnn.py"], 104),
}
LIMITS = {"inference": 175}
"""Lines of programs that have no tutorial."""

IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Count the lines of code of a module, as ruff formats it."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(WIDTH)]
    done = subprocess.run([*command, "-"], input=source, capture_output=True, text=True, check=True)
    tokens = tokenize.generate_tokens(io.StringIO(done.stdout).readline)
    used = {
        line
        for each in tokens
        if each.type not in IGNORED
        for line in range(each.start[0], each.end[0] + 1)
    }
    return len(used - set(docstring_lines(ast.parse(done.stdout))))


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the numbers of the lines of all docstrings, those of attributes too."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield from range(node.lineno, (node.end_lineno or 0) + 1)


def modules(program: str) -> list[Path]:
    """Return the program's module and all modules of the examples that it imports."""
    found: list[Path] = []
    waiting = [program, "__init__"]
    while waiting:
        path = EXAMPLES / f"{waiting.pop()}.py"
        if path not in found:
            found.append(path)
            waiting += imported(ast.parse(path.read_text()))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the modules of the examples that a module of them imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module] if node.module else (alias.name for alias in node.names)


def program_lines(program: str) -> int:
    """Count the lines of a program and of its helpers."""
    return sum(code_lines(path.read_text()) for path in modules(program))


def limit(program: str) -> int:
    """Return the lines of a program's tutorial, or its bound."""
    return TUTORIALS[program].lines if program in TUTORIALS else LIMITS[program]


def row(program: str, checkout: Path | None) -> tuple[str, ...]:
    """Return the cells of a program: lines, those of its tutorial, and its helpers' names."""
    most = limit(program)
    if checkout and (tutorial := TUTORIALS.get(program)):
        folder = checkout / "distributed" / "rpc"
        most = sum(code_lines((folder / each).read_text()) for each in tutorial.files)
    helpers = ", ".join(sorted({path.stem for path in modules(program)} - {program, "__init__"}))
    return program, str(program_lines(program)), str(most), helpers


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines of code of the programs.")
    parser.add_argument("--tutorials", type=Path, metavar="PATH", help="of pytorch/examples")
    given = parser.parse_args()
    heads = ("program", "ours", "the tutorial", "helpers, included in ours")
    lay_out([heads, *(row(each, given.tutorials) for each in (*TUTORIALS, *LIMITS))])


if __name__ == "__main__":
    main()
