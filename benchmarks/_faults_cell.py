"""A cell of the fault matrix: a state, a fault, and the documented outcome.

States and faults are independent. A cell makes the state, injects the fault, and asks the survivors
how their waits ended and when. It runs in a process that forks the workers and waits for each.
"""

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import _faults_processes as processes
from ._faults_member import live
from ._faults_processes import Machines, Member, Wrong
from ._faults_states import SHORT

HEARTBEAT, START, STOP = 2.0, 1.5, 1.5  # seconds, the arguments of the workers
AT_ONCE = 2.0  # seconds until a fault is noticed without a timeout, on a busy machine
TAKEOVER = HEARTBEAT + 3.0  # seconds until another process can enter without rank 0
SLACK = 1.0  # seconds beyond a configured time
NOISE = 0.5  # seconds that other load may add to any of these
NAMES = ("main", "b", "a")  # by rank; the fault is injected into `a`
FIRST = ("a", "main", "b")  # the same if that is rank 0, which keeps the directory

IDLE, STARTING, STOPPING = "idle", "starting", "stopping"
PENDING, STREAM, BATCH = "pending call", "open stream", "waiting batch"
ROUND, BACKWARD = "forming round", "backward in flight"
SUPERVISED, JOINING, LEAVING = "supervised object", "joining", "leaving alone"
STATES = (
    IDLE,
    PENDING,
    STREAM,
    BATCH,
    ROUND,
    BACKWARD,
    SUPERVISED,
    STARTING,
    JOINING,
    LEAVING,
    STOPPING,
)


@dataclass
class Verdict:
    """The result of a cell."""

    end: str = ""
    """The documented outcome, in words."""
    seconds: float = 0.0
    """The longest wait for it."""
    bound: float = 0.0
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""

    def took(self, seconds: float, bound: float, what: str) -> None:
        """Record a duration; it is wrong if it exceeds `bound`."""
        self.seconds, self.bound = max(self.seconds, seconds), max(self.bound, bound)
        if seconds > bound + NOISE:
            self.wrong.append(f"{what} took {seconds:.2f} s: more than {bound:g} s")

    def expect(self, fine: bool, text: str) -> None:
        if not fine:
            self.wrong.append(text)


class Members:
    """Three workers of a world, on one machine or with `a` on another."""

    def __init__(
        self, folder: Path, machines: Machines | None, names: Sequence[str] = NAMES
    ) -> None:
        self.machines = machines
        self._names = names
        self.store = folder / "store"
        self._folder = folder
        self.running: dict[str, Member] = {}

    def start(self, name: str, as_name: str = "", **more: Any) -> Member:
        """Start a process for that worker, outside the world as yet."""
        given: dict[str, Any] = {
            "name": name,
            "rank": self._names.index(name) if name in self._names else None,
            "world_size": len(NAMES),
            "init_method": f"file://{self.store}",
            "heartbeat": HEARTBEAT,
            "start_timeout": START,
            "stop_timeout": STOP,
            "interface": "lo" if self.machines is None else processes.LINK,
            **more,
        }
        if self.machines is not None:
            given["namespace"] = self.machines.inside(name == "a")
        member = Member(as_name or name, live, given, self._folder)
        self.running[member.name] = member
        return member

    def enter(self) -> tuple[Member, Member, Member]:
        """Start all three workers and wait until they are in their world."""
        running = [self.start(name, start_timeout=processes.PATIENCE) for name in NAMES]
        for member in running:
            member.tell("enter")
        for member in running:
            member.hears("in")
        main, b, a = (self.running[name] for name in NAMES)
        return main, b, a

    def registered(self, name: str) -> None:
        """Wait until rank 0 has logged the registration of that worker."""
        end = time.monotonic() + processes.PATIENCE
        while not re.search(rf"'{name}' \(.* has registered", self.running["main"].errors()):
            if time.monotonic() > end:
                raise Wrong(f"{name} did not register")
            time.sleep(0.01)

    def close(self) -> None:
        for member in self.running.values():
            member.close()


