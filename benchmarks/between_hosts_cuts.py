"""Are memory, descriptors, tasks and threads flat after many cuts of the connections of two hosts?

The workers call each other: small calls, tensors, streams, and one follows the weights of the
other. What is between ends their connections, in turn: it resets those of one end, or of the other,
answers packets with a reset, or takes the cable away for a moment. After each cut every kind of
call must work again. The exit code is 1 if it does not, or if something grows. Needs root on Linux.

With `--silent` nothing ends the connections, and packets are dropped: those of one connection, both
ways or one way, then all of the cable for a while. It prints how soon calls work again.

    python -m benchmarks.between_hosts_cuts [--quick] [--cuts N] [--silent]
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from statistics import median
from typing import Any

from ._between_hosts_cuts_side import INIT
from ._compare import lay_out
from ._hosts import LINK, Host, hosts
from ._process import use_one_arena
from ._soak_end import end, parse_sizes

SIDE = "benchmarks._between_hosts_cuts_side"
SHORT = 0.1  # seconds for which packets are refused, or the cable is away
SAMPLES = 4  # after the first
SPARE = 4  # of each that come and go: what has ended is dropped when the next one ends
GROWTH = 2_000  # kB that the second half of the cuts may add to a process

# Not `objects`, Python's blocks. No cut ends the connection of "main" to itself, which remembers
# the numbers of up to 4096 results with tensors and up to 256 heads of calls: some 20 blocks a cut.
COUNTS = ("descriptors", "tasks", "threads", "connections", "watches", "sessions", "ended")


DROP, RESET = ("-j", "DROP"), ("-j", "REJECT", "--reject-with", "tcp-reset")
WAYS = {
    "to the other": [["OUTPUT", "-o", LINK]],
    "from the other": [["INPUT", "-i", LINK]],
    "both ways": [["OUTPUT", "-o", LINK], ["INPUT", "-i", LINK]],
}
OWN = {"OUTPUT": "sport", "INPUT": "dport"}  # the port of this end
SILENT = {1.0: 9, 10.0: 5, 100.0: 2}  # seconds for which all packets are dropped: times


class Ways:
    """The ways to cut the connections at these ports."""

    def __init__(self, both: list[Host], ports: list[int]) -> None:
        self._both, self._ports = both, ports

    def reset_here(self) -> None:
        self._reset(self._both[0], self._ports)

    def reset_there(self) -> None:
        self._reset(self._both[1], self._ports)

    def reset_directory(self) -> None:
        self._reset(self._both[1], [int(INIT.rpartition(":")[2])])

    def refuse(self) -> None:
        """Answer packets with a reset, as a firewall that has forgotten the connections."""
        ports = ["-m", "multiport", "--ports", ",".join(map(str, self._ports))]
        rule = ["INPUT", "-p", "tcp", *ports]
        with contextlib.ExitStack() as stack:
            for host in self._both:
                stack.enter_context(filtering(host, rule, verdict=RESET))
            time.sleep(SHORT)

    def unplug(self) -> None:
        self._both[0].plug(is_up=False)
        time.sleep(SHORT)
        self._both[0].plug(is_up=True)

    def _reset(self, host: Host, ports: list[int]) -> None:
        for each in ports:
            host.run("ss", "-K", "state", "established", f"( sport = :{each} or dport = :{each} )")


@contextlib.contextmanager
def filtering(host: Host, *rules: list[str], verdict: Sequence[str] = DROP) -> Iterator[None]:
    """Let iptables drop packets on a host, or deal with them otherwise."""
    for each in rules:
        host.run("iptables", "-A", *each, *verdict)
    try:
        yield
    finally:
        for each in rules:
            host.run("iptables", "-D", *each, *verdict)


def ask(process: "subprocess.Popen[str]", line: str) -> Any:
    """Return what worker "main" answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main(given: argparse.Namespace) -> list[str]:
    """Cut the connections; return what is wrong."""
    use_one_arena()
    pipe = subprocess.PIPE
    with hosts() as both:
        processes = [
            both[0].start(SIDE, "0", stdin=pipe, stdout=pipe),
            both[1].start(SIDE, "1"),
        ]
        try:
            if given.silent:
                silence(both[0], processes[0], is_quick=given.quick)
                return []
            return cut(both, processes[0], given.cuts)
        finally:
            for each in processes:
                each.kill()
                each.wait()


