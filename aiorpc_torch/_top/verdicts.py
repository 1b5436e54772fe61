"""Verdicts of `top`: who is lost, whose loop is blocked, which queue grows, who is slow.

Pure functions of the model. The verdicts are sorted by how much they stop.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .format import seconds
from .model import History, Row, Track

Kind = Literal["lost", "replaced", "stopped", "silent", "blocked", "held", "grows", "slow", "waits"]

KINDS: tuple[Kind, ...] = get_args(Kind)  # the gravest first
HELD = 0.25  # seconds of lag that are told although no method is known for it
WAIT = 1.0  # seconds from which a wait is told
GROWTH, SHARE = 8, 0.1  # calls, and share of the queue, by which it has grown
FEWEST_VALUES = 4  # looks at a queue or a loop, before it is judged
FULL_BATCHES = 2  # that wait; fewer are no queue
SLOWER, LEAST, FEWEST = 3.0, 0.01, 3  # times as long, seconds, calls in the window
LATE, OTHERS = 0.05, 2  # seconds of lag, and other workers, from which loops are compared


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finding on a worker."""

    kind: Kind
    world: str
    worker: str
    text: str  # a sentence without the worker's name
    method: str = ""  # that it is about, "" if there is none


def verdicts(history: History, rows: Sequence[Row]) -> list[Verdict]:
    """Return the findings on these rows, the gravest first."""
    found: list[Verdict] = []
    for row in rows:
        found += _of_state(row)
        if row.key and row.state in ("ok", "blocked"):
            track = history.tracks[row.key]
            found += [*_held(row, track), *_grows(row, track)]
    excused = _waiting_for({(each.world, each.worker) for each in found}, rows)
    held = {(each.world, each.worker) for each in found if each.kind in ("held", "blocked")}
    late = [each for each in _late(history, rows) if (each.world, each.worker) not in held]
    compared = *late, *_slow(history, rows), *_waits(rows)
    found += [each for each in compared if (each.world, each.worker) not in excused]
    return sorted(found, key=lambda each: KINDS.index(each.kind))


def _of_state(row: Row) -> Iterator[Verdict]:
    if row.state == "lost":
        yield Verdict("lost", row.world, row.name, f"is lost: {row.reason}")
    elif row.lost_to:
        text = f"is lost to {_names(row.lost_to)}: {row.reason}"
        yield Verdict("lost", row.world, row.name, text)
    if row.state == "replaced":
        text = f"process {row.pid} is out of its world, where another has its place: end it"
        yield Verdict("replaced", row.world, row.name, text)
    elif row.state == "stopped":
        text = f"is stopped by a signal; continue it with: kill -CONT {row.pid}"
        yield Verdict("stopped", row.world, row.name, text)
    elif row.state == "silent":
        text = f"has not answered for {seconds(row.silent)}: C code keeps the GIL, or it has no CPU"
        yield Verdict("silent", row.world, row.name, text)
    elif row.state == "blocked":
        text = f"loop blocked for over {seconds(row.blocked)} in {row.function}"
        if row.stack:  # its file, without the folders, and its line
            text += f" ({row.stack[0].partition(' in ')[0].rpartition('/')[2]})"
        yield Verdict("blocked", row.world, row.name, text, row.function)


def _held(row: Row, track: Track) -> Iterator[Verdict]:
    """Yield the methods that held the event loop in the window."""
    before = track.first.get("slow_steps", {})
    is_known = False
    for method, (number, longest) in track.data.get("slow_steps", {}).items():
        if (times := number - before.get(method, (0, 0))[0]) > 0:
            is_known = True
            often = f"{times} times" if times > 1 else "once"
            text = f"{method} held the loop {often} in {_window(track)}, at most {seconds(longest)}"
            yield Verdict("held", row.world, row.name, text, method)
    if not is_known and row.state == "ok" and (row.lag or 0.0) >= HELD:
        text = f"loop {seconds(row.lag)} late: a task of this worker blocks it, or it has no CPU"
        yield Verdict("held", row.world, row.name, text)


def _window(track: Track) -> str:
    return seconds(max(track.seconds(), 1.0))


def _grows(row: Row, track: Track) -> Iterator[Verdict]:
    """Yield the queues that grow: of batched functions, else of all calls that are served."""
    is_known = False
    for name, counters in track.data.get("stats", {}).get("batches", {}).items():
        values = track.values("stats", "batches", name, "waiting")
        if is_growing(values) and values[-1] > FULL_BATCHES * counters["size"]:
            is_known = True
            text = f"queue of {name} grows: {_change(values)} calls in {_window(track)}"
            yield Verdict("grows", row.world, row.name, text, name)
    values = track.values("stats", "running")
    if not is_known and is_growing(values):
        text = f"calls come faster than it answers: {_change(values)} in {_window(track)}"
        if row.oldest_method:
            text += f", the oldest of {row.oldest_method}"
        yield Verdict("grows", row.world, row.name, text, row.oldest_method)


