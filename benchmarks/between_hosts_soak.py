"""Are memory, threads and descriptors flat after transfers between hosts, and failures between?

A worker on one host and two on another call each other with tensors of random sizes, both ways, one
by one and as a group. In the middle of each round, in turn: a worker is killed and replaced, the
cable is cut for longer than peers bear, or made slow, or nothing happens. Every tensor is checked.
The exit code is 1 if a call ended wrongly or did not end, or if something is left. Needs root on
Linux.

    python -m benchmarks.between_hosts_soak [--quick] [--rounds N] [--messages N] [--seed N]
"""

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ._between_hosts_soak_side import SURVIVORS, WORKERS, Sample, left
from ._hosts import Host, hosts
from ._process import use_one_arena
from ._soak_end import end, parse_sizes

SIDE = "benchmarks._between_hosts_soak_side"
CUT = 4.0  # seconds, twice the heartbeat
SLOW = 2.0  # seconds with a slow cable
GROWTH = 8_000_000  # bytes that the second half of the rounds may add to a process
ENOUGH = 16  # rounds from which on growth exceeds noise
MB = 1_000_000


class Processes:
    """The workers on their hosts."""

    def __init__(self, both: list[Host], words: list[str]) -> None:
        self._both = both
        self._words = words
        pipe = subprocess.PIPE
        self.main = both[0].start(SIDE, "0", "main", *words, stdin=pipe, stdout=pipe)
        self.others = {name: self._start(name) for name in WORKERS[1:]}

    def _start(self, name: str) -> "tuple[subprocess.Popen[str], int]":
        words = [str(WORKERS.index(name)), name, *self._words]
        process = self._both[1].start(SIDE, *words, stdout=subprocess.PIPE)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())[1]

    def kill(self) -> None:
        """Kill worker "b" and start another process in its place."""
        process, pid = self.others["b"]
        self._both[1].run("kill", "-9", str(pid))
        process.wait()
        self.others["b"] = self._start("b")
        self.go_on()

    def cut(self) -> None:
        """Cut the cable for a while."""
        self._both[0].plug(is_up=False)
        time.sleep(CUT)
        self._both[0].plug(is_up=True)
        self.go_on()

    def slow(self) -> None:
        """Let the cable carry 200 Mbit/s for a while."""
        for host in self._both:
            host.shape("tbf", "rate", "200mbit", "burst", "1mb", "latency", "50ms")
        time.sleep(SLOW)
        for host in self._both:
            host.unshape()
        self.go_on()

    def go_on(self) -> None:
        """Tell the main worker that it is done."""
        assert self.main.stdin is not None
        self.main.stdin.write("\n")
        self.main.stdin.flush()

    def close(self) -> None:
        for process in (self.main, *(each for each, _ in self.others.values())):
            process.kill()
            process.wait()


def events(processes: Processes) -> Iterator[tuple[str, Any]]:
    """Yield what the main worker tells; do to the hosts what it asks for."""
    deeds: dict[str, Callable[[], None]] = {
        "kill": processes.kill,
        "cut": processes.cut,
        "slow": processes.slow,
        "none": processes.go_on,
    }
    assert processes.main.stdout is not None
    doing: list[threading.Thread] = []
    for line in processes.main.stdout:
        kind, value = json.loads(line)
        if kind in deeds:
            doing.append(threading.Thread(target=deeds[kind]))
            doing[-1].start()
        else:
            yield kind, value
    for each in doing:
        each.join()


def wrong(rests: Sequence[list[Sample]], rounds: int) -> Iterator[str]:
    """Yield what is left at rest, and what the second half of the rounds has added."""
    for number, worker in enumerate(WORKERS):
        was, *_, now = quarters = [each[number] for each in rests]
        middle = quarters[len(quarters) // 2]
        sizes = " → ".join(f"{each.memory / MB:.1f}" for each in quarters)
        print(f"{worker} at rest, before and after each quarter: {sizes} MB; {was} → {now}")
        yield from (f"{worker}: {each} are left" for each in left(now))
        is_survivor = worker in SURVIVORS
        for name in ("descriptors", "mapped", "pending") if is_survivor else ("pending",):
            if (more := getattr(now, name) - getattr(was, name)) > 0:
                yield f"{worker}: {more} {name} are left"
        size = now.memory - middle.memory
        if is_survivor and rounds >= ENOUGH and size > GROWTH:
            yield f"{worker}: the second half added {size / MB:.1f} MB"


def show(number: int, messages: int, size: int, losses: int, found: list[Sample]) -> None:
    cells = [f"{each.memory / MB:8.1f} {each.descriptors:5} {each.threads:3}" for each in found]
    line = "  ".join(cells[: len(SURVIVORS)])
    print(f"{number:5}  {messages:9,}  {size / 1e9:7.1f}  {losses:6,}  {line}", flush=True)


def main(given: argparse.Namespace) -> list[str]:
    """Run the soak; return its problems."""
    problems = ["it has not ended"]
    rests: list[list[Sample]] = []
    print(f"round   messages       GB    lost  {'; '.join(SURVIVORS)}: MB, descriptors, threads")
    words = [str(given.seed), str(given.rounds), str(given.messages)]
    use_one_arena()
    with hosts() as both, contextlib.closing(Processes(both, words)) as processes:
        for kind, value in events(processes):
            if kind == "round":
                number, messages, size, losses, found = value
                show(number, messages, size, losses, [Sample(*each) for each in found])
            elif kind == "rest":
                rests = [[Sample(*each) for each in samples] for samples in value]
            elif kind == "end":
                problems, transfers = value
                print(f"{transfers:,} messages of the main worker had transfers")
    if rests:
        problems += wrong(rests, given.rounds)
    return problems


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 rounds of 100 messages")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds (400)")
    parser.add_argument("--messages", type=int, metavar="N", help="messages of a round (1,000)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the clients (0)")
    return parse_sizes(parser, rounds=(4, 400), messages=(100, 1_000))


if __name__ == "__main__":
    try:
        found = main(arguments())
    except (OSError, subprocess.CalledProcessError) as exc:
        reason = getattr(exc, "stderr", b"") or str(exc)
        print(f"no network namespaces here, nothing was tested: {reason!r}")
        sys.exit(0)
    end(found)
