"""How fast is a parameter server whose eight trainers are on four hosts?

Four network namespaces at a switch play the hosts, each with two trainers; the server is on the
first one. In a round each trainer sends gradients, and gets the new parameters. This library and
the pattern of PyTorch's tutorial take turns, in processes of their own. Needs root on Linux.

    python -m benchmarks.parameter_server_hosts [--quick] [--repeat N]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from ._compare import Row, Runs, parse, show
from ._hosts import Host, hosts
from ._parameter_server_hosts_side import TRAINERS, WARM_UP

HOSTS = 4
SIZES = [64 << 10, 1 << 20, 4 << 20]  # floats of the model
ROUNDS = 12
PATIENCE = 120.0  # seconds for one run of a side


def run(side: str, machines: Sequence[Host], rounds: int, size: int) -> float:
    """Return the median of the milliseconds of a round."""
    module, words = "benchmarks._parameter_server_hosts_side", [str(rounds + WARM_UP), str(size)]
    where = [machines[0], *(machines[each % HOSTS] for each in range(TRAINERS))]
    processes = [
        host.start(module, side, str(rank), *words, stdout=None if rank else subprocess.PIPE)
        for rank, host in enumerate(where)
    ]
    try:
        written, _ = processes[0].communicate(timeout=PATIENCE)
        for each in processes:
            each.wait(PATIENCE)
    finally:
        for each in processes:
            each.kill()
            each.wait()
    return 1e3 * float(median(json.loads(written.splitlines()[-1])))


def main(given: argparse.Namespace) -> list[Row]:
    rows, sizes, rounds = [], SIZES[:2] if given.quick else SIZES, 4 if given.quick else ROUNDS
    with hosts(HOSTS) as machines:
        for size in sizes:
            runs: dict[str, list[float]] = {"ours": [], "torch": []}
            for _ in range(given.repeat):
                for side, found in runs.items():
                    found.append(run(side, machines, rounds, size))
            what = f"a round, a model of {4 * size / (1 << 20):g} MB"
            rows.append(Row(what, "ms", Runs(*runs.values())))
    return rows


if __name__ == "__main__":
    try:
        rows = main(parse(argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])))
    except (OSError, subprocess.CalledProcessError) as exc:
        reason = getattr(exc, "stderr", b"") or str(exc)
        print(f"no network namespaces here, nothing was measured: {reason!r}")
        sys.exit(0)
    show(rows, other="torch")
