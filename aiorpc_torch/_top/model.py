"""A pure model of `top`: samples of workers in, rows of worlds out.

Rates and quantiles come from differences of cumulative counters and histograms. The model reads no
clock: samples carry their time.
"""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """Batches of one `@batched` function in the last seconds.

    Attributes:
        name: name of the function.
        rate: batches in a second.
        size: calls in a batch, on average.
        waiting: calls that wait for a batch.
    """

    name: str
    rate: float
    size: float
    waiting: int


@dataclass(frozen=True, slots=True)
class Row:
    """A worker, as `top` shows it.

    Attributes:
        key: name of its socket, "" without a process.
        world: name of its world.
        name: name of the worker.
        rank: its rank, -1 if it is unknown.
        pid: its pid, 0 without a process.
        restarts: how often its process was started again.
        is_coordinator: whether it keeps the directory.
        state: "ok", "blocked" (its event loop), "stopped" (by a signal), "silent", "lost", or
            "replaced" (another process has its place in the world).
        reason: why it is lost, to the workers of `lost_to`.
        lost_to: workers that have lost it. Its process may be there, stopped or cut off.
        silent: seconds since it has answered.
        incoming: calls that it got in a second; None if it is unknown.
        outgoing: calls that it made in a second.
        waiting: calls that it has not answered.
        oldest: seconds of the oldest call in either direction.
        oldest_method: method of that call.
        batches: batches that it ran in a second.
        batch_size: calls in a batch, on average.
        p50: median seconds from a call's arrival to its answer.
        p99: the 99th percentile of it.
        cpu: processors that it keeps busy: 1.0 is one; None if it is unknown.
        gpu: share of time in which the CUDA devices that it uses have run a kernel, on average over
            these; None without one, or without NVML.
        lag: seconds that its event loop was late.
        blocked: seconds for which its event loop has been blocked.
        function: function that blocks the loop.
        stack: stack of the loop's thread if it is blocked, the innermost frame first.
        memory: bytes of its own.
        segments: segments of shared memory that it has made.
        waits: calls that it waits for, by worker.
        methods: methods that it served.
        functions: batched functions that it ran.
    """

    key: str
    world: str
    name: str
    rank: int = -1
    pid: int = 0
    restarts: int = 0
    is_coordinator: bool = False
    state: str = "ok"
    reason: str = ""
    lost_to: Sequence[str] = ()
    silent: float = 0.0
    incoming: float | None = None
    outgoing: float | None = None
    waiting: int = 0
    oldest: float | None = None
    oldest_method: str = ""
    batches: float | None = None
    batch_size: float | None = None
    p50: float | None = None
    p99: float | None = None
    cpu: float | None = None
    gpu: float | None = None
    lag: float | None = None
    blocked: float = 0.0
    function: str = ""
    stack: Sequence[str] = ()
    memory: int = 0
    segments: int = 0
    waits: Sequence[Wait] = ()
    methods: Sequence[Method] = ()
    functions: Sequence[Batches] = ()


class Track:
    """The samples of one process, in the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self.answers: deque[Sample] = deque()
        self.cpu: deque[tuple[float, float]] = deque()  # times, and seconds of processor time
        self.last: Sample | None = None
        self.answered = 0.0  # time of the last answer, of the first look until there is one

    def add(self, sample: Sample) -> None:
        """Add a sample; drop those that are too old, but for the last answer."""
        if sample.data is not None:
            self.answers.append(sample)
        if sample.data is not None or self.last is None:
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
    def answers_now(self) -> bool:
        """Return whether the last look got an answer."""
        return self.last is not None and self.last.data is not None

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
        by_key = {each.key: each for each in samples}
        self.tracks = {key: self.tracks.get(key) or Track() for key in by_key}
        for key, sample in by_key.items():
            self.tracks[key].add(sample)

    def rows(self, of_pid: int | None = None) -> list[Row]:
        """Return the rows of all workers, by world and rank; lost ones without a process too.

        With `of_pid` only those of the worlds of that process.
        """
        snapshots = [track.data for track in self.tracks.values() if track.data]
        rows = _placed([row_of(track) for track in self.tracks.values()], snapshots)
        rows = _with_losses(self._with_replaced(rows), self.tracks)
        if of_pid is not None:
            worlds = {each.world for each in rows if each.pid == of_pid}
            rows = [each for each in rows if each.world in worlds]
        return sorted(rows, key=lambda row: (row.world, row.rank < 0, row.rank, row.name))

    def _with_replaced(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows; those of processes that another one has replaced have that state."""
        newest: dict[tuple[str, str], int] = {}
        for data in (track.data for track in self.tracks.values() if track.data):
            for name, process in data.get("processes", {}).items():
                key = data["world"], name
                newest[key] = max(process, newest.get(key, process))
        found = []
        for row in rows:
            own = self.tracks[row.key].data.get("processes", {}).get(row.name)
            is_old = own is not None and own < newest[row.world, row.name]
            found.append(replace(row, state="replaced") if is_old else row)
        return found


