"""Text of other processes, as a terminal or a log may show it. (tests/unit/test_text.py)

A name or a reason that another process has chosen may hold escape codes of terminals. It may hold
newlines that look like further lines of a log, or marks that reverse the direction of text.
"""

from typing import Any

LONGEST = 4096  # characters


def printable(text: str, limit: int = LONGEST) -> str:
    """Return one line of text; what is not printable is escaped as `repr` does it.

    Args:
        text: the text.
        limit: characters; the rest is cut off.
    """
    if len(text) <= limit and text.isprintable():
        return text
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text[:limit]
    )
    is_whole = len(text) <= limit and len(shown) <= limit
    return shown if is_whole else f"{shown[: limit - 1]}…"


def printable_parts(value: Any) -> Any:
    """Return a value of a message, with all text in its lists and dicts made printable."""
    if isinstance(value, str):
        return printable(value)
    if not value:
        return value
    if isinstance(value, list):
        return [*map(printable_parts, value)]
    if isinstance(value, dict):
        return {printable_parts(key): printable_parts(each) for key, each in value.items()}
    return value