def is_growing(values: Sequence[float]) -> bool:
    """Return whether a queue grows all the time: in the first half of the values and the second.

    The queue of a fixed number of callers goes up and down, or rises once as they start.
    """
    if len(values) < FEWEST_VALUES:
        return False
    half = len(values) // 2
    first, middle, last = values[0], values[half], values[-1]
    least = max(GROWTH, SHARE * first) / 2
    is_rising = min(values[half:]) >= max(values[:half])
    return is_rising and middle - first >= least and last - middle >= least


def _change(values: Sequence[float]) -> str:
    return f"{values[0]:.0f} → {values[-1]:.0f}"


def _late(history: History, rows: Iterable[Row]) -> Iterator[Verdict]:
    """Yield the workers whose loops are late all the time, much more than those of the others.

    Many steps of a few hundredths of a second do that, of which none holds the loop for long.
    """
    by_world: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        lags = history.tracks[row.key].values("loop", "lag") if row.key else []
        if row.state == "ok" and len(lags) >= FEWEST_VALUES:
            by_world[row.world][row.name] = statistics.median(lags)
    for world, of_workers in by_world.items():
        for name, own, usual in _far_above(of_workers, LATE, OTHERS):
            text = f"loop {seconds(own)} late; of other workers {seconds(usual)}"
            yield Verdict("slow", world, name, f"{text}: many steps of it block")


def _slow(history: History, rows: Iterable[Row]) -> Iterator[Verdict]:
    """Yield the workers on which a method takes much longer than on the others.

    A method takes its median duration; a call that runs for long counts by its age.
    """
    by_method: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        for each in row.methods:
            if each.calls >= FEWEST:
                by_method[row.world, each.name][row.name] = each.p50
        data = history.tracks[row.key].data if row.key and row.state in ("ok", "blocked") else {}
        for call in data.get("serving", ()):
            if not call["stream"] and call["age"] >= WAIT:
                taken = by_method[row.world, call["method"]]
                taken[row.name] = max(taken.get(row.name, 0.0), call["age"])
    for (world, method), of_workers in by_method.items():
        for name, own, usual in _far_above(of_workers, LEAST, 1):
            text = f"{method} takes {seconds(own)}; on other workers {seconds(usual)}"
            yield Verdict("slow", world, name, text, method)


def _far_above(
    of_workers: dict[str, float], least: float, fewest: int
) -> Iterator[tuple[str, float, float]]:
    """Yield each worker whose value is far above those of the others: it and their median too.

    The value is `least` or more, and there are `fewest` others or more.
    """
    for name, own in of_workers.items():
        others = [each for other, each in of_workers.items() if other != name]
        if len(others) < fewest or own < least:
            continue
        if own >= SLOWER * (usual := statistics.median(others)):
            yield name, own, usual


def _waits(rows: Iterable[Row]) -> Iterator[Verdict]:
    """Yield the workers that others wait for."""
    found: defaultdict[tuple[str, str], list[tuple[float, str, str, int]]] = defaultdict(list)
    for row in rows:
        for each in row.waits:
            if each.age >= WAIT and each.worker != row.name:
                found[row.world, each.worker].append((each.age, each.method, row.name, each.calls))
    for (world, worker), waits in sorted(found.items(), key=lambda item: -max(item[1])[0]):
        age, method, *_ = max(waits)
        calls = sum(number for *_, number in waits)
        names = _names([name for _, _, name, _ in waits])
        verb = "waits" if len(waits) == 1 else "wait"
        number = f"{calls} calls" if calls > 1 else "1 call"
        text = f"{names} {verb} for it: {number}, {method} for {seconds(age)}"
        yield Verdict("waits", world, worker, text, method)


def _waiting_for(causes: set[tuple[str, str]], rows: Iterable[Row]) -> set[tuple[str, str]]:
    """Return the other workers that wait for these ones, or for workers that do."""
    long = ((row, each.worker) for row in rows for each in row.waits if each.age >= WAIT)
    waits = [((row.world, row.name), (row.world, worker)) for row, worker in long]
    found = {*causes}
    while more := {waiting for waiting, awaited in waits if awaited in found} - found:
        found |= more
    return found - causes


def _names(names: Sequence[str], most: int = 3) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
