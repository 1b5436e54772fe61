"""The restarts of the children of one world: how many are left, and how long each one waits."""

FIRST_PAUSE = 0.1  # seconds before the second restart in a row; it doubles from one to the next
LONGEST_PAUSE = 30.0
STABLE = 10.0  # seconds in its world after which the end of a process is no further one in a row


class Restarts:
    """A number of restarts. A process that fails again and again waits longer each time."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._in_a_row: dict[str, int] = {}

    def take(self, name: str, lived: float) -> float | None:
        """Return the seconds before the next restart of a worker; None if no restart is left.

        Args:
            name: name of the worker.
            lived: seconds that its last process was in the world.
        """
        if not self.left:
            return None
        self.left -= 1
        before = 0 if lived >= STABLE else self._in_a_row.get(name, 0)
        self._in_a_row[name] = before + 1
        # The exponent is bounded: a float overflows at 1,024.
        return min(FIRST_PAUSE * 2.0 ** min(before - 1, 20), LONGEST_PAUSE) if before else 0.0
