"""Code that travels by value keeps its place: the file, or the cell of a notebook, and its lines.

cloudpickle names every file `<dynamic-code>`, which no traceback and no look at a running call can
show.
"""

import contextlib
import functools
import io
import linecache
import os
import sys
from types import CodeType
from typing import Any

MAX_SOURCE = 256 * 1024
"""Maximum characters of a text of which code is sent with its lines."""


Sources = dict[str, tuple[str, str]]
"""For each file of code in one pickle: its name as it is read, and its text, "" for none."""


def reduce_code(code: CodeType, args: tuple[Any, ...], sources: Sources) -> Any:
    """Return the reduction of code object `code`, given cloudpickle's arguments of `CodeType`."""
    file = code.co_filename
    if (known := sources.get(file)) is None:  # a cell may have many functions
        known = sources[file] = _shown(file), _source(file)
    return restore_code, (args, *known)


def _source(file: str) -> str:
    """Return the text of a file that the peer cannot read, "" for others and for a long one."""
    source = "" if os.path.exists(file) else "".join(linecache.getlines(file))
    return source if len(source) <= MAX_SOURCE else ""


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
        linecache.cache[file] = len(source), None, _lines(source), file
    return CodeType(*args).replace(co_filename=file)


@functools.lru_cache(maxsize=4)  # every function of a cell has its text
def _lines(source: str) -> list[str]:
    return [*io.StringIO(source)]  # str.splitlines() ends a line at a form feed, too
