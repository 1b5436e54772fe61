"""Source files as syntax trees."""

import ast
import gc
from pathlib import Path


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file.

    Without garbage collections: a finalizer that compiles, as one that formats a traceback does,
    ends CPython 3.11 with "AST constructor recursion depth mismatch".
    """
    text = path.read_text()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