# ── faults ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Fault:
    """A fault of `a`, and the error that its waiting peers get within `bound` seconds."""

    name: str
    told: str
    bound: float
    strike: Callable[[Members], None]
    code: int
    heal: Callable[[Members], None] | None = None
    """Undo the fault, if that is possible."""
    how: str = ""
    """The way in which a method never returns ("blocks", "ignores"); empty for other faults."""
    machines: bool = False
    is_first: bool = False
    """Whether `a` is rank 0."""
    is_leave: bool = False
    """Whether `a` leaves in order while the others go on."""


def _signal(*numbers: int) -> Callable[[Members], None]:
    def strike(members: Members) -> None:
        for number in numbers:
            members.running["a"].signal(number)

    return strike


def _fail(members: Members) -> None:
    members.running["a"].tell("raise")


def _leave(members: Members) -> None:
    members.running["a"].tell("leave alone")


def _cut(members: Members) -> None:
    assert members.machines is not None
    members.machines.cut()


def _mend(members: Members) -> None:
    assert members.machines is not None
    members.machines.whole()


def _nothing(_: Members) -> None:
    """Do nothing: the fault is part of the state."""


LOST = r"^WorkerLost: worker 'a' is lost: "
MAY_HAVE_RUN = r"(; \S+ (may have run|was not sent))?$"  # the error of a call names it
SILENT = rf"{LOST}no sign of life for [0-9.]+ s{MAY_HAVE_RUN}"
SILENCE = HEARTBEAT + SLACK

KILL = Fault("kill -9", LOST, AT_ONCE, _signal(signal.SIGKILL), -signal.SIGKILL)
FREEZE = Fault("SIGSTOP", SILENT, SILENCE, _signal(signal.SIGSTOP), 0, _signal(signal.SIGCONT))
RAISE = Fault(
    "exception", rf"{LOST}its block raised LookupError: a's own{MAY_HAVE_RUN}", AT_ONCE, _fail, 1
)
BLOCK = Fault("hang in a def", "", SHORT + SLACK, _nothing, 0, how="blocks")
IGNORE = Fault("hang in an async def", "", SHORT + SLACK, _nothing, 0, how="ignores")
MISSING = Fault("missing rank", "", AT_ONCE, _nothing, 0)
WRONG = Fault("wrong interface", "", AT_ONCE, _nothing, 1, machines=True)
CUT = Fault("cut link", SILENT, SILENCE, _cut, 0, _mend, machines=True)
OF_FIRST = tuple(
    replace(fault, name=f"{fault.name} of rank 0", is_first=True) for fault in (KILL, FREEZE, CUT)
)
LEFT = rf"^WorkerLeft: worker 'a' has left its world{MAY_HAVE_RUN}"
LEAVE = Fault("leave of rank 0", LEFT, STOP + SLACK, _leave, 0, is_first=True, is_leave=True)
FAULTS = (KILL, FREEZE, RAISE, BLOCK, IGNORE, MISSING, WRONG, CUT, *OF_FIRST, LEAVE)


def _is_cut(fault: Fault) -> bool:
    return fault.strike is _cut


def makes_no_sense(fault: Fault, state: str) -> str:
    """Return why there is no such cell; empty if there is one."""
    if fault in (MISSING, WRONG) and state != STARTING:
        return "a worker that is missing or unreachable is in no world: it concerns starts only"
    if fault.is_first and state == STARTING:
        return "the others wait for rank 0, which may be started again"
    if fault.is_first and state in (JOINING, LEAVING):
        return "rank 0 does not join"
    if fault.how and state in (IDLE, STARTING, JOINING):
        return "no method runs"
    if _is_cut(fault) and state == JOINING:
        return "torch may start at the loopback address meanwhile, and the worker is refused"
    if fault is RAISE and state == LEAVING:
        return "its block has ended"
    if fault is IGNORE and state == BACKWARD:
        return "torch's backward is never an `async def`"
    return ""


# ── a cell ──────────────────────────────────────────────────────────────────────────────────────


