"""Numbers as short text: at most five characters, for tables of 80 columns."""


def seconds(value: float | None) -> str:
    """Return a duration: "12µs", "1.2ms", "3.4s", "2m", "5h"; "-" for None."""
    if value is None:
        return "-"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if value < 999.5 * size:
            return f"{_digits(value / size)}{unit}"
    return f"{value / 60:.0f}m" if value < 3570 else f"{value / 3600:.0f}h"


def number(value: float | None) -> str:
    """Return a number: "0", "3.4", "312", "1.2k", "45M"; "-" for None."""
    if value is None:
        return "-"
    for unit, size in (("", 1.0), ("k", 1e3), ("M", 1e6)):
        if value < 999.5 * size:
            return f"{_digits(value / size)}{unit}"
    return f"{_digits(value / 1e9)}G"


def size(value: int) -> str:
    """Return a number of bytes: "312M", "1.2G"; "-" for 0."""
    return number(value) if value else "-"


def share(value: float | None) -> str:
    """Return a share in percent: "0%", "87%", "312%"; "-" for None."""
    return "-" if value is None else f"{min(999, 100 * value):.0f}%"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"
