"""The public names: exactly those that are bound, documented, and nothing of former ones."""

import ast
import importlib
import inspect
import pickle
import pydoc
import re
from pathlib import Path

import pytest

import aiorpc_torch
from tests.support.sources import parse

REPOSITORY = Path(__file__).parents[2]

MOST_NAMES = 48
PUBLIC_MODULES = ["types", "observe", "training", "testing"]


def test_the_public_names_are_exactly_those_bound() -> None:
    """`__all__` is a literal, which type checkers read, and names all that is bound."""
    [literal] = [
        ast.literal_eval(node.value)
        for node in parse(Path(aiorpc_torch.__file__)).body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    ]
    assert literal == aiorpc_torch.__all__
    assert len({*literal}) == len(literal) <= MOST_NAMES
    public = {name for name in vars(aiorpc_torch) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(aiorpc_torch, name))}
    assert public - modules - {"TYPE_CHECKING"} == {*literal}


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