def _placed(rows: Iterable[Row], snapshots: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows with the worlds of those that have never answered, by their members."""
    members = {data["world"]: data["members"] for data in snapshots}
    found, present = [*rows], {(row.world, row.name) for row in rows}
    for at, row in enumerate(found):
        worlds = [w for w, of in members.items() if row.name in of and (w, row.name) not in present]
        if row.world == UNKNOWN and len(worlds) == 1:
            found[at] = replace(row, world=worlds[0], rank=members[worlds[0]][row.name])
    return found


def _with_losses(rows: Iterable[Row], tracks: Mapping[str, Track]) -> list[Row]:
    """Return the rows, and those of lost members without a process, with what peers say of them."""
    found = [*rows]
    old = {row.key for row in found if row.state == "replaced"}  # what it knows is of its past
    at = {(row.world, row.name): n for n, row in enumerate(found) if row.key not in old}
    for track in (each for key, each in tracks.items() if key not in old):
        for name, reason in track.data.get("lost", {}).items():
            key, rank = (track.data["world"], name), track.data["members"].get(name, -1)
            position = at.setdefault(key, len(found))
            if position == len(found):
                found.append(Row("", *key, rank, state="lost"))
            row = found[position]
            if not row.key or track.answers_now:  # else it may have returned since
                lost_to = (*row.lost_to, track.data["name"])
                found[position] = replace(row, reason=reason, lost_to=lost_to)
    return found


def row_of(track: Track) -> Row:
    """Return the row of one process."""
    last, data = track.last, track.data
    assert last is not None
    name, stats, loop = data.get("name", last.name), data.get("stats", {}), data.get("loop", {})
    silent = _silence(track)
    state = _state(last, silent, loop.get("blocked", 0.0))
    waits = tuple(Wait(**each) for each in data.get("waits", ()))
    oldest, method = _oldest(data, waits)
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


def _silence(track: Track) -> float:
    """Return for how many seconds a process has not answered, 0.0 if it has."""
    last = track.last
    assert last is not None
    if last.data is not None:
        return 0.0
    return max(last.silent, last.time - track.answered)


def _state(last: Sample, silent: float, blocked: float) -> str:
    if last.state in ("T", "t"):
        return "stopped"
    if silent >= SILENT:
        return "silent"
    return "blocked" if blocked >= BLOCKED else "ok"


def _oldest(data: Mapping[str, Any], waits: Iterable[Wait]) -> tuple[float | None, str]:
    """Return the age and the method of the oldest call in either direction; streams aside."""
    served = [(e["age"], e["method"]) for e in data.get("serving", ()) if not e["stream"]]
    made = [(each.age, each.method) for each in waits if each.method]
    return max([*served, *made], default=(None, ""))


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
    "r": "rank",
    "n": "name",
    "i": "incoming",
    "u": "outgoing",
    "w": "waiting",
    "o": "oldest",
    "b": "batches",
    "p": "p99",
    "l": "lag",
    "c": "cpu",
    "g": "gpu",
    "m": "memory",
}
"""The keys that sort, and the columns; "r" and "n" sort upwards, the others downwards."""


def sort_rows(rows: Iterable[Row], key: str) -> list[Row]:
    """Return the rows in the order of a key of `SORTS`, within each world."""
    column = SORTS[key]
    sign = 1 if column == "rank" else -1

    def order(row: Row) -> tuple[Any, ...]:
        value = getattr(row, column)
        return (row.world, value is None, value if column == "name" else sign * (value or 0))

    return sorted(rows, key=order)
