"""Promises of the documentation, and the tests that hold them.

`tests/promises.toml` lists the promises. A test names what it holds with
`@pytest.mark.promise("section.name")`. `python -m tests.support.promises` reports what does not fit
together; with `--write` it makes docs/promises.md anew.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.sources import parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"

HEAD = """\
# Promises

Each promise of these pages is held by tests. `tests/promises.toml` lists the promises, and tests
name them with `@pytest.mark.promise`. `python -m tests.support.promises --write` makes this page.
A promise without a test, an unknown name and a stale page fail in `make test`.
"""

Sections = Mapping[str, Mapping[str, Any]]
Marks = Mapping[str, list[str]]  # names of tests, as pytest takes them, by id of a promise


def load() -> Sections:
    """Return the sections of `tests/promises.toml`."""
    return tomllib.loads((ROOT / "tests" / "promises.toml").read_text())


def find_marks(root: Path = ROOT) -> Marks:
    """Return the tests that hold each promise, from the source of all tests."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for test, ids in marked(parse(path)):
            for each in ids:
                found.setdefault(each, []).append(f"{path.relative_to(root).as_posix()}::{test}")
    return found


def marked(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each test of a module or class with the promises that it names."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            ids = [each for decorator in node.decorator_list for each in _ids(decorator)]
            if ids and not node.name.lower().startswith("test"):
                raise ValueError(f"{node.name} has a promise and is no test")
            if ids and "pytest.mark.exhaustive" in map(ast.unparse, node.decorator_list):
                raise ValueError(f"{node.name} has a promise, and `make test-rest` leaves it out")
            if ids:
                yield prefix + node.name, ids
            if isinstance(node, ast.ClassDef):
                yield from marked(node, f"{prefix}{node.name}::")


def _ids(decorator: ast.expr) -> list[str]:
    is_call = isinstance(decorator, ast.Call)
    if not is_call or ast.unparse(decorator.func) != "pytest.mark.promise":
        return []
    return [ast.literal_eval(each) for each in decorator.args]


def page(sections: Sections, marks: Marks) -> str:
    """Return the text of docs/promises.md."""
    parts = [HEAD]
    for key, section in sections.items():
        rows = [
            f"| {text} | {'<br>'.join(f'`{_short(each)}`' for each in marks.get(name, []))} |"
            for name, text in _promises(key, section)
        ]
        title = f"## [{section['title']}]({section['page']})"
        parts.append("\n".join((title, "", "| promise | tests |", "|---|---|", *rows, "")))
    return "\n".join(parts)


def problems(sections: Sections, marks: Marks, written: str) -> list[str]:
    """Return what does not fit together: promises without a test, unknown ids, a stale page."""
    known = {name for key, section in sections.items() for name, _ in _promises(key, section)}
    found = [f"promise {each} has no test" for each in sorted(known - marks.keys())]
    found += [
        f"{test} names the unknown promise {each}"
        for each in sorted(marks.keys() - known)
        for test in marks[each]
    ]
    if written != page(sections, marks):
        found.append("docs/promises.md is stale: run `python -m tests.support.promises --write`")
    return found


def _promises(key: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, text in section["promises"].items():
        yield f"{key}.{name}", text


def _short(test: str) -> str:
    return test.removeprefix("tests/")


def main(arguments: list[str]) -> int:
    sections, marks = load(), find_marks()
    if "--write" in arguments:
        PAGE.write_text(page(sections, marks))
    found = problems(sections, marks, PAGE.read_text() if PAGE.exists() else "")
    tests = {test for held in marks.values() for test in held}
    print(*found, f"{len(marks)} promises, {len(tests)} tests that hold them", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
