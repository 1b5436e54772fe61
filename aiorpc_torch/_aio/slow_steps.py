"""Warnings of steps that block an event loop: one a minute for each method, with their number."""

import logging
from dataclasses import dataclass

from .._text import printable

log = logging.getLogger("aiorpc_torch")

INTERVAL = 60.0  # seconds between two warnings of one method
MAX_NAMES = 1024  # methods that are remembered


@dataclass(slots=True)
class _Method:
    """The slow steps of one method: `steps` and `seconds` since its last warning, and all."""

    warned: float
    steps: int = 0
    seconds: float = 0.0
    number: int = 0
    longest: float = 0.0


class SlowSteps:
    """The slow steps of all methods. In any thread: a race costs or doubles one warning."""

    def __init__(self) -> None:
        self._methods: dict[str, _Method] = {}

    def note(self, name: str, seconds: float, now: float) -> None:
        """Log a slow step that ended at time `now`, or count it for a later warning."""
        method = self._methods.get(name)
        if method is None:
            if len(self._methods) >= MAX_NAMES:
                self._methods.clear()
            method = self._methods[name] = _Method(now - INTERVAL)
        method.number += 1
        method.longest = max(method.longest, seconds)
        if now - method.warned < INTERVAL:
            method.steps += 1
            method.seconds += seconds
            return
        more = f"; {method.steps} more steps of it, {method.seconds:.2f} s in all, were not logged"
        log.warning(
            "%s held the event loop for %.2f s: nothing else was served meanwhile. "
            "A plain `def` would run in a thread%s",
            printable(name),
            seconds,
            more if method.steps else "",
        )
        method.warned, method.steps, method.seconds = now, 0, 0.0

    def counts(self) -> dict[str, tuple[int, float]]:
        """Return the number of slow steps and the seconds of the longest, by method."""
        return {name: (each.number, each.longest) for name, each in [*self._methods.items()]}


slow_steps = SlowSteps()
"""Those of this process."""

note_slow_step = slow_steps.note
"""Log or count a slow step of this process."""