def play(fault: Fault, state: str, folder: Path) -> Verdict:
    """Run one cell, in a process that may fork."""
    verdict = Verdict()
    if fault.machines and (why := processes.no_machines()):
        verdict.skipped = f"no network namespaces here: {why}"
        return verdict
    processes.adopt()
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(contextlib.closing(Machines())) if fault.machines else None
        names = FIRST if fault.is_first else NAMES
        members = stack.enter_context(contextlib.closing(Members(folder, machines, names)))
        acts = {STARTING: starting, JOINING: joining, LEAVING: leaving, STOPPING: stopping}
        act = acts.get(state, in_the_world)
        try:
            codes = act(members, fault, state, verdict)
            for name, code in codes.items():
                verdict.wrong += members.running[name].wrongs(code)
        except Wrong as exc:
            verdict.wrong += [str(exc), *_errors(members)]
    if left := processes.left_over():
        verdict.wrong.append(f"processes are left: {left}")
    return verdict


def _errors(members: Members) -> Iterator[str]:
    for member in members.running.values():
        if text := member.errors().strip():
            yield f"{member.name} wrote: {text[-1500:]}"


def in_the_world(members: Members, fault: Fault, state: str, verdict: Verdict) -> dict[str, int]:
    """Inject the fault into `a` while three workers work; check the others' errors and end."""
    main, b, a = members.enter()
    if fault.how:
        main.asks("hang", state, fault.how)
    else:
        main.asks("make", state)
    struck = time.monotonic()
    fault.strike(members)
    new = "until it is gone" if fault is RAISE or fault.is_leave else "now"
    ends = main.asks("ends", fault.bound + SLACK, new)
    check_ends(fault, state, verdict, ends, struck)
    main.asks("prove", "left" if fault.is_leave else "lost")
    there = [main, b]
    codes = {"main": 0, "b": 0, "a": fault.code}
    if fault.is_first:
        codes["c"] = 0
        there.append(another_enters(members, verdict, struck))
    if fault.is_leave:
        a.hears("leaves")
        verdict.took(a.hears("left"), STOP + SLACK, "leaving, for a,")
        a.hears("rest")
    if fault.heal is not None or fault.how:
        if fault.heal is not None:
            fault.heal(members)
        found = main.asks("again")
        verdict.expect(found == "HELLO", f"a, called after the fault, answered: {found}")
        there.append(a)
    part(there, verdict)
    return codes


def another_enters(members: Members, verdict: Verdict, struck: float) -> Member:
    """Let another process enter while rank 0 is dead, frozen or cut off."""
    member = members.start("c", **JOINS)
    member.tell("enter")
    member.hears("in")
    seconds = time.monotonic() - struck
    bound = TAKEOVER + SLACK
    if seconds > bound + NOISE:
        verdict.wrong.append(f"the entry of another process took {seconds:.2f} s, not {bound:g} s")
    return member


def check_ends(
    fault: Fault, state: str, verdict: Verdict, ends: dict[str, Any], struck: float
) -> None:
    """Check how all waits for `a` ended, and the calls made afterwards."""
    for name, end in ends.items():
        text, when = end if end is not None else ("", struck)
        told, bound = due(fault, state, name)
        if not told:
            verdict.expect(end is None, f"{name} ended too early: {text}")
            continue
        if end is None:
            verdict.wrong.append(f"{name} waits after {fault.bound + SLACK:g} s")
            continue
        verdict.expect(bool(re.search(told, text)), f"{name} ended with {text!r}, not {told!r}")
        if "new call" not in name or not fault.how:
            verdict.took(when - struck, bound, name)
    verdict.end = summary(fault, state)


def due(fault: Fault, state: str, name: str) -> tuple[str, float]:
    """Return the pattern of a wait's end and its bound in seconds; "" if the wait goes on."""
    if name.startswith("on b: "):
        return r"^(None|\d+)$", fault.bound
    if fault.how and name.startswith("new call"):
        return r"^\d+$", fault.bound
    if name == "new call" and fault is RAISE:
        return LOST, fault.bound
    is_slow = fault.heal is not None or fault.is_leave or fault.how
    if name.endswith("with a timeout") and is_slow:
        return "^CallTimeout: ", SHORT + SLACK
    if fault.how and (state != BACKWARD or name == "backward"):
        return "", 0.0
    return ("" if fault.how else fault.told), fault.bound


