"""The structure of the package: short functions, one map, public names that are documented.

Which package may import which is checked by `lint-imports`, with the contracts in pyproject.toml.
"""

import ast
import importlib
import inspect
import pickle
import pydoc
import re
import statistics
from pathlib import Path

import pytest

import aiorpc_torch

PACKAGE = Path(aiorpc_torch.__file__).parent
REPOSITORY = Path(__file__).parents[2]

MOST_CODE = 50  # lines of a function, its docstring aside
MEDIAN_CODE = 10  # stays under this

TREES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
modules = pytest.mark.parametrize("module", TREES)


def functions(tree: ast.Module) -> list[tuple[str, int]]:
    """Return name and lines of code of every function, methods and inner ones too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            found.append((node.name, lines))
    return found


def test_the_map_shows_every_package() -> None:
    """A comment of the package names each package and module of its root."""
    source = (PACKAGE / "__init__.py").read_text()
    shown = re.findall(r"^# {5}(\w+) {2,}\S", source, re.MULTILINE)
    roots = {name.split(".")[0] for name in TREES} - {"__init__", "_version"}
    assert sorted(shown) == sorted(roots)


@modules
def test_functions_are_short(module: str) -> None:
    """No function has more code than it may have."""
    assert not [(name, lines) for name, lines in functions(TREES[module]) if lines > MOST_CODE]


def test_most_functions_are_short() -> None:
    """The median over the package."""
    lengths = [lines for tree in TREES.values() for _, lines in functions(tree)]
    assert statistics.median(lengths) < MEDIAN_CODE


# ── the tests ───────────────────────────────────────────────────────────────────────────────────

TESTS = REPOSITORY / "tests"
OF_NO_MODULE = {
    "test_gpu_run.py",
    "test_layout.py",
    "test_packets.py",
    "test_pages.py",
    "test_promises.py",
}  # of the project and of tests/support
UNIT_TESTS = [
    path.relative_to(TESTS / "unit").as_posix()
    for path in sorted((TESTS / "unit").rglob("test_*.py"))
]


@pytest.mark.parametrize("path", UNIT_TESTS)
def test_a_unit_test_has_the_name_of_its_module(path: str) -> None:
    """`unit/client/test_connection.py` tests `_client/connection.py`."""
    folder, _, file = path.rpartition("/")
    if file not in OF_NO_MODULE:
        module = file.removeprefix("test_")
        packages = [PACKAGE / folder, PACKAGE / f"_{folder}"]
        assert any((each / module).exists() for each in packages), "there is no such module"


def test_every_test_has_a_tier() -> None:
    """Each file lies in the folder of a tier, from which it gets its mark."""
    tiers = {"unit", "loopback", "faults", "fuzz", "torch_facts"}
    tiers |= {"integration", "network", "gpu", "examples"}
    assert {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} == tiers


# ── what it says of itself ──────────────────────────────────────────────────────────────────────


@modules
def test_every_module_has_a_docstring(module: str) -> None:
    """A module opens with a docstring."""
    assert ast.get_docstring(TREES[module])


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


def docstrings(tree: ast.Module) -> list[str]:
    """Return every docstring, without what stands in backticks and without indented examples."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    texts = [re.sub(r"(?m)^ {4,}.*$", "", text) for text in found if text]
    return [re.sub(r"`[^`]*`", "X", text) for text in texts]


def sentences(text: str) -> list[str]:
    paragraphs = re.split(r"\n\s*\n", re.sub(r"\([^)]*\)", "", text))
    return [each for one in paragraphs for each in re.split(r"(?<=[.!?:;])\s+", one)]


@modules
def test_docstrings_open_with_a_verb_or_a_noun(module: str) -> None:
    """Not with a relative clause, which has to be decoded."""
    firsts = {text.split()[0].strip(",.:") for text in docstrings(TREES[module])}
    assert not firsts & FIRST_WORDS


@modules
def test_docstrings_use_the_standard_terms(module: str) -> None:
    """One term for a concept, the field's own."""
    assert not [
        match[0] for text in docstrings(TREES[module]) for match in METAPHORS.finditer(text)
    ]


