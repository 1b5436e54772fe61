"""The list of modules to compile, and the check that none is stale."""

import os
import tomllib
from pathlib import Path

from tests.support.compiled import SUFFIX, stale_extensions

REPOSITORY = Path(__file__).parents[2]


def test_an_edited_or_removed_source_makes_its_extension_stale(tmp_path: Path) -> None:
    for name, source_time in (("older", 1), ("newer", 3), ("gone", None)):
        extension = tmp_path / f"{name}{SUFFIX}"
        extension.touch()
        os.utime(extension, (2, 2))
        if source_time is not None:
            source = tmp_path / f"{name}.py"
            source.touch()
            os.utime(source, (source_time, source_time))
    stale = {path.name.removesuffix(SUFFIX) for path in stale_extensions(tmp_path)}
    assert stale == {"newer", "gone"}


def test_every_listed_module_exists() -> None:
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    hook = config["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    assert all((REPOSITORY / path).is_file() for path in hook["modules"])
