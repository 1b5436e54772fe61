"""How fast do CPU tensors travel between hosts, and what do small calls beside them cost?

Two network namespaces with a cable play two hosts. Each process has namespaces for processes and
IPC too, or torch would copy from one to the other. This library and plain torch take turns, each
in processes of its own. Needs root on Linux.

    python -m benchmarks.between_hosts [--quick] [--repeat N]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from statistics import median

from ._compare import Row, Runs, parse, show
from ._namespaces import ip, keeper, path

SIZES = [64 << 10, 256 << 10, 1 << 20, 16 << 20, 128 << 20, 256 << 20]  # bytes
ADDRESSES = ("10.94.7.1", "10.94.7.2")
LINK = "v0"
PATIENCE = 120.0  # seconds for one run of a side

Found = dict[str, list[float]]


@contextlib.contextmanager
def hosts() -> Iterator[list[str]]:
    """Make two network namespaces with a cable between them; return a path of each.

    Raises:
        OSError: if `unshare` is missing.
        subprocess.CalledProcessError: if they cannot be made.
    """
    with contextlib.ExitStack() as stack:
        keepers = [stack.enter_context(keeper()) for _ in ADDRESSES]
        one, other = map(path, keepers)
        veth = ("type", "veth", "peer", "name", LINK, "netns", str(keepers[1].pid))
        ip(one, "link", "add", LINK, *veth)
        for namespace, address in zip((one, other), ADDRESSES, strict=True):
            ip(namespace, "address", "add", f"{address}/24", "dev", LINK)
            for device in ("lo", LINK):
                ip(namespace, "link", "set", device, "up")
        yield [one, other]


def run(side: str, namespaces: Sequence[str], sizes: Sequence[int], *, is_quick: bool) -> Found:
    """Run both ranks of one side; return the figures of rank 0."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TP_SOCKET_IFNAME": LINK,
        "GLOO_SOCKET_IFNAME": LINK,
    }
    processes = []
    for rank, namespace in enumerate(namespaces):
        words = ["nsenter", f"--net={namespace}", "unshare", "--pid", "--fork", "--kill-child"]
        words += ["--mount-proc", "--ipc", sys.executable, "-m", "benchmarks._between_hosts_side"]
        words += [side, str(rank), json.dumps(sizes), json.dumps(is_quick)]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(words, stdout=output, text=True, env=environment))
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
    mine = runs["ours"]
    idle, beside = ([1e6 * median(each[k]) for each in mine] for k in ("idle", "beside"))
    rows.append(Row("small call beside 128 MB; idle", "µs", Runs(beside, idle), "≤ 3"))
    lags = [1e3 * max(each["lag"]) for each in mine]
    usual = [1e3 * sorted(each["lag"])[len(each["lag"]) * 99 // 100] for each in mine]
    rows.append(Row("longest lag of the loop; 99 %", "ms", Runs(lags, usual), "5 ms"))
    return rows


def main(given: argparse.Namespace) -> list[Row]:
    sizes = SIZES[:4] if given.quick else SIZES
    runs: dict[str, list[Found]] = {"ours": [], "torch": []}
    with hosts() as namespaces:
        for _ in range(given.repeat):
            for side, found in runs.items():
                found.append(run(side, namespaces, sizes, is_quick=given.quick))
    return table(runs, sizes)


if __name__ == "__main__":
    given = parse(argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]))
    try:
        rows = main(given)
    except (OSError, subprocess.CalledProcessError) as exc:
        reason = getattr(exc, "stderr", b"") or str(exc)
        print(f"no network namespaces here, nothing was measured: {reason!r}")
        sys.exit(0)
    show(rows, other="torch, idle or 99 %")
