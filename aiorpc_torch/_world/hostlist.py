"""Slurm's lists of hosts: `node[03-05,9],gpu1` means node03, node04, node05, node9 and gpu1."""

import itertools
import re
from collections.abc import Iterator

_NUMBERS = r"[0-9]+(?:-[0-9]+)?"
_BRACKET = re.compile(rf"\[({_NUMBERS}(?:,{_NUMBERS})*)\]")
_HOST = re.compile(rf"(?:[^\s\[\],]|{_BRACKET.pattern})+")
_LIST = re.compile(rf"{_HOST.pattern}(?:,{_HOST.pattern})*")


def expand_hosts(text: str) -> Iterator[str]:
    """Return the names of the hosts, in Slurm's order: of several brackets the last runs fastest.

    Raises:
        ValueError: if `text` is not a list of hosts.
    """
    if not _LIST.fullmatch(text) or not all(map(_is_ascending, _BRACKET.findall(text))):
        raise ValueError(f"must be a list of hosts such as node[03-05,9],gpu1, got {text!r}")
    names = (match[0] for match in _HOST.finditer(text))
    return itertools.chain.from_iterable(map(_expand, names))


def _is_ascending(numbers: str) -> bool:
    return all(first <= last for first, last, _ in _ranges(numbers))


def _ranges(numbers: str) -> Iterator[tuple[int, int, int]]:
    """Yield first and last number, and width, of the ranges in a bracket."""
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        yield int(first), int(last or first), len(first)


def _expand(host: str) -> Iterator[str]:
    """Yield lazily: a range may be far longer than what its reader needs."""
    bracket = _BRACKET.search(host)
    if bracket is None:
        yield host
        return
    for first, last, width in _ranges(bracket[1]):
        for number in range(first, last + 1):
            for rest in _expand(host[bracket.end() :]):
                yield f"{host[: bracket.start()]}{number:0{width}}{rest}"
