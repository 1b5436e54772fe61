"""A pure model of `top`: samples of workers in, rows of worlds out.

Rates and quantiles come from differences of cumulative counters and histograms. The model reads no
clock: samples carry their time.
"""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._server.timings import SHORTEST, STEPS
from .probe import Sample

WINDOW = 10.0  # seconds of samples that are kept: for quantiles, and for queues that grow
RATE_WINDOW = 3.0  # seconds, for rates
BLOCKED = 0.3  # seconds from which an event loop counts as blocked
UNKNOWN = "?"  # world of a worker that has never answered
SILENT = 0.3  # seconds from which a process that does not answer counts as silent


@dataclass(frozen=True, slots=True)
class Wait:
    """Calls of one worker that wait for another: their number, and the oldest of them."""

    worker: str
    calls: int
    method: str
    age: float


@dataclass(frozen=True, slots=True)
class Method:
    """Served calls of one method in the last seconds."""

    name: str
    calls: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of one `@batched` function in the last seconds."""

    name: str  # of the function
    rate: float  # batches in a second
    size: float  # calls in a batch, on average
    waiting: int  # calls that wait for a batch


@dataclass(slots=True)
class Row:
    """A worker, as `top` shows it."""

    key: str  # name of its socket, "" without a process
    world: str
    name: str
    rank: int = -1  # -1 if it is unknown
    pid: int = 0  # 0 without a process
    restarts: int = 0  # how often its process was started again
    is_coordinator: bool = False  # whether it keeps the directory
    # "ok", "blocked" (its event loop), "stopped" (by a signal), "silent", "lost", or "replaced"
    # (another process has its place in the world).
    state: str = "ok"
    reason: str = ""  # why it is lost, to the workers of `lost_to`
    lost_to: Sequence[str] = ()  # its process may be there, stopped or cut off
    silent: float = 0.0  # seconds since it has answered
    incoming: float | None = None  # calls that it got in a second; None if it is unknown
    outgoing: float | None = None  # calls that it made in a second
    waiting: int = 0  # calls that it has not answered
    oldest: float | None = None  # seconds of the oldest call in either direction
    oldest_method: str = ""
    batches: float | None = None  # that it ran in a second
    batch_size: float | None = None  # calls in a batch, on average
    p50: float | None = None  # median seconds from a call's arrival to its answer
    p99: float | None = None
    cpu: float | None = None  # processors that it keeps busy: 1.0 is one; None if it is unknown
    # Share of time in which the CUDA devices that it uses have run a kernel, on average over these;
    # None without one, or without NVML.
    gpu: float | None = None
    lag: float | None = None  # seconds that its event loop was late
    blocked: float = 0.0  # seconds for which its event loop has been blocked
    function: str = ""  # that blocks the loop
    stack: Sequence[str] = ()  # of the loop's thread if it is blocked, the innermost frame first
    memory: int = 0  # bytes of its own
    segments: int = 0  # of shared memory that it has made
    waits: Sequence[Wait] = ()  # calls that it waits for, by worker
    methods: Sequence[Method] = ()  # that it served
    functions: Sequence[Batches] = ()  # batched functions that it ran


class Track:
    """The samples of one process, in the last `WINDOW` seconds."""

    def __init__(self, sample: Sample) -> None:
        self.answers: deque[Sample] = deque()
        self.cpu: deque[tuple[float, float]] = deque()  # times, and seconds of processor time
        self.last = sample
        self.answered = sample.time  # time of the last answer, of the first look until there is one

    def add(self, sample: Sample) -> None:
        """Add a sample; drop those that are too old, but for the last answer."""
        if sample.data is not None:
            self.answers.append(sample)
            self.answered = sample.time
        self.last = sample
        self.cpu.append((sample.time, sample.cpu))
        while len(self.cpu) > 2 and self.cpu[0][0] < sample.time - RATE_WINDOW:
            self.cpu.popleft()
        while len(self.answers) > 1 and self.answers[0].time < sample.time - WINDOW:
            self.answers.popleft()

    @property
    def data(self) -> Mapping[str, Any]:
        """Return the last snapshot, empty without one."""
        return (self.answers[-1].data or {}) if self.answers else {}

    @property
    def first(self) -> Mapping[str, Any]:
        """Return the first snapshot that is kept, empty without one."""
        return (self.answers[0].data or {}) if self.answers else {}

    def values(self, *path: str) -> list[float]:
        """Return a number of each snapshot, the oldest first; 0 where it is missing."""
        return [_number(each.data or {}, path) for each in self.answers]

    def seconds(self) -> float:
        """Return the time from the first snapshot to the last."""
        return self.answers[-1].time - self.answers[0].time if self.answers else 0.0

    def rate(self, *path: str) -> float | None:
        """Return the growth of a counter in a second, None after less than two snapshots."""
        recent = [e for e in self.answers if e.time >= self.answers[-1].time - RATE_WINDOW]
        if len(recent) < 2:
            return None
        first, last = recent[0], recent[-1]
        grown = _number(last.data or {}, path) - _number(first.data or {}, path)
        return max(0.0, grown / (last.time - first.time))

    def busy(self) -> float | None:
        """Return the processors that it keeps busy, None after less than two looks."""
        (first, before), (last, now) = self.cpu[0], self.cpu[-1]
        return max(0.0, (now - before) / (last - first)) if now and last > first else None

    def durations(self) -> dict[str, Counter[int]]:
        """Return the histograms of the calls that were answered in the window, by method."""
        first, last = (each.get("timings", {}) for each in (self.first, self.data))
        found = {m: _histogram(counts) - _histogram(first.get(m, {})) for m, counts in last.items()}
        return {method: counts for method, counts in found.items() if counts}


def _number(data: Mapping[str, Any], path: Iterable[str]) -> float:
    found: Any = data
    for each in path:
        found = found.get(each, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, int | float) else 0


def _histogram(counts: Mapping[str, int]) -> Counter[int]:
    return Counter({int(bucket): count for bucket, count in counts.items()})


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return a quantile of a histogram in seconds, None if it is empty."""
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return float(SHORTEST * 2 ** ((bucket + 0.5) / STEPS))
    return None


