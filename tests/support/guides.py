"""Pages of the documentation as folders of files, with commands and the output that they show.

A block of Python is a file if its first line names it (`# serve.py`), or a cell of a notebook
(`# cell 1`). A line of a `sh` block that runs one of these files is a command. The next `text`
block is what each of the commands since the last one prints. On a page with cells, all `text`
blocks together are what the cells print.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.scripts import ROOT

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"# (?:(cell) \d+|(\w+\.py))\n")

CELLS = """\
import ast, asyncio, inspect
async def run():
    for cell in CELLS:
        code = compile(cell, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, globals())
        if inspect.isawaitable(result):
            await asyncio.create_task(result)  # each cell is a task of its own
asyncio.run(run())
"""


@dataclass
class Page:
    """A page: its files, the commands that run them, and the output of each command."""

    path: Path
    files: dict[str, str] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    steps: list[tuple[str, str]] = field(default_factory=list)
    """Commands, or the text of cells, each with its output."""

    def __str__(self) -> str:
        return self.path.relative_to(DOCS).as_posix()


def read(path: Path) -> Page:
    """Return the page in that file."""
    page, commands, cells, printed = Page(path), [], [], ""
    for _, language, indented in BLOCK.findall(path.read_text()):
        text = textwrap.dedent(indented)
        if language == "python":
            found = NAME.match(text)
            if found is None:
                page.unnamed.append(text)
            elif found[1]:
                cells.append(text)
            else:
                page.files[found[2]] = text
        elif language == "sh":
            commands += [line for line in text.splitlines() if _runs(line, page)]
        elif language == "text" and cells:
            printed += text
        elif language == "text":
            page.steps += [(command, text) for command in commands]
            commands = []
    if cells:
        page.steps.append((f"CELLS = {cells!r}\n{CELLS}", printed))
    page.unnamed += [f"a command without its output: {command}" for command in commands]
    return page


def _runs(line: str, page: Page) -> bool:
    words = line.split()
    return "--master" not in line and not {*words}.isdisjoint(page.files)


def has_printed(found: str, lines: Iterable[str]) -> bool:
    """Return whether that is all that processes have printed, in any order.

    torchrun lets its processes write without a buffer: the end of one's line may come after the
    line of another.
    """
    for line in sorted(lines, key=len, reverse=True):
        if line not in found:
            return False
        found = found.replace(line, "", 1)
    return not found.strip()


def run(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command, or cells, in the folder of a page's files."""
    words = [command] if command.startswith("CELLS") else shlex.split(command)
    given = {}
    while "=" in words[0] and not command.startswith("CELLS"):
        name, _, given[name] = words.pop(0).partition("=")
    start = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    if command.startswith("CELLS"):
        arguments, text = ["-"], command  # without a file, as a notebook
    else:
        arguments, text = [*start[words[0]], *words[1:]], None
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=500,
        # Unbuffered, processes would write their lines in parts.
        env={
            **os.environ,
            **given,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "",
        },
        check=False,
    )
