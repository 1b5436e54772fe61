"""Equality of values that hold arrays and tensors: elements, classes and flags."""

from typing import Any

import numpy as np
import torch


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same in all that a receiver can see."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        flags = ("writeable", "c_contiguous", "f_contiguous")
        same_flags = all(getattr(one.flags, each) == getattr(other.flags, each) for each in flags)
        is_packed = other.flags.c_contiguous or other.flags.f_contiguous
        same = one.dtype == other.dtype and one.shape == other.shape
        if isinstance(one, np.ma.MaskedArray):  # `==` of what is masked is masked
            masks = np.ma.getmaskarray(one), np.ma.getmaskarray(other)
            return same and np.array_equal(*masks) and np.array_equal(one.data, other.data)
        if one.dtype.hasobject:
            return same and bool(np.all(one == other))
        return same and (same_flags or not is_packed) and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, memoryview):
        kind = (one.format, one.shape, one.readonly) == (other.format, other.shape, other.readonly)
        return kind and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(are_equal, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)