def summary(fault: Fault, state: str) -> str:
    if fault.how:
        return "goes on; CallTimeout"
    return "WorkerLeft" if fault.is_leave else "WorkerLost"


def part(there: list[Member], verdict: Verdict) -> None:
    """Have these workers leave together, and check that open waits end."""
    for member in there:
        member.tell("leave")
    for member in there:
        member.hears("leaves")
    for member in there:
        verdict.took(member.hears("left"), STOP + SLACK, f"leaving, for {member.name},")
        for name, end in member.hears("rest").items():
            text = "" if end is None else end[0]
            fine = re.search(
                "^(NotInWorld|WorkerLeft|WorkerLost|ReferenceError|RuntimeError|CallTimeout|[0-9'])",
                text,
            )
            verdict.expect(bool(fine), f"after the world: {name} ended with {text!r}")


def stopping(members: Members, fault: Fault, state: str, verdict: Verdict) -> dict[str, int]:
    """Inject the fault into `a` while `main` and `b` wait for it to leave."""
    main, b, a = members.enter()
    if fault.how:
        main.asks("hang", PENDING, fault.how)
        verdict.end = "all leave"
        part([main, b, a], verdict)
        return {"main": 0, "b": 0, "a": 0}
    for member in (main, b):
        member.tell("leave")
        member.hears("leaves")
    a.asks("await leaves")
    struck = time.monotonic()
    fault.strike(members)
    if _is_cut(fault):
        a.tell("leave")
        a.hears("leaves")
    bound = STOP + SLACK if fault.heal is not None else AT_ONCE
    for member in [main, b, *([a] if _is_cut(fault) else [])]:
        member.hears("left")
        verdict.took(time.monotonic() - struck, bound, f"leaving, for {member.name},")
        member.hears("rest")
    verdict.end = "the others leave"
    if fault.heal is not None:
        fault.heal(members)
        a.tell("leave")
    for member in (main, b):
        # With a cut link `a` has reported its leave before.
        text = "did not wait for a ("
        is_fine = _is_cut(fault) or (text in member.errors()) is not fault.is_leave
        verdict.expect(is_fine, f"{member.name}: its log is wrong about {text!r}")
    return {"main": 0, "b": 0, "a": fault.code}


# ── joining, and leaving alone ──────────────────────────────────────────────────────────────────

JOINS: dict[str, Any] = {
    "join": True,
    "rank": None,
    "world_size": None,
    "start_timeout": processes.PATIENCE,
}
TWO: dict[str, Any] = {"world_size": 2, "start_timeout": processes.PATIENCE}


def pair(members: Members) -> list[Member]:
    """Start a world of `main` and `b`, which others may join."""
    two = [members.start(name, **TWO) for name in ("main", "b")]
    for member in two:
        member.tell("enter")
    for member in two:
        member.hears("in")
    return two


def joining(members: Members, fault: Fault, state: str, verdict: Verdict) -> dict[str, int]:
    """Inject the fault into `a` while it joins; the others go on, and another one joins."""
    two = pair(members)
    a = members.start("a", **JOINS)
    a.tell("enter, fail" if fault is RAISE else "enter")
    members.registered("a")
    struck = time.monotonic()
    if fault is RAISE:
        a.tell("fail")
    else:
        fault.strike(members)
    two[0].asks("prove", "lost")
    verdict.took(time.monotonic() - struck, fault.bound, "a call of the others")
    verdict.end = "the others go on"
    if fault.heal is not None:
        fault.heal(members)
        a.hears("in")
        two.append(a)
    else:
        another = members.start("a", "another a", **JOINS)
        another.tell("enter")
        another.hears("in")
        two.append(another)
    found = two[0].asks("again")
    verdict.expect(found == "HELLO", f"a, called after the fault, answered: {found}")
    part(two, verdict)
    return {"main": 0, "b": 0, "a": fault.code} | ({} if a in two else {"another a": 0})


