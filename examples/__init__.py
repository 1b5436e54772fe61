"""Programs as coroutines. Each runs alone: `python -m examples.cartpole`."""

import os
import signal
import sys

# The networks are small and the processes share the cores, so torch gets one thread in each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if sys.argv[:1] == ["-m"]:
    # `python -m` imports this before the program. Ctrl-C ends the process at once, also while it
    # imports. Workers that it started end when it has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
