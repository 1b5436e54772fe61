"""Modules compiled in place that are older than their sources. (tests/unit/test_compiled.py)"""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

SUFFIX = EXTENSION_SUFFIXES[0]  # of this interpreter: others do not load the rest


def stale_extensions(package: Path) -> list[Path]:
    """Return the extension modules below a folder whose source is newer, or gone."""
    return [path for path in package.rglob(f"*{SUFFIX}") if is_stale(path)]


def is_stale(extension: Path) -> bool:
    source = extension.with_name(extension.name.removesuffix(SUFFIX) + ".py")
    return not source.exists() or source.stat().st_mtime > extension.stat().st_mtime
