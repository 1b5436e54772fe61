"""Messages as bytes: MessagePack of numbers, text, bytes and sequences of them.

A reader declares the types of a message. What it does is bounded by the length of the bytes: it
allocates nothing for what they only declare, refuses depth, and runs no code of users.

Not pickle: a few bytes of it reserve a gigabyte for its memo, and 100,000 nested lists end the
interpreter. (tests/unit/wire/test_plain.py)
"""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import msgpack

dump: Callable[[Any], bytes] = msgpack.Encoder().encode
"""Return the bytes of plain values. A tuple is read as what its reader declares, else as a list.

Raises:
    UnicodeEncodeError: for text with surrogates; see `wire_text`.
    OverflowError: for an int beyond 64 bits.
    TypeError: for any other class.
"""

MIN_INT, MAX_INT = -(2**63), 2**64 - 1


def reader(kind: Any) -> Callable[[bytes], Any]:
    """Return the function that reads messages of a type; it raises ValueError for any other.

    It raises RecursionError for values that are nested deeper than Python's recursion limit.
    """
    return msgpack.Decoder(kind).decode


def is_wire_text(text: str) -> bool:
    """Return whether a message can hold this text: it has no surrogates."""
    if text.isascii():  # does not read the text
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def are_plain_names(names: Iterable[Any]) -> bool:
    """Return whether a message can hold these names: not a str enum, for one."""
    return all(type(each) is str and is_wire_text(each) for each in names)


def wire_text(text: str) -> str:
    """Return the text with surrogates escaped, as in the name of a file that is not UTF-8."""
    return text if is_wire_text(text) else text.encode(errors="backslashreplace").decode()
