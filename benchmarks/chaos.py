"""Does a run of a week survive? Ten minutes in which each of its processes dies in each way.

IMPALA (examples/week.py) learns CartPole on four hosts. Each role is a process that a supervisor
starts again. Each role in turn is killed, frozen for longer than its heartbeat, drained, hung with
the GIL, and its host cut off; two at a time as well, rank 0 and the learner too; at the end all are
killed at once. Nobody helps. For each loss it prints how long nothing was learnt, when the role
worked again, and what was lost. The exit code is 1 if CartPole is not solved, if nothing is learnt
for more than 10 s, if a role does not come back, or if the learner comes back with an older version
than a follower had. Needs root on Linux.

    python -m benchmarks.chaos [--quick] [--only NAME ...] [--shell] [--plot PATH] [--logs FOLDER]
    salloc --nodes=2 python -m benchmarks.chaos --slurm [...]

In an allocation of Slurm each role is a step of the job. There a step is cancelled too, or all its
processes are killed at once, and no host is cut off. That needs no root. The same program on Ray
is killed in the same ways, and its head too; it is left out if Ray is not installed.
"""

import argparse
import itertools
import json
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from examples import week
from examples.impala import STEPS

from ._chaos_world import HEARTBEAT, PLACES, WATCHDOG, Record, World
from ._compare import lay_out, machine
from ._plot import ALSO_OURS, OURS, Curve, Panel, draw
from ._soak_end import end

MOST, AIM = 10.0, 3.0  # seconds without an update that a loss may cost, and should
START_LIMIT = 600.0  # seconds until all roles have imported torch and learn, on a busy machine
CALM = 5  # updates between the end of one fault and the next
SOLVED = 475.0  # mean reward of the last evaluations
LAST = 5  # evaluations
LONG = 5.0  # minutes in which it is solved
RATE = 2_000  # steps of environments a second, about

Start = Callable[..., AbstractContextManager[World]]


class System(NamedTuple):
    """A way to run the program: the module that has it, and the package that it needs."""

    name: str
    module: str
    package: str = "aiorpc_torch"

    @property
    def is_ours(self) -> bool:
        return self.package == "aiorpc_torch"

    def start(self) -> Start:
        """Return what starts the program in a folder, with options."""
        found: Start = import_module(f".{self.module}", __package__).world
        return found


SYSTEMS = System("ours", "_chaos_world"), System("ray", "_chaos_ray", "ray")
SLURM = System("slurm", "_chaos_slurm")

Attack = tuple[tuple[str, str], ...]
"""Faults at the same time, each with its role."""


class Loss(NamedTuple):
    """One attack, and what it has cost."""

    attack: Attack
    at: float  # seconds since the start of the program
    stopped: float  # seconds without an update of the learner, from the attack on
    back: float  # seconds from the attack until all of its roles work again
    versions: int  # that the learner had published, and the next one does not have
    steps: int  # of environments, at most: of these versions, or on their way to the learner
    what: str  # was lost

    def __str__(self) -> str:
        return (
            f"{title(self.attack)}: nothing learnt for {self.stopped:.1f} s, "
            f"back after {self.back:.1f} s, {self.steps} steps lost ({self.what})"
        )


def title(attack: Attack) -> str:
    """Return what happens, to whom."""
    if _is_of_all(attack):
        return f"{attack[0][0]} all"
    return " + ".join(f"{fault} {role}" for fault, role in attack)


def _is_of_all(attack: Attack) -> bool:
    return len(attack) == len(PLACES)


def _roles(attack: Attack) -> set[str]:
    return {role for _, role in attack}


def attacks(faults: Sequence[str], seed: int, *, has_pairs: bool = True) -> Iterator[Attack]:
    """Yield each fault at each role, and after every three of them two at a time; then pairs.

    Without pairs, it yields each fault at each role alone.
    """
    chance = random.Random(seed)
    first = ("kill", "learner"), ("kill", "keeper")
    yield from [(each,) for each in first]
    if has_pairs:
        yield first
    singles = [each for each in itertools.product(faults, PLACES) if each not in first]
    chance.shuffle(singles)
    for number, single in enumerate(singles, 1):
        yield (single,)
        if has_pairs and number % 3 == 0:
            yield _pair(faults, chance)
    while has_pairs:
        yield _pair(faults, chance)


def _pair(faults: Sequence[str], chance: random.Random) -> Attack:
    return tuple((chance.choice(faults), role) for role in chance.sample([*PLACES], 2))


# ── one attack ──────────────────────────────────────────────────────────────────────────────────