@dataclass
class History:
    """The samples of all processes. `add` the samples of each look, then read `rows`."""

    tracks: dict[str, Track] = field(default_factory=dict)

    def add(self, samples: Iterable[Sample]) -> None:
        """Take the samples of one look; processes without one have ended."""
        before, self.tracks = self.tracks, {}
        for each in samples:
            track = self.tracks[each.key] = before.get(each.key) or Track(each)
            track.add(each)

    def rows(self, of_pid: int | None = None) -> list[Row]:
        """Return the rows of all workers, by world and rank; lost ones without a process too.

        With `of_pid` only those of the worlds of that process.
        """
        rows = [row_of(track) for track in self.tracks.values()]
        snapshots = [track.data for track in self.tracks.values() if track.data]
        # The world of one that has never answered: the only one that misses such a member.
        members = {data["world"]: data["members"] for data in snapshots}
        present = {(row.world, row.name) for row in rows}
        for row in rows:
            worlds = [
                w for w, of in members.items() if row.name in of and (w, row.name) not in present
            ]
            if row.world == UNKNOWN and len(worlds) == 1:
                row.world, row.rank = worlds[0], members[worlds[0]][row.name]
        newest: dict[tuple[str, str], int] = {}
        for data in snapshots:
            for name, process in data.get("processes", {}).items():
                key = data["world"], name
                newest[key] = max(process, newest.get(key, process))
        for row in rows:
            own = self.tracks[row.key].data.get("processes", {}).get(row.name)
            if own is not None and own < newest[row.world, row.name]:
                row.state = "replaced"
        self._add_losses(rows)
        if of_pid is not None:
            of_process = {each.world for each in rows if each.pid == of_pid}
            rows = [each for each in rows if each.world in of_process]
        return sorted(rows, key=lambda row: (row.world, row.rank < 0, row.rank, row.name))

    def _add_losses(self, rows: list[Row]) -> None:
        """Note what peers say of lost members; add rows of those without a process."""
        current = [row for row in rows if row.state != "replaced"]  # else it knows its past only
        known = {(row.world, row.name): row for row in current}
        for track in [self.tracks[row.key] for row in current]:
            for name, reason in track.data.get("lost", {}).items():
                key, rank = (track.data["world"], name), track.data["members"].get(name, -1)
                if (row := known.get(key)) is None:
                    row = known[key] = Row("", *key, rank, state="lost")
                    rows.append(row)
                if not row.key or track.last.data is not None:  # else it may have returned since
                    row.reason, row.lost_to = reason, (*row.lost_to, track.data["name"])


