"""Checks of numbers given as arguments, also of NumPy's.

(tests/unit/training/test_numbers.py)
"""

import numbers


def is_count(value: object, least: int = 0) -> bool:
    """Return whether a value is a whole number from `least` on."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and value >= least  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Return whether a value can be compared with numbers."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
