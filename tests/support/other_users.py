"""Connections of another user of this machine."""

import subprocess
import sys

NOBODY = 65534
_PROGRAM = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as connected:
    connected.connect("\\0" + sys.argv[2])
    print(connected.recv(1))
"""


def first_byte(name: str, user: int = NOBODY) -> str:
    """Return the `repr` of what another user gets at an abstract socket. Only for root.

    In a process of its own: a server in another thread compares with the user of this process.
    """
    words = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(user), name]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