def leaving(members: Members, fault: Fault, state: str, verdict: Verdict) -> dict[str, int]:
    """Inject the fault into `a`, which has joined, while it leaves and the others stay."""
    main, b = pair(members)
    a = members.start("a", **JOINS)
    a.tell("enter")
    a.hears("in")
    if fault.how:
        main.asks("hang", PENDING, fault.how)
    else:
        main.asks("make", PENDING)
    a.tell("leave")
    a.hears("leaves")
    struck = time.monotonic()
    fault.strike(members)
    bound = max(fault.bound, STOP) + SLACK if fault.how else fault.bound
    ends = main.asks("ends", bound + SLACK, "until it is gone" if fault.how else "")
    for name, end in ends.items():
        text, when = end if end is not None else ("it waits", struck)
        told = rf"^NotInWorld|^WorkerLeft|^ReferenceError|{LOST}|^CallTimeout|^(None|\d+)$"
        verdict.expect(bool(re.search(told, text)), f"{name} ended with {text!r}")
        verdict.took(when - struck, bound, name)
    verdict.end = "WorkerLeft" if fault.how else "WorkerLost"
    main.asks("prove", "lost")
    if fault.heal is not None:
        fault.heal(members)
    if fault.code != KILL.code:
        a.hears("left")
        a.hears("rest")
    part([main, b], verdict)
    return {"main": 0, "b": 0, "a": fault.code}


# ── starting ────────────────────────────────────────────────────────────────────────────────────


def starting(members: Members, fault: Fault, state: str, verdict: Verdict) -> dict[str, int]:
    """Inject the fault while `a` waits for the others; start again with another `a`."""
    more = {"interface": "lo"} if fault is WRONG else {}
    main, b = members.start("main"), members.start("b")
    main.tell("enter")
    if fault is not MISSING:
        a = members.start("a", **more)
        a.tell("enter, fail" if fault is RAISE else "enter")
        members.registered("a")
    if fault is RAISE:
        a.tell("fail")
    else:
        fault.strike(members)
        b.tell("enter")
    first = [main] if fault is RAISE else [main, b]
    bound = AT_ONCE if fault is RAISE else START + SLACK
    for member in first:
        kind, text, missing, took = member.hears("failed")
        verdict.expect(kind == "WorldTimeout", f"{member.name}: {kind}: {text}")
        verdict.expect(blames(fault, text, missing), f"{member.name} blames: {missing} {text}")
        verdict.took(took, bound, f"the start, for {member.name},")
    verdict.end = "WorldTimeout"
    codes = {"main": 0, "b": 0}
    if fault is not MISSING:
        codes["a"] = end_of_a(members, fault, verdict)
    try_again(members, [main, b], verdict)
    return {**codes, "another a": 0}


def blames(fault: Fault, text: str, missing: list[int]) -> bool:
    if fault is RAISE:
        return "'a' (rank 2" in text and "has given up" in text
    return 2 in missing


def end_of_a(members: Members, fault: Fault, verdict: Verdict) -> int:
    """Check the end of `a` after the others' start failed; return its exit code."""
    a = members.running["a"]
    if fault.heal is not None:
        fault.heal(members)
    if fault in (FREEZE, CUT, WRONG):
        kind, text, _, took = a.hears("failed")
        verdict.expect(kind == "WorldTimeout", f"a: {kind}: {text}")
        if fault is not FREEZE:
            verdict.took(took, 2 * START + SLACK, "the start, for a,")
        a.tell("end", 1)
        return 1
    return fault.code


def try_again(members: Members, others: list[Member], verdict: Verdict) -> None:
    """Start a world with another `a` at the same place."""
    another = members.start("a", "another a", start_timeout=processes.PATIENCE)
    for member in (*others, another):
        member.tell("enter", {"start_timeout": processes.PATIENCE})
    for member in (*others, another):
        member.hears("in")
    found = others[0].asks("again")
    verdict.expect(found == "HELLO", f"once more: {found}")
    part([*others, another], verdict)