def strike(there: World, attack: Attack, problems: list[str]) -> Loss:
    """Let an attack happen, and wait until all work again."""
    record, at = there.record, there.record.now()
    faults = [threading.Thread(target=getattr(there, each), args=(role,)) for each, role in attack]
    for each in faults:
        each.start()
    for each in faults:
        each.join()
    over = record.now()
    for fault, role in attack:
        if (back := _wait_for(there, role, at if fault in there.deaths else over, fault)) is None:
            problems.append(f"{title(attack)}: {role} does not work after {there.patience:.0f} s")
            there.dump()
        over = max(over, back or record.now())
    if not record.wait(lambda: not _behind(record, over), there.patience):
        names = ", ".join(_behind(record, over))
        problems.append(f"{title(attack)}: {names}: not up to date after {there.patience:.0f} s")
    updates = [each.at for each in record.works("learner", at)]
    stopped = max(later - before for before, later in itertools.pairwise([at, *updates]))
    if stopped > MOST:
        problems.append(f"{title(attack)}: nothing was learnt for {stopped:.1f} s")
    lost = _lost(there, attack, at)
    if (recovered := record.since(at, "learner", "recovered")) and (
        (held := _held(record, PLACES.keys() - {"learner", *_roles(attack)}, at))
        > recovered[0].values["recovered"]
    ):
        problems.append(f"{title(attack)}: a follower had version {held}, which was lost")
    return Loss(attack, at, stopped, over - at, *lost)


def _wait_for(there: World, role: str, since: float, fault: str) -> float | None:
    """Return when a role works again, in its next process if it died; None if it does not."""
    record = there.record

    def works() -> float | None:
        begun = record.since(since, role, "pid") if fault in there.deaths else None
        if begun == []:
            return None
        lines = record.works(role, begun[0].at if begun else since)
        return lines[0].at if lines else None

    return works() if record.wait(works, there.patience) else None


def _behind(record: Record, since: float) -> list[str]:
    """Return the learner if it has made few updates since then, and who has none of these."""
    updates = record.works("learner", since)
    if len(updates) < CALM:
        return ["learner"]
    version = updates[0].values["version"]
    return [each for each in PLACES if each != "learner" and _held(record, [each]) < version]


def _held(record: Record, roles: Collection[str], until: float = float("inf")) -> int:
    """Return the newest version that one of these roles held at that time, -1 for none."""
    lines = [record.last(each, "holds", until) for each in roles]
    return max((each.values["holds"] for each in lines if each is not None), default=-1)


def _lost(there: World, attack: Attack, at: float) -> tuple[int, int, str]:
    """Return the versions and steps that were lost, and the parts of these."""
    record = there.record
    versions, found = 0, list[tuple[int, str]]()
    if begun := record.since(at, "learner", "recovered"):
        last = record.last("learner", "version", begun[0].at)
        assert last is not None
        versions = last.values["version"] - begun[0].values["recovered"]
        found.append((last.values["steps"] - begun[0].values["steps"], f"{versions} versions"))
        found.append((week.BATCH * STEPS, "the batch at hand"))
    for fault, role in attack:
        if fault not in there.deaths:
            continue
        if role == "replay":
            line = record.last("replay", "queued", at)
            queued = 0 if line is None else line.values["queued"]
            found.append((STEPS * queued, f"{queued} rollouts in the queue"))
        if role.startswith("actor"):
            text = f"{week.ENVIRONMENTS} rollouts begun"
            found.append((STEPS * week.ENVIRONMENTS, text))
    dropped = sum(len(record.since(at, role, "dropped")) for role in ("actor0", "actor1"))
    if dropped:
        found.append((STEPS * dropped, f"{dropped} rollouts on their way"))
    return versions, sum(steps for steps, _ in found), ", ".join(text for _, text in found)


# ── the run ─────────────────────────────────────────────────────────────────────────────────────


