"""Placing a version's tensors into a model, all of them in one step of the event loop.

(tests/unit/training/test_placing.py)
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .holds import Holds
from .shards import Box, is_dtensor, local, slice_of

Into = nn.Module | Mapping[str, Tensor] | Callable[[Any], object] | None
"""The place of versions: a module, a dict of tensors, or a function that is called with each."""


def needed_by(into: Into) -> dict[str, Box]:
    """Return the slices that DTensors need, by the names of their tensors in a version."""
    if not isinstance(into, nn.Module | Mapping):
        return {}
    state = into.state_dict(keep_vars=True) if isinstance(into, nn.Module) else into
    return {f"[{name!r}]": slice_of(each).box for name, each in state.items() if is_dtensor(each)}


def place(tree: Any, into: Into, *, copy: bool = False) -> None:
    """Put a version into its place, with `copy` in its memory, or raise and change nothing."""
    if into is None:
        return
    if isinstance(into, nn.Module):
        state = into.state_dict(keep_vars=True)
        if all(isinstance(each, Tensor) for each in state.values()):
            _assign(tree, state, copy=copy)
        else:
            into.load_state_dict(tree)
    elif isinstance(into, Mapping):
        _assign(tree, into, copy=copy)
    else:
        into(tree)


def _assign(tree: Any, targets: Mapping[str, Any], *, copy: bool) -> None:
    if not isinstance(tree, Mapping):
        kind = type(tree).__name__
        raise ValueError(f"`into` takes dicts of tensors, such as a state dict, got {kind}")
    if tree.keys() != targets.keys():
        names = _difference(tree, targets)
        raise ValueError(f"the version and `into` have different names: {names}")
    with torch.no_grad():
        for name, given in targets.items():
            if tree[name].shape != local(given).shape:
                shapes = f"{tuple(tree[name].shape)} in the version, {tuple(given.shape)} in `into`"
                raise ValueError(f"{name!r} has the shape {shapes}")
        pairs = [(name, each, local(each), tree[name]) for name, each in targets.items()]
        copied = {name for name, *given in pairs if copy or _is_copied(*given)}
        for name, _, target, _ in pairs:
            if name in copied and target.dim() and 0 in target.stride() and target.numel() > 1:
                raise ValueError(f"{name!r} of `into` is expanded: nothing can be copied into it")
        for name, _, target, value in pairs:
            # The version's own memory, where it fits: nothing is copied, and an earlier graph that
            # refers to the old tensor stays valid.
            if name not in copied:
                target.data = value
            else:  # torch notices if an earlier graph needs the old values, unless it cannot
                (target.data if target.is_inference() else target).copy_(value)


def _is_copied(given: Any, target: Tensor, value: Tensor) -> bool:
    """Return whether the memory that is there stays: a DTensor's, or one that is shared."""
    is_same = value.dtype == target.dtype and value.device == target.device
    return not is_same or target is not given or (target.is_cpu and target.is_shared())


def _difference(tree: Mapping[str, Any], targets: Mapping[str, Any]) -> str:
    """Return the names that one of both lacks, and the remedy."""
    missing, more = targets.keys() - tree.keys(), tree.keys() - targets.keys()
    sides = [("the version", missing), ("`into`", more)]
    lacks = [f"{who} lacks {', '.join(sorted(map(str, each)))}" for who, each in sides if each]
    names = targets.keys()
    if parts := [
        k for k, part in tree.items() if isinstance(part, Mapping) and part.keys() == names
    ]:
        remedy = f"for a part, into=lambda tree: model.load_state_dict(tree[{parts[0]!r}])"
    else:
        remedy = "if several workers publish parts of it, name all, as in follow(name, on=[...])"
    return "; ".join([*lacks, remedy])


class _Entered(threading.local):
    """The holds that forwards in this thread have entered, the innermost last."""

    def __init__(self) -> None:
        self.holds: list[contextlib.AbstractContextManager[None]] = []


class ForwardHolds:
    """Hooks of a module: a forward in a thread sees one version from its start to its end.

    On the event loop a forward is one step, in which no version changes.
    """

    def __init__(self, module: nn.Module, holds: Holds) -> None:
        self._holds = holds
        self._loop_thread = threading.get_ident()
        self._entered = _Entered()
        self._running: dict[Any, tuple[int, FrameType]] = {}  # thread and frame of each hold
        holds.on_patience = self._end_interrupted
        before = module.register_forward_pre_hook(self._begin)
        after = module.register_forward_hook(self._end, always_call=True)
        self._hooks = before, after

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        if threading.get_ident() != self._loop_thread:
            self._entered.holds[:] = [e for e in self._entered.holds if e in self._running]
            hold = self._holds.in_thread()
            hold.__enter__()
            self._running[hold] = threading.get_ident(), sys._getframe(1)
            self._entered.holds.append(hold)

    def _end(self, *_: Any) -> None:
        if threading.get_ident() != self._loop_thread and (holds := self._entered.holds):
            self._leave(holds.pop())

    def _leave(self, hold: contextlib.AbstractContextManager[None]) -> None:
        if self._running.pop(hold, None) is not None:
            hold.__exit__(None, None, None)

    def _end_interrupted(self) -> None:
        """End the holds of forwards that a Ctrl-C has ended: torch calls no hook then."""
        stacks = sys._current_frames()
        for hold, (thread, frame) in [*self._running.items()]:
            each = stacks.get(thread)
            while each is not None and each is not frame:
                each = each.f_back
            if each is None:
                self._leave(hold)
