"""The shared memory that a process has open or mapped."""

import os


def open_segments(pid: int | str = "self") -> int:
    """Return the number of descriptors that lead to a segment."""
    folder, found = f"/proc/{pid}/fd", 0
    for each in os.listdir(folder):
        try:
            found += "memfd:aiorpc" in os.readlink(f"{folder}/{each}")
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def mapped_segments(pid: int | str = "self") -> int:
    """Return the number of mappings of segments."""
    with open(f"/proc/{pid}/maps") as file:
        return sum("memfd:aiorpc" in line for line in file)
