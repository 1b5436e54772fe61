"""Code that travels by value keeps its place: the file, or the cell of a notebook, and its lines.

cloudpickle names every file `<dynamic-code>`, which no traceback and no look at a running call can
show.
"""

import contextlib
import linecache
import os
import sys
from types import CodeType
from typing import Any

MAX_SOURCE = 256 * 1024
"""Maximum characters of a text of which code is sent with its lines."""


def reduce_code(code: CodeType, args: tuple[Any, ...]) -> Any:
    """Return the reduction of code object `code`, given cloudpickle's arguments of `CodeType`."""
    file = code.co_filename
    source = ""
    if not os.path.exists(file):  # the peer cannot read it either
        source = "".join(linecache.getlines(file))
        if len(source) > MAX_SOURCE:
            source = ""
    return restore_code, (args, _shown(file), sys.intern(source))  # once in each pickle


def _shown(file: str) -> str:
    """Return a file's name as it is read: `Cell In[5]` for that of a notebook's cell."""
    with contextlib.suppress(Exception):  # IPython is not here, or of another version
        shell = sys.modules["IPython"].get_ipython()
        if found := shell.compile.format_code_name(file):
            return " ".join(found)
    return file


def restore_code(args: tuple[Any, ...], file: str, source: str) -> CodeType:
    """Return the code, whose lines are known from now on."""
    if source:
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return CodeType(*args).replace(co_filename=file)