def row_of(track: Track) -> Row:
    """Return the row of one process."""
    last, data = track.last, track.data
    name, stats, loop = data.get("name", last.name), data.get("stats", {}), data.get("loop", {})
    silent = 0.0 if last.data is not None else max(last.silent, last.time - track.answered)
    state = "blocked" if loop.get("blocked", 0.0) >= BLOCKED else "ok"
    if last.state in ("T", "t"):
        state = "stopped"
    elif silent >= SILENT:
        state = "silent"
    waits = tuple(Wait(**each) for each in data.get("waits", ()))
    calls = [(e["age"], e["method"]) for e in data.get("serving", ()) if not e["stream"]]
    calls += [(each.age, each.method) for each in waits if each.method]
    oldest, method = max(calls, default=(None, ""))
    durations = track.durations()
    every = sum(durations.values(), Counter[int]())
    functions = [*_functions(track)]
    batches = sum(each.rate for each in functions)
    return Row(
        key=last.key,
        world=data.get("world", UNKNOWN),
        name=name,
        rank=data.get("members", {}).get(name, -1),
        pid=last.pid or data.get("pid", 0),
        restarts=data.get("restarts", 0),
        is_coordinator=data.get("coordinator") == name,
        state=state,
        silent=silent,
        incoming=track.rate("stats", "served"),
        outgoing=track.rate("stats", "calls"),
        waiting=stats.get("running", 0),
        oldest=oldest,
        oldest_method=method,
        batches=batches if functions else None,
        batch_size=sum(e.rate * e.size for e in functions) / batches if batches else None,
        p50=quantile(every, 0.5),
        p99=quantile(every, 0.99),
        cpu=track.busy(),
        gpu=statistics.fmean(gpus) if (gpus := data.get("gpus", {}).values()) else None,
        lag=loop.get("lag"),
        blocked=loop.get("blocked", 0.0),
        function=loop.get("function", ""),
        stack=tuple(loop.get("stack", ())),
        memory=last.memory,
        segments=stats.get("segments", 0),
        waits=waits,
        methods=tuple(_methods(durations)),
        functions=tuple(functions),
    )


def _methods(durations: Mapping[str, Counter[int]]) -> Iterator[Method]:
    for name, counts in sorted(durations.items(), key=lambda item: -sum(item[1].values())):
        p50, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
        yield Method(name, sum(counts.values()), p50 or 0.0, p99 or 0.0)


def _functions(track: Track) -> Iterator[Batches]:
    for name, counters in track.data.get("stats", {}).get("batches", {}).items():
        rate = track.rate("stats", "batches", name, "batches") or 0.0
        items = track.rate("stats", "batches", name, "items") or 0.0
        yield Batches(name, rate, items / rate if rate else 0.0, counters["waiting"])


def by_world(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each world."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for each in rows:
        found[each.world].append(each)
    return dict(found)


def nobody(of_pid: int | None) -> str:
    """Return what is to be said where there are no rows."""
    who = "no worker" if of_pid is None else f"process {of_pid} is no worker"
    return f"{who} of this user in this network namespace"


SORTS = {
    "r": ("rank", "rank"),
    "n": ("name", "name"),
    "i": ("incoming", "in"),
    "u": ("outgoing", "out"),
    "w": ("waiting", "wait"),
    "o": ("oldest", "old"),
    "b": ("batches", "bat"),
    "p": ("p99", "p99"),
    "l": ("lag", "lag"),
    "c": ("cpu", "cpu"),
    "g": ("gpu", "gpu"),
    "m": ("memory", "mem"),
}
"""The keys that sort, what they sort by, and words with their letters. "r" and "n" sort upwards,
the others downwards."""


def sort_rows(rows: Iterable[Row], key: str) -> list[Row]:
    """Return the rows in the order of a key of `SORTS`, within each world."""
    column, _ = SORTS[key]
    sign = 1 if column == "rank" else -1

    def order(row: Row) -> tuple[Any, ...]:
        value = getattr(row, column)
        return (row.world, value is None, value if column == "name" else sign * (value or 0))

    return sorted(rows, key=order)