@modules
def test_sentences_are_short(module: str) -> None:
    """No sentence of a docstring is longer than it may be."""
    every = [each for text in docstrings(TREES[module]) for each in sentences(text)]
    assert not [each for each in every if len(each.split()) > LONGEST_SENTENCE]


MOST_NAMES = 45
PUBLIC_MODULES = ["types", "observe", "training", "testing"]


def test_the_public_names_are_exactly_those_bound() -> None:
    """`__all__` is a literal, which type checkers read, and names all that is bound."""
    [literal] = [
        ast.literal_eval(node.value)
        for node in TREES["__init__"].body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    ]
    assert literal == aiorpc_torch.__all__
    assert len({*literal}) == len(literal) <= MOST_NAMES
    public = {name for name in vars(aiorpc_torch) if not name.startswith("_")}
    roots = {name.split(".")[0] for name in TREES}  # such as `errors`
    assert public - roots - {"TYPE_CHECKING"} == {*literal}


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_public_modules_list_their_names(module: str) -> None:
    """Each name of `__all__` is bound, once."""
    found = getattr(aiorpc_torch, module)
    assert len({*found.__all__}) == len(found.__all__)
    assert all(hasattr(found, name) for name in found.__all__)


OLD = {
    "aiorpc_torch": {
        "create_all": r"create\(\[...\], ...\)",
        "supervised_all": r"supervised\(\[...\], ...\)",
        "NotServing": "WorkerLeft, .* NotInWorld",
        "attach_in_thread": r"in_thread\(attach\(\)\)",
        "stats": r"aiorpc_torch\.observe\.stats",
        "Supervised": r"aiorpc_torch\.types\.Supervised",
        "RemoteTraceback": r"aiorpc_torch\.types\.RemoteTraceback",
    },
    "aiorpc_torch.training": {"Policy": "Follower"},
}


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [(module, name, now) for module, names in OLD.items() for name, now in names.items()],
)
def test_an_old_name_says_the_new_one(module: str, name: str, now: str) -> None:
    """As an attribute and as an import."""
    with pytest.raises(AttributeError, match=now):
        getattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match=now):
        exec(f"from {module} import {name}")
    assert not hasattr(importlib.import_module(module), name)


def test_an_unknown_name_is_unknown() -> None:
    """As of any other module."""
    with pytest.raises(AttributeError, match=r"module 'aiorpc_torch' has no attribute 'nothing'$"):
        aiorpc_torch.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from aiorpc_torch import nothing")


def test_help_shows_public_names() -> None:
    """`help(aiorpc_torch)` opens with them, and calls none by the name of a private module."""
    text = pydoc.plain(pydoc.render_doc(aiorpc_torch))
    description = text.partition("PACKAGE CONTENTS")[0]
    for name in ("worker", "local_world", "create", "remote", "proxy", "call", "batched"):
        assert f"`{name}`" in description
    assert not re.findall(r"^ *(?:class )?aiorpc_torch\._\S+", text, re.MULTILINE)
    for name in aiorpc_torch.__all__:
        public = getattr(aiorpc_torch, name)
        assert public.__module__ == "aiorpc_torch"
        assert pickle.loads(pickle.dumps(public)) is public


@pytest.mark.parametrize("name", aiorpc_torch.__all__)
def test_every_public_name_is_described(name: str) -> None:
    """It has a docstring of its own."""
    thing = getattr(aiorpc_torch, name)
    if inspect.isclass(thing):
        assert (vars(thing).get("__doc__") or "").strip()
        assert not (thing.__doc__ or "").startswith(f"{name}("), "a dataclass's own signature"
    else:
        assert (inspect.getdoc(thing) or "").strip()


@pytest.mark.parametrize("name", aiorpc_torch.__all__)
def test_every_public_name_is_in_the_documentation(name: str) -> None:
    """README.md or a page of docs/ mentions it."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    assert re.search(rf"\b{name}\b", text), f"{name} is in none of {len(pages)} pages"
