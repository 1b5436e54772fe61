"""How long does a learner take that comes back with what its followers hold?

A follower is on the first host; the learner is on the same one, or on the second. The learner's
process is killed and started again: the times are from the start of the new process, with the
import of torch, and from its entry. Namespaces of this machine play the hosts. Needs root on Linux.

    python -m benchmarks.recovery [--quick] [--repeat N] [--megabytes N]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from ._compare import parse
from ._hosts import Host, hosts

MODULE = "benchmarks._recovery_side"


def read(process: "subprocess.Popen[str]") -> dict[str, float]:
    """Return what a process tells next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process has ended with {process.wait()}")
    found: dict[str, float] = json.loads(line)
    return found


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill a process of a host: `nsenter` is its parent."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    process.wait()


def run(keeper: Host, learner: Host, given: argparse.Namespace) -> list[dict[str, float]]:
    """Return the seconds of each recovery."""
    found = list[dict[str, float]]()
    words = (str(given.megabytes), f"tcp://{keeper.address}:29513")
    holding = keeper.start(MODULE, "follower", *words, stdout=subprocess.PIPE)
    learning = learner.start(MODULE, "learner", *words, stdout=subprocess.PIPE)
    try:
        read(learning)
        read(holding)  # it holds the first version
        for _ in range(given.repeat):
            kill(learning)
            begun = time.monotonic()
            learning = learner.start(MODULE, "learner", *words, stdout=subprocess.PIPE)
            told = read(learning)
            found.append(told | {"from the start of its process": time.monotonic() - begun})
    finally:
        kill(learning)
        kill(holding)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    given = parse(parser)
    if given.quick:
        given.megabytes = 50
    with hosts() as machines:
        for name, learner in zip(("one host", "two hosts"), machines, strict=True):
            times = run(machines[0], learner, given)
            for what in times[0]:
                each = [one[what] for one in times]
                print(f"{name:<9} {what:<34} {median(each):6.2f} s  (at most {max(each):.2f})")


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as exc:
        reason = getattr(exc, "stderr", b"") or str(exc)
        print(f"no network namespaces here, nothing was measured: {reason!r}")
        sys.exit(0)
