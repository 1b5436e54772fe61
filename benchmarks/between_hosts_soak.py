"""Does each call end once, and calls work again in time, whatever happens between hosts?

Worker "main" on one host, "a" and "b" on another, "c" on a third. "main" and "a" call all others at
once: small calls, tensors, streams, groups, and "main" follows weights of "a". Then a fault begins:
a flow is dropped, packets of more than 700 bytes are, connections are reset, a cable is cut or
slow, a worker is killed, the clock jumps, or a host returns with another address. Each call has its
result or an error that says whether it may have run, and workers count what they run. After each
fault a call of every kind to every worker has to work in time: `heartbeat` and 1 s after the loss
of a flow, else 2 s, times load for each processor. The faults are played between hosts with IPv4
addresses, and with IPv6 addresses alone; `--quick` plays half of them in each.

The exit code is 1 if a call ended wrongly or did not end, calls worked too late, or something is
left or grows. Needs root on Linux.

With `--port` each worker has one port, and "main" and "a" call each other by plain torch too.
Such a call has to work in the same time: what torch sends outlives the flows between the ports.

    python -m benchmarks.between_hosts_soak [--quick] [--rounds N] [--only WORD] [--seed N] [--port]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from ._between_hosts_soak_side import CALLERS, HEARTBEAT, WORKERS, is_busy
from ._compare import lay_out
from ._hosts import LINK, Host, hosts
from ._process import use_one_arena
from ._soak_end import end, parse_sizes

SIDE = "benchmarks._between_hosts_soak_side"
PORT = 29513
ONE_PORT = 29600  # of the first worker, with `--port`
HOSTS = {"main": 0, "a": 1, "b": 1, "c": 2}
HEALED = 2.0  # seconds until calls work after the end of a fault
LOST = HEARTBEAT + 1.0  # seconds until they do in spite of a flow that is dropped
IN_USE = 0.5  # seconds in which every flow is used
MTU = 700  # bytes of the largest packets that pass a black hole
PATIENCE = 60.0  # seconds until which workers have to leave
SPARE = 4  # of each that come and go: what has ended is dropped when the next one ends
PIPE = 20  # sockets of a connection of torch's to a worker that is replaced: it may be made, or not
GROWTH = 4_000  # kB that the second half of the rounds may add to a process
ENOUGH = 4  # rounds from which on growth exceeds noise
CHAINS = {
    "to the other": [["OUTPUT", "-o", LINK]],
    "from the other": [["INPUT", "-i", LINK]],
    "both ways": [["OUTPUT", "-o", LINK], ["INPUT", "-i", LINK]],
}
OWN = {"OUTPUT": "sport", "INPUT": "dport"}  # the port of this end


class World:
    """The workers on their hosts."""

    def __init__(self, made: list[Host], seed: int, *, has_one_port: bool = False) -> None:
        self.hosts = made
        address = f"[{made[0].address}]" if made[0].is_ipv6 else made[0].address
        self.has_one_port = has_one_port
        self._words = [f"tcp://{address}:{PORT}", str(seed)]
        self._words += [str(ONE_PORT)] if has_one_port else []
        self._processes: dict[str, tuple[subprocess.Popen[str], str]] = {}
        for each in WORKERS:
            self.start(each)
        for each in WORKERS:
            self.wait_until_in(each)
        for line in ("meet", "go", "wait"):
            self.ask(line)
        self.ports = self.ask("ports")

    def start(self, name: str) -> None:
        pipe = subprocess.PIPE
        host = self.hosts[HOSTS[name]]
        process = host.start(SIDE, name, *self._words, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        self._processes[name] = process, process.stdout.readline().strip()

    def wait_until_in(self, name: str) -> None:
        process, _ = self._processes[name]
        assert process.stdout is not None
        if process.stdout.readline() != "in\n":
            raise RuntimeError(f"{name} has not entered the world")

    def kill(self, name: str) -> None:
        process, pid = self._processes[name]
        self.hosts[HOSTS[name]].run("kill", "-9", pid)
        process.wait()

    def replace(self, name: str) -> None:
        """Start a process in the place of one that was killed, and let the others know it."""
        self.start(name)
        self.wait_until_in(name)
        self.ask(f"forget {name}")
        self.ask("meet")

    def ask(self, line: str) -> Any:
        """Return what worker "main" answers."""
        process, _ = self._processes["main"]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        if not (answer := process.stdout.readline()):
            raise RuntimeError(f'worker "main" has ended, asked for {line!r}')
        return json.loads(answer)

    def leave(self) -> None:
        """Let all leave."""
        process, _ = self._processes["main"]
        assert process.stdin is not None
        process.stdin.close()
        for name, (process, _) in self._processes.items():
            if code := process.wait(PATIENCE):
                raise RuntimeError(f"{name} has ended with code {code}")

    def close(self) -> None:
        for process, _ in self._processes.values():
            process.kill()
            process.wait()


# ── the faults: each begins with a block, and ends with it ──────────────────────────────────────


class Fault(NamedTuple):
    """What happens between the hosts.

    Attributes:
        name: of the table.
        harm: does it.
        lasts: seconds from its begin until calls have to work again.
        loses: whether calls may end with an error.
        stays: whether they have to work in spite of it; else it ends before.
    """

    name: str
    harm: Callable[[World], contextlib.AbstractContextManager[None]]
    lasts: float = 0.0
    loses: bool = True
    stays: bool = False


@contextlib.contextmanager
def filtering(host: Host, rules: Sequence[list[str]], *verdict: str) -> Iterator[None]:
    """Let iptables drop packets on a host, or deal with them otherwise."""
    words = verdict or ("DROP",)
    program = "ip6tables" if host.is_ipv6 else "iptables"
    for each in rules:
        host.run(program, "-A", *each, "-j", *words)
    try:
        yield
    finally:
        for each in rules:
            host.run(program, "-D", *each, "-j", *words)


@contextlib.contextmanager
def dropped_flow(what: str, way: str, world: World) -> Iterator[None]:
    """Drop the packets of one connection between "main" and "a", or of all but that for calls."""
    host, calls = world.hosts[0], world.ask("calls")
    dropped = [calls]
    if what != "calls":  # with one port they look alike: all but those for calls
        words = host.inside("ss", "-Htn", "state", "established", "dport", f"= :{world.ports[1]}")
        lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        found = [int(each.split()[2].rpartition(":")[2]) for each in lines.splitlines()]
        dropped = [each for each in found if each != calls]
        dropped = dropped if world.has_one_port else dropped[:1]
    rules = [
        [*each, "-p", "tcp", f"--{OWN[each[0]]}", str(own)]
        for each in CHAINS[way]
        for own in dropped
    ]
    with filtering(host, rules):
        yield


@contextlib.contextmanager
def black_hole(world: World) -> Iterator[None]:
    """Drop large packets, and the messages that tell of it."""
    large = ["-m", "length", "--length", f"{MTU + 1}:65535"]
    with filtering(world.hosts[0], [[*each, *large] for each in CHAINS["both ways"]]):
        yield


def cut(world: World) -> contextlib.AbstractContextManager[None]:
    return filtering(world.hosts[0], CHAINS["both ways"])


@contextlib.contextmanager
def unplugged(world: World) -> Iterator[None]:
    world.hosts[0].plug(is_up=False)
    yield
    world.hosts[0].plug(is_up=True)


@contextlib.contextmanager
def refused(world: World) -> Iterator[None]:
    """Answer packets with a reset, as a firewall that has forgotten the connections."""
    ports = ["-m", "multiport", "--ports", ",".join(map(str, world.ports))]
    with contextlib.ExitStack() as stack:
        for host in world.hosts[:2]:
            rule = ["INPUT", "-p", "tcp", *ports]
            stack.enter_context(filtering(host, [rule], "REJECT", "--reject-with", "tcp-reset"))
        yield


@contextlib.contextmanager
def reset(host: int, is_directory: bool, world: World) -> Iterator[None]:
    """Reset the connections of one end, or those to the directory."""
    for port in [PORT] if is_directory else world.ports:
        flows = f"( sport = :{port} or dport = :{port} )"
        world.hosts[host].run("ss", "-K", "state", "established", flows)
    yield


@contextlib.contextmanager
def slow(world: World) -> Iterator[None]:
    """Let the cable carry 200 Mbit/s."""
    for host in world.hosts[:2]:
        host.shape("tbf", "rate", "200mbit", "burst", "1mb", "latency", "50ms")
    yield
    for host in world.hosts[:2]:
        host.unshape()


@contextlib.contextmanager
def killed(world: World) -> Iterator[None]:
    world.kill("b")
    world.replace("b")
    yield


@contextlib.contextmanager
def moved(world: World) -> Iterator[None]:
    """Take a host away; it returns with another address, and a new process."""
    host = world.hosts[2]
    host.plug(is_up=False)
    world.kill("c")
    host.move(host.address[:-1] if host.address.endswith("33") else f"{host.address}3")
    host.plug(is_up=True)
    world.replace("c")
    yield


@contextlib.contextmanager
def jumping(world: World) -> Iterator[None]:
    """Let the wall clocks of all workers jump forward by an hour, and back by two."""
    world.ask("jump 3600")
    time.sleep(HEARTBEAT)
    world.ask("jump -3600")
    yield
    world.ask("jump 0")


def faults(*, is_quick: bool, is_first: bool, has_one_port: bool = False) -> list[Fault]:
    """Return the faults of a round."""
    flows = [
        Fault(
            f"a flow of {what} is dropped, {way}",
            partial(dropped_flow, what, way),
            IN_USE,
            stays=True,
        )
        for way in CHAINS
        for what in ("calls", "torch and tensors" if has_one_port else "tensors")
    ]
    # The long cut comes in the first round: what it needs once for all is no growth.
    cuts = [1.0, 10.0, *([100.0] if is_first and not is_quick else [])]
    return [
        *flows,
        Fault("connections are reset at one end", partial(reset, 0, False)),
        Fault("connections are reset at the other end", partial(reset, 1, False)),
        Fault("the directory's connections are reset", partial(reset, 1, True)),
        Fault("packets are refused for 0.1 s", refused, 0.1),
        Fault("a cable is away for 0.1 s", unplugged, 0.1),
        Fault(f"packets beyond {MTU} bytes are dropped for 4 s", black_hole, 2 * HEARTBEAT),
        *[Fault(f"all packets are dropped for {each:g} s", cut, each) for each in cuts],
        Fault("the cable carries 200 Mbit/s for 2 s", slow, 2.0, loses=False),
        Fault("a worker is killed and replaced", killed),
        Fault("a host returns with another address", moved),
        Fault("the clock jumps by an hour, and back by two", jumping, HEARTBEAT, loses=False),
    ]


# ── the run ─────────────────────────────────────────────────────────────────────────────────────


class Run:
    """What was found: problems, and for each fault the seconds until calls worked."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.seconds: dict[str, list[list[float]]] = {}
        self.done = self.lost = 0
        self._start = time.monotonic()

    def play(self, world: World, fault: Fault) -> None:
        if not fault.loses:
            time.sleep(HEALED)  # until then calls may end with an error because of the last fault
        self._take(fault.name, world.ask(f"begin {'losses' if fault.loses else 'none'}"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(fault.harm(world))
            time.sleep(fault.lasts)
            if not fault.stays:
                stack.close()
            found = [each + fault.lasts * fault.stays for each in world.ask("wait")]
        self._take(fault.name, world.ask("begin losses"))
        self.seconds.setdefault(fault.name, []).append(found)
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        due = (LOST if fault.stays else HEALED) * max(1.0, load)
        at = time.monotonic() - self._start
        line = f"{fault.name}: {found[0]:.2f} s, {found[1]:.2f} s, due {due:.1f} s"
        print(f"{at:6.1f} s  {line}", flush=True)
        if found[1] > due:
            self.problems.append(f"{fault.name}: calls worked after {found[1]:.2f} s")

    def _take(self, name: str, found: list[Any]) -> None:
        for problems, lost, done in found:
            self.problems += [f"{name}: {each}" for each in problems]
            self.lost += sum(lost.values())
            self.done += sum(done.values())

    def show(self) -> None:
        rows = []
        for name, found in self.seconds.items():
            columns = zip(*found, strict=True)
            cells = [f"{how(column):.2f}" for column in columns for how in (median, max)]
            rows.append((name, str(len(found)), *cells))
        heads = ("s until calls work", "times", "main: median", "longest", "all: median", "longest")
        lay_out([heads, *rows])
        print(f"\n{self.done:,} calls had their results, {self.lost:,} an error")


def play_all(run: Run, given: argparse.Namespace, *, is_ipv6: bool) -> None:
    """Play the faults between hosts of one family of addresses."""
    samples = []
    print(f"\nhosts with {'IPv6' if is_ipv6 else 'IPv4'} addresses alone", flush=True)
    has_one_port = given.port
    with (
        hosts(3, is_ipv6=is_ipv6) as made,
        contextlib.closing(World(made, given.seed, has_one_port=has_one_port)) as world,
    ):
        for number in range(given.rounds):
            is_first = number == 0
            found = faults(is_quick=given.quick, is_first=is_first, has_one_port=has_one_port)
            found = found[is_ipv6::2] if given.quick else found
            for each in found:
                if given.only in each.name:
                    run.play(world, each)
            samples.append(world.ask("rest"))
        world.leave()
    run.problems += grown(samples)


def grown(samples: list[list[dict[str, int]]]) -> Iterator[str]:
    """Yield what is left at rest after the rounds, and what the second half of them has added."""
    for side, name in enumerate(CALLERS):
        found = [each[side] for each in samples]
        first, middle, last = found[0], found[len(found) // 2], found[-1]
        print(
            f"{name} at rest: {' → '.join(str(each['kB']) for each in found)} kB; {first}; {last}"
        )
        if is_busy(last):
            yield f"{name}: of transfers something is left: {last}"
        for key in last.keys() - {"kB"}:
            if last[key] > first[key] + SPARE + (PIPE if key == "descriptors" else 0):
                yield f"{name}: {first[key]} {key} have become {last[key]}"
        if len(found) >= ENOUGH and (more := last["kB"] - middle["kB"]) > GROWTH:
            yield f"{name}: the second half added {more} kB"


def main(given: argparse.Namespace) -> list[str]:
    """Run the soak; return its problems."""
    use_one_arena()
    run = Run()
    for is_ipv6 in (False, True):
        play_all(run, given, is_ipv6=is_ipv6)
    print()
    run.show()
    return run.problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 round, half of it in each family")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of all faults (8)")
    parser.add_argument("--only", metavar="WORD", default="", help="faults with this in their name")
    parser.add_argument("--port", action="store_true", help="one port for each worker")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the clients (0)")
    given = parse_sizes(parser, rounds=(1, 8))
    known = faults(is_quick=given.quick, is_first=True, has_one_port=given.port)
    names = [each.name for each in known]
    if not any(given.only in each for each in names):
        parser.error("--only is a part of one of these names:\n" + "\n".join(names))
    try:
        found = main(given)
    except (OSError, subprocess.CalledProcessError) as exc:
        reason = getattr(exc, "stderr", b"") or str(exc)
        print(f"no network namespaces here, nothing was tested: {reason!r}")
        sys.exit(0)
    end(found)
