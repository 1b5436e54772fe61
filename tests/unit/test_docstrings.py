"""The language of docstrings: short sentences, a verb or a noun first, standard terms."""

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import aiorpc_torch
from tests.support.sources import parse

PACKAGE = Path(aiorpc_torch.__file__).parent

FIRST_WORDS = {
    "By",
    "How",
    "Of",
    "That",
    "Those",
    "What",
    "Where",
    "Whether",
    "Which",
    "Who",
    "Whose",
}
METAPHORS = re.compile(
    r"\b(house|rooms?|doors?|floors?|seats?|errands?|vigil|crew|nobody|goodbyes?|farewell|"
    r"successor|comes? back|nest|desk|lane)\b",
    re.IGNORECASE,
)
LONGEST_SENTENCE = 25  # words


@functools.cache
def docstrings(path: Path) -> list[str]:
    """Return every docstring, without what stands in backticks and without indented examples."""
    tree = parse(path)
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    texts = [re.sub(r"(?m)^ {4,}.*$", "", text) for text in found if text]
    return [re.sub(r"`[^`]*`", "X", text) for text in texts]


def sentences(text: str) -> list[str]:
    paragraphs = re.split(r"\n\s*\n", re.sub(r"\([^)]*\)", "", text))
    return [each for one in paragraphs for each in re.split(r"(?<=[.!?:;])\s+", one)]


def long_sentences(text: str) -> list[str]:
    """Return the sentences that are longer than they may be."""
    return [each for each in sentences(text) if len(each.split()) > LONGEST_SENTENCE]


def bad_first_words(text: str) -> list[str]:
    """Return the first word, if it begins a relative clause, which has to be decoded."""
    first = text.split()[0].strip(",.:")
    return [first] if first in FIRST_WORDS else []


def metaphors(text: str) -> list[str]:
    """Return the words that stand for a term of the field."""
    return [match[0] for match in METAPHORS.finditer(text)]


@pytest.mark.parametrize("find", [bad_first_words, metaphors, long_sentences])
def test_docstrings_are_plain(find: Callable[[str], list[str]]) -> None:
    """Of every module, class and function of the package."""
    found = {
        f"{path.relative_to(PACKAGE)}: {each}"
        for path in PACKAGE.rglob("*.py")
        for text in docstrings(path)
        for each in find(text)
    }
    assert not found


def test_every_module_has_a_docstring() -> None:
    """It opens with one."""
    paths = PACKAGE.rglob("*.py")
    assert not [path for path in paths if not ast.get_docstring(parse(path))]
