"""Programs in the pages of the documentation, with their commands and the output that is shown."""

import contextlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.example_programs import PATIENCE, ROOT, started


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name in the first line, `# name.py`, under which a reader saves the block."""
        name = re.match(r"# (\S+\.\w+)\n", self.text)
        return name[1] if name else None


def blocks(page: str, *languages: str) -> list[Block]:
    """Return the page's blocks in these languages, in their order."""
    fenced = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    every = [Block(*each) for each in fenced.findall((ROOT / page).read_text())]
    return [each for each in every if each.language in languages]


def pages(folder: str) -> list[str]:
    """Return the pages of a folder that have programs, as paths from the root."""
    every = (str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob("*.md")))
    return [page for page in every if blocks(page, "python")]


def reader() -> dict[str, str]:
    """Return the environment of a reader who installed the library for this interpreter."""
    return {
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "",  # unbuffered, processes would write their lines in parts
    }


def saved(page: str, folder: Path) -> list[list[str]]:
    """Save the page's one file beside those of its folder's other pages; return its commands."""
    (program,) = blocks(page, "python")
    assert program.file
    for each in pages(str(Path(page).parent)):
        for file in blocks(each, "python"):
            (folder / str(file.file)).write_text(file.text)
    commands = [text.replace("\\\n", "") for _, text in blocks(page, "sh")]
    assert all(program.file in command for command in commands)
    return [shlex.split(command) for command in commands]


def run_together(commands: list[list[str]], folder: Path) -> list[str]:
    """Start these at once, each as in a terminal of its own; return what each prints."""
    with contextlib.ExitStack() as stack:
        terminals = [
            stack.enter_context(started(command, cwd=folder, **reader())) for command in commands
        ]
        said = [each.communicate(timeout=PATIENCE) for each in terminals]
    assert not any(each.returncode for each in terminals), said
    return [output for output, _ in said]
