"""The pages of the documentation agree with the package, and their programs with their tests."""

import ast
import importlib
import inspect
import operator
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiorpc_torch
import aiorpc_torch.observe
import aiorpc_torch.training
from tests.support import guides
from tests.support.pages import blocks
from tests.support.scripts import ROOT
from tests.support.sources import parse

REFERENCE = guides.DOCS / "reference"
WAYS_IN = ["worker", "local_world", "run_local", "attach"]
# Which workers there are, and where they meet: no defaults that a program would look up.
OF_A_WORKER = {"name", "rank", "world_size", "init_method", "workers", "main", "args"}


GUIDES = [guides.DOCS / "migrate.md", *sorted((guides.DOCS / "guides").glob("*.md"))]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_every_program_of_a_guide_is_run(path: Path) -> None:
    """Every block of Python is a file or a cell; every main program has a command."""
    page = guides.read(path)
    assert not page.unnamed
    for name, text in page.files.items():
        assert "__main__" not in text or any(name in command for command, _ in page.steps), name


STARTS = {"index.md", "features.md", "guides/index.md", "reference/index.md", "tutorial/index.md"}
LISTED = {"promises.md"}  # a page for maintainers, which the first pages name


def links(path: Path) -> set[str]:
    """Return the pages to which the text of a page links, as paths below docs/."""
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\((?!https?:)([^)#\s]+\.md)", text)
    return {(path.parent / each).resolve().relative_to(guides.DOCS).as_posix() for each in found}


def test_a_reader_meets_every_page_beside_the_navigation() -> None:
    """Where its subject comes up: a list of all pages does not count."""
    pages = {path.relative_to(guides.DOCS).as_posix(): path for path in guides.DOCS.rglob("*.md")}
    lists = STARTS - {"tutorial/index.md"}
    linked = [links(path) - {name} for name, path in pages.items() if name not in lists]
    assert set(pages) - set().union(*linked) - STARTS - LISTED == set()


def test_the_first_example_of_the_readme_is_short() -> None:
    """A reader sees it whole, in a few seconds."""
    first, *_ = blocks("README.md", "python")
    assert len(first.text.splitlines()) <= 20


@pytest.mark.parametrize("name", aiorpc_torch.__all__)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    """A page of docs/reference/ shows it."""
    text = "".join(path.read_text() for path in REFERENCE.glob("*.md"))
    own_pages = {"RRef": "`aiorpc_torch.RRef` is", "autograd": "::: aiorpc_torch.autograd."}
    assert own_pages.get(name, f"::: aiorpc_torch.{name}\n") in text


def test_the_bounds_against_strangers_exist() -> None:
    """The names in the table of ports and sockets are constants, and its tests are files."""
    text = "\n".join(section(guides.DOCS / "guides" / "secure.md", "Ports and sockets"))
    text, module = text.replace("`MASTER_PORT`", ""), ""  # a variable of the environment
    for given, constant in re.findall(r"`(_\w+\.\w+)?\.?([A-Z][A-Z_]{3,})`", text):
        module = given or module
        assert hasattr(importlib.import_module(f"aiorpc_torch.{module}"), constant), constant
    for name in re.findall(r"`(\w+/[\w/]+\.py)`", text):
        assert (ROOT / "tests" / name).exists(), name


# ── defaults ────────────────────────────────────────────────────────────────────────────────────


def section(path: Path, heading: str) -> list[str]:
    """Return the lines below a heading."""
    return path.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()


def rows(path: Path, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its first two lines."""
    lines = [line for line in section(path, heading) if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("name", WAYS_IN)
def test_defaults_of_worlds(name: str) -> None:
    """The table of worlds has the functions as columns."""
    position = 1 + WAYS_IN.index(name)
    parameters = inspect.signature(getattr(aiorpc_torch, name)).parameters
    listed = set[str]()
    for cells in rows(REFERENCE / "defaults.md", "Worlds"):
        listed.add(given := cells[0].strip("`"))
        found = parameters.get(given)
        assert cells[position] == ("–" if found is None else repr(found.default)), given
    assert set(parameters) - listed <= OF_A_WORKER


@pytest.mark.parametrize("heading", ["Calls", "Batches", "Training", "Metrics"])
def test_other_defaults(heading: str) -> None:
    """`Fill(max_wait=)`: the parameter of that public function or class."""
    for cell, default in rows(REFERENCE / "defaults.md", heading):
        path, parameter = re.fullmatch(r"`([\w.]+)\((\w+)=\)`", cell).groups()  # type: ignore[union-attr]
        thing = operator.attrgetter(path)(aiorpc_torch)
        assert repr(inspect.signature(thing).parameters[parameter].default) == default, cell


def test_limits() -> None:
    """The constants have the values that the table gives."""
    for _, value, name in rows(REFERENCE / "defaults.md", "Limits"):
        module, _, constant = name.strip("`").rpartition(".")
        found = getattr(importlib.import_module(f"aiorpc_torch.{module}"), constant)
        assert repr(found) == value, name


# ── texts of errors ─────────────────────────────────────────────────────────────────────────────

NOT_OURS = ("[W socket", "PicklingError", "Can't pickle", "RemoteError")
WORDS = 3  # in a row, which a text of the page has in common with one of the package


def texts() -> Iterator[str]:
    """Yield every text of the package, with its inserted values as one word."""
    for path in sorted(guides.ROOT.joinpath("aiorpc_torch").rglob("*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    each.value if isinstance(each, ast.Constant) else "_" for each in node.values
                ]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def windows(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-zA-Z]+", text)
    return {tuple(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1)}


def test_troubleshooting_quotes_errors_that_exist() -> None:
    """Each text of an entry's first line has words in a row from a text of the package."""
    known = {window for text in texts() for window in windows(text)}
    page = guides.DOCS / "troubleshooting.md"
    shown = [
        quoted
        for heading in ("The world does not start", "A call fails")
        for line in section(page, heading)
        if line.startswith("- ")
        for quoted in re.findall(r"`([^`]+)`", line)
        if not quoted.startswith(NOT_OURS) and len(quoted.split()) > WORDS
    ]
    assert len(shown) > 25
    assert not [each for each in shown if not windows(each) & known]


# ── excerpts of programs ────────────────────────────────────────────────────────────────────────

PROGRAMS = sorted((guides.DOCS / "programs").glob("*.md"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_excerpts_use_the_names_of_their_programs(path: Path) -> None:
    """A block of Python compiles, and what it names exists in examples/, whose tests run it."""
    sources = guides.ROOT.joinpath("examples").rglob("*.py")
    known = {name for each in sources for name in re.findall(r"\w+", each.read_text())}
    for excerpt in guides.read(path).unnamed:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        nodes = [*ast.walk(compile(excerpt, path.name, "exec", flags))]
        named = {each.id for each in nodes if isinstance(each, ast.Name)}
        named |= {each.attr for each in nodes if isinstance(each, ast.Attribute)}
        assert not named - known