def cut(both: list[Host], main: "subprocess.Popen[str]", cuts: int) -> list[str]:
    ways = Ways(both, ask(main, "ports"))
    kinds: list[Callable[[], None]] = [
        ways.reset_here,
        ways.reset_there,
        ways.refuse,
        ways.unplug,
        ways.reset_directory,
    ]
    taken: dict[str, list[float]] = {each.__name__: [] for each in kinds}
    samples, next_kind = [], cycle(kinds)
    ask(main, "on")
    for number in range(-len(kinds), cuts + 1):  # the first ones warm it up
        if number >= 0 and number * SAMPLES % cuts == 0:
            samples.append(ask(main, "sample"))
            print(f"cut {number}: {samples[-1]}", flush=True)
            ask(main, "on")
        kind = next(next_kind)
        kind()
        begin = time.monotonic()
        ask(main, "wait")
        taken[kind.__name__].append(time.monotonic() - begin)
    done, lost, version = ask(main, "end")
    print(f"\ncalls of main {done}, version {version}; lost {lost}\n")
    rows = [
        (kind, str(len(each)), f"{median(each):.3f}", f"{max(each):.3f}")
        for kind, each in taken.items()
    ]
    lay_out([("cut", "times", "s until all kinds of calls work: median", "longest"), *rows])
    return grown(samples)


def silence(host: Host, main: "subprocess.Popen[str]", *, is_quick: bool) -> None:
    """Drop packets, and print how soon calls work again."""
    number = ask(main, "ports")[-1]
    ask(main, "on")
    ask(main, "wait")
    found: dict[str, list[tuple[float, float]]] = {}

    def measure(what: str) -> None:
        found.setdefault(what, []).append(ask(main, "wait"))
        print(f"{what}: {found[what][-1]}", flush=True)

    for _ in range(2 if is_quick else 7):
        for what in ("calls", "tensors"):
            for way, chains in WAYS.items():
                own = port(host, number, ask(main, "calls"), is_calls=what == "calls")
                rules = [[*each, "-p", "tcp", f"--{OWN[each[0]]}", str(own)] for each in chains]
                with filtering(host, *rules):
                    measure(f"a connection for {what} is lost, {way}")
    for seconds, times in {1.0: 2}.items() if is_quick else SILENT.items():
        for _ in range(times):
            with filtering(host, *WAYS["both ways"]):
                time.sleep(seconds)
            measure(f"the cable is whole after {seconds:g} s")
    rows = []
    for what, each in found.items():
        columns = zip(*each, strict=True)
        cells = [f"{how(column):.2f}" for column in columns for how in (median, max)]
        rows.append((what, str(len(each)), *cells))
    lay_out([("s until calls work", "times", "main", "longest", "all", "longest"), *rows])
    done, lost, version = ask(main, "end")
    print(f"\ncalls of main {done}, version {version}; lost {lost}\n")


def port(host: Host, number: int, calls: int, *, is_calls: bool) -> int:
    """Return the port of main's end of a connection to the other worker's port."""
    if is_calls:
        return calls
    words = host.inside("ss", "-Htn", "state", "established", "dport", f"= :{number}")
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    ports = [int(each.split()[2].rpartition(":")[2]) for each in lines]
    return next(each for each in ports if each != calls)


def grown(samples: list[list[dict[str, int]]]) -> list[str]:
    """Return what has grown."""
    problems = []
    for side, name in enumerate(("main", "peer")):
        first, *_, last = found = [each[side] for each in samples]
        problems += [
            f"{name}: {first[key]} {key} have become {last[key]}"
            for key in COUNTS
            if last[key] > first[key] + SPARE
        ]
        if (more := last["kB"] - found[len(found) // 2]["kB"]) > GROWTH:
            problems.append(f"{name}: the second half added {more} kB")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="20 cuts")
    parser.add_argument("--cuts", type=int, metavar="N", help="number of cuts (200)")
    parser.add_argument("--silent", action="store_true", help="packets are dropped")
    try:
        found = main(parse_sizes(parser, cuts=(20, 200)))
    except (OSError, subprocess.CalledProcessError) as exc:
        reason = getattr(exc, "stderr", b"") or str(exc)
        print(f"no network namespaces here, nothing was tested: {reason!r}")
        sys.exit(0)
    end(found)
