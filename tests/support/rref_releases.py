"""What torch does when the last RRef of an object goes, for later worlds of a process.

torch counts references in the first world of a process only.
"""

from aiorpc_torch._torch import rrefs


def release() -> None:
    """Release an object, as torch does when its last RRef goes."""
    rrefs._table.unpin()
