"""How fast do CPU tensors travel between hosts, and what do small calls beside them cost?

Two network namespaces with a cable play two hosts. Each has namespaces for processes and IPC too,
or torch would copy from one to the other. This library and plain torch take turns, each in
processes of its own. Needs root on Linux.

    python -m benchmarks.between_hosts [--quick] [--repeat N] [--tc] [--against PATH]

With `--tc` the cable has 10 Gbit/s, and 1 ms each way where the kernel can delay packets (netem).
`--against` is the root of another checkout of this project, which takes torch's place.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ._compare import Row, Runs, parse, show
from ._hosts import HERE, Host, hosts

SIZES = [64 << 10, 256 << 10, 1 << 20, 16 << 20, 128 << 20, 256 << 20]  # bytes
PATIENCE = 120.0  # seconds for one run of a side

Found = dict[str, list[float]]


def run(
    side: str, source: Path, both: Sequence[Host], sizes: Sequence[int], *, is_quick: bool
) -> Found:
    """Run both ranks of one side, with a checkout's source; return the figures of rank 0."""
    words = [json.dumps(sizes), json.dumps(is_quick)]
    module, pipe = "benchmarks._between_hosts_side", subprocess.PIPE
    processes = [
        host.start(
            module, side, str(rank), *words, source=source, stdout=pipe if rank == 0 else None
        )
        for rank, host in enumerate(both)
    ]
    try:
        written, _ = processes[0].communicate(timeout=PATIENCE)
        processes[1].wait(PATIENCE)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found: Found = json.loads(written.splitlines()[-1])
    return found


def table(runs: dict[str, list[Found]], sizes: Sequence[int]) -> list[Row]:
    """Return the rows: rates, CPU a GB, small calls beside transfers, lag."""
    rows = []
    for size in sizes:
        name = f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KiB"
        for what, times in (("one way", 1), ("both ways", 2)):
            key, aim = f"{what} {size}", "≥ 2" if what == "one way" and size >= 16 << 20 else ""
            rates = [[times * size / each[key][0] / 1e6 for each in runs[s]] for s in runs]
            rows.append(Row(f"{name}, {what}", "MB/s", Runs(*rates), aim))
            spent = [[each[f"{key} CPU"][0] for each in runs[s]] for s in runs]
            rows.append(Row(f"{name}, {what}: CPU a GB", "s", Runs(*spent)))
        if all(f"array {size}" in each for found in runs.values() for each in found):
            rates = [[size / each[f"array {size}"][0] / 1e6 for each in runs[s]] for s in runs]
            rows.append(Row(f"{name} as an array, one way", "MB/s", Runs(*rates)))
    for key in ("gradients one way", "gradients both ways"):
        durations = [[1e3 * each[key][0] for each in runs[side]] for side in runs]
        rows.append(Row(f"ResNet-50's {key}, 102 MB", "ms", Runs(*durations)))
    for side, mine in runs.items():
        if "idle" in mine[0]:
            idle, beside = ([1e6 * median(each[k]) for each in mine] for k in ("idle", "beside"))
            what = "small call beside 128 MB; idle"
            rows.append(
                Row(what if side == "ours" else f"{side}: {what}", "µs", Runs(beside, idle), "≤ 3")
            )
    mine = runs["ours"]
    lags = [1e3 * max(each["lag"]) for each in mine]
    usual = [1e3 * sorted(each["lag"])[len(each["lag"]) * 99 // 100] for each in mine]
    rows.append(Row("longest lag of the loop; 99 %", "ms", Runs(lags, usual), "5 ms"))
    return rows


def main(given: argparse.Namespace) -> list[Row]:
    sizes = SIZES[:4] if given.quick else SIZES
    other = "other" if given.against else "torch"
    beside = ("ours", given.against.resolve()) if given.against else ("torch", HERE)
    sides: dict[str, tuple[str, Path]] = {"ours": ("ours", HERE), other: beside}
    runs: dict[str, list[Found]] = {name: [] for name in sides}
    with hosts() as both:
        if given.tc:
            print(shape(both))
        for _ in range(given.repeat):
            for name, found in runs.items():
                side, source = sides[name]
                found.append(run(side, source, both, sizes, is_quick=given.quick))
    return table(runs, sizes)


def shape(both: Sequence[Host]) -> str:
    """Make a slower cable; return a line that describes it."""
    try:
        for host in both:
            host.shape("netem", "delay", "1ms", "rate", "10gbit", "limit", "100000")
    except subprocess.CalledProcessError:
        for host in both:
            host.shape("tbf", "rate", "10gbit", "burst", "4mb", "latency", "5ms")
        return "a cable of 10 Gbit/s; this kernel has no netem, so nothing is delayed"
    return "a cable of 10 Gbit/s and 1 ms each way"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tc", action="store_true", help="10 Gbit/s and 1 ms, where possible")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    given = parse(parser)
    try:
        rows = main(given)
    except (OSError, subprocess.CalledProcessError) as exc:
        reason = getattr(exc, "stderr", b"") or str(exc)
        print(f"no network namespaces here, nothing was measured: {reason!r}")
        sys.exit(0)
    show(rows, other=f"{'other' if given.against else 'torch'}, idle or 99 %")