def run(given: argparse.Namespace, folder: Path, system: System) -> tuple[list[str], list[Loss]]:
    """Let the program learn under attacks; return what is wrong, and the losses."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("checkpoint.pt", "week.rank0"):  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    problems, losses = list[str](), list[Loss]()
    words = ["--steps", str(int(RATE * 60 * given.minutes)), "--rest", "0.2"]
    words += ["--heartbeat", str(HEARTBEAT), "--watchdog", str(WATCHDOG)]
    words += ["--checkpoint", str(folder / "checkpoint.pt")]
    words += [] if given.shell else ["--supervise"]
    with system.start()(folder, *words) as there:
        record = there.record
        if not record.wait(lambda: len(record.works("learner", 0.0)) >= CALM, START_LIMIT):
            return ["the program does not start"], []
        begin = record.now()
        for attack in attacks(there.faults, given.seed, has_pairs=not given.single):
            if record.now() - begin > 60 * given.minutes or len(problems) > 3:
                break
            losses.append(strike(there, attack, problems))
            print(f"{losses[-1].at - begin:5.0f} s  {losses[-1]}", flush=True)
        for fault in there.last if given.minutes >= 2 else ():  # by then there is a checkpoint
            losses.append(strike(there, tuple((fault, role) for role in PLACES), problems))
            print(f"{losses[-1].at - begin:5.0f} s  {losses[-1]}", flush=True)
        minutes = (record.now() - begin) / 60
    lines = [*itertools.chain.from_iterable(record.lines.values())]
    text = "\n".join(map(json.dumps, sorted(lines, key=lambda line: line.at)))
    (folder / "lines.jsonl").write_text(text)
    scores = [each.values["score"] for each in record.works("evaluator", begin)]
    score = mean(scores[-LAST:] or [0.0])
    if score < SOLVED and given.minutes >= LONG:
        problems.append(f"not solved: {score:.0f} is the mean of the last evaluations")
    report(there.faults, losses, score, minutes)
    picture(there, losses, begin, given.plot if system.is_ours else None)
    return problems, losses


def report(faults: Sequence[str], losses: Sequence[Loss], score: float, minutes: float) -> None:
    """Print the tables."""
    singles = _singles(losses)
    table: list[tuple[str, ...]] = [("nothing learnt for (role back after), s", *faults)]
    for role in PLACES:
        cells = [singles.get((fault, role)) for fault in faults]
        texts = [f"{each.stopped:.1f} ({each.back:.1f})" if each else "–" for each in cells]
        table.append((role, *texts))
    print()
    lay_out(table)
    table = [("", "losses", "nothing learnt for, s", "versions lost", "steps lost, at most")]
    for name, found in (
        ("one at a time", [each for each in losses if len(each.attack) == 1]),
        ("two at a time", [each for each in losses if len(each.attack) == 2]),
        ("of these: learner or rank 0", [each for each in losses if _is_central(each.attack)]),
        ("all at once", [each for each in losses if _is_of_all(each.attack)]),
    ):
        if found:
            stops = [each.stopped for each in found]
            seconds = f"{median(stops):.1f} [{min(stops):.1f}–{max(stops):.1f}]"
            versions = sum(each.versions for each in found)
            steps = sum(each.steps for each in found)
            table.append((name, f"{len(found)}", seconds, f"{versions}", f"{steps:,}"))
    print()
    lay_out(table)
    short = sum(each.stopped <= AIM for each in losses)
    print(
        f"\n{len(losses)} losses in {minutes:.1f} minutes, {short} of them within {AIM:.0f} s; "
        f"mean reward at the end {score:.0f}"
    )
    print(machine())


def compare(found: Mapping[str, Sequence[Loss]]) -> None:
    """Print the seconds without an update of several systems, in one table."""
    singles = [_singles(each) for each in found.values()]
    table: list[tuple[str, ...]] = [(f"nothing learnt for, s: {' | '.join(found)}", *World.faults)]
    for role in PLACES:
        cells = [[each.get((fault, role)) for each in singles] for fault in World.faults]
        texts = [[f"{each.stopped:.1f}" if each else "–" for each in cell] for cell in cells]
        table.append((role, *map(" | ".join, texts)))
    print()
    lay_out(table)


def _singles(losses: Sequence[Loss]) -> dict[tuple[str, str], Loss]:
    return {each.attack[0]: each for each in losses if len(each.attack) == 1}


def _is_central(attack: Attack) -> bool:
    return len(attack) == 2 and not {"learner", "keeper"}.isdisjoint(_roles(attack))


def picture(there: World, losses: Sequence[Loss], begin: float, path: Path | None) -> None:
    """Draw the reward over time, with the attacks marked."""
    curves = []
    for role, score, label, look in (
        ("learner", "reward", "mean of the actors", ALSO_OURS),
        ("evaluator", "score", "the evaluator", OURS),
    ):
        lines = [each for each in there.record.works(role, begin) if each.values[score]]
        lines = lines[:: 20 if role == "learner" else 2]
        xs = [each.at - begin for each in lines]
        curves.append(Curve(label, look, xs, [[each.values[score]] for each in lines]))
    events = {
        fault: [each.at - begin for each in losses if fault in dict(each.attack)]
        for fault in there.faults
    }
    name = "IMPALA on CartPole, while its processes die"
    panel = Panel(name, "seconds", "reward of an episode", curves, log="", events=events)
    draw([panel], path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ten minutes in which each process dies.")
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="of faults (10)")
    one = "one minute, as a check"
    add("--quick", dest="minutes", action="store_const", const=1.0, help=one)
    add("--shell", action="store_true", help="start each process by a loop of a shell")
    add("--slurm", action="store_true", help="as steps of this allocation of Slurm")
    names = [each.name for each in SYSTEMS]
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help="of these systems")
    add("--single", action="store_true", help="one fault at a time, each of them once")
    add("--seed", type=int, default=0, help="of the order of the faults")
    add("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    folder = Path(__file__).parents[1] / "out" / "chaos"
    add("--logs", type=Path, metavar="FOLDER", default=folder, help="what the roles write")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    problems, found = list[str](), dict[str, list[Loss]]()
    systems = [SLURM] if given.slurm else [each for each in SYSTEMS if each.name in given.only]
    for each in systems:
        if not find_spec(each.package):
            print(f"{each.name}: left out, since {each.package} is not installed")
            continue
        folder = given.logs if each.is_ours else given.logs / each.name
        wrong, found[each.name] = run(given, folder, each)
        problems += wrong if each.is_ours else []
        for text in [] if each.is_ours else wrong:
            print(f"{each.name}: {text}")
    if len(found) > 1:
        compare(found)
    end(problems, "\n")


if __name__ == "__main__":
    main()
