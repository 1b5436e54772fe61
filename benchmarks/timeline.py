"""When does a batch leave? The same calls under three policies, by the state machines themselves.

Nothing is measured: time is virtual, and the arrivals and the function's duration are constants.

    python -m benchmarks.timeline [--plot PATH]
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiorpc_torch import Fill, Round
from aiorpc_torch._batching.rounds import RoundScheduler
from aiorpc_torch._batching.scheduler import (
    Batch,
    CallTraits,
    FillScheduler,
    Scheduler,
    TimedOutRound,
)

from ._compare import lay_out
from ._plot import OTHER, OURS, RAW, STYLE

DURATION = 4.0  # ms of a batch
ARRIVALS = [0.0, 0.5, 1.0, 2.5, 5.0, 5.2, 6.0, 11.0, 11.5, 13.0]  # ms
GIVES_UP = {4: 7.0}  # by caller, the time at which it is cancelled if it still waits
POLICIES: dict[str, Fill | Round] = {
    "max_size=4: calls that came while the function ran": Fill(4),
    "max_size=4, max_wait=2 ms: a short wait for more": Fill(4, 2.0),
    "Round(4, quorum=2, timeout=3 ms)": Round(4, quorum=2, timeout=3.0),
}


@dataclass
class Story:
    """The outcome of each call: when and why it left, or that it gave up."""

    left: dict[int, tuple[float, str]]
    batches: list[tuple[float, tuple[int, ...], str]]


def tell(policy: Fill | Round) -> Story:
    """Play the calls against the state machine of `policy`."""
    scheduler: Scheduler[int]
    scheduler = FillScheduler(policy) if isinstance(policy, Fill) else RoundScheduler(policy)
    story = Story({}, [])
    ends: list[float] = []
    events = sorted(
        [(at, "comes", item) for item, at in enumerate(ARRIVALS)]
        + [(at, "gives up", item) for item, at in GIVES_UP.items()]
    )
    while events or ends or scheduler.deadline() is not None:
        now, what, item = _next(events, ends, scheduler.deadline())
        if what == "comes":
            scheduler.add(item, now, CallTraits(member=item))
        elif what == "gives up":
            if scheduler.discard(item):
                story.left[item] = now, what
        elif what == "ends":
            scheduler.finish_batch(now)
        for batch in _taken(scheduler, now):
            reason = batch.reason.value if isinstance(batch, Batch) else "timeout"
            story.left.update(dict.fromkeys(batch.items, (now, reason)))
            if isinstance(batch, Batch):
                story.batches.append((now, batch.items, reason))
                ends.append(now + DURATION)
    return story


def _next(
    events: list[tuple[float, str, int]], ends: list[float], deadline: float | None
) -> tuple[float, str, int]:
    due = [(ends[0], "ends")] if ends else []
    due += [] if deadline is None else [(deadline, "time")]
    if events and all(events[0][0] <= at for at, _ in due):
        return events.pop(0)
    now, what = min(due)
    if what == "ends":
        ends.pop(0)
    return now, what, -1


def _taken(scheduler: Scheduler[int], now: float) -> Iterator[Batch[int] | TimedOutRound[int]]:
    while (batch := scheduler.next_batch(now)) is not None:
        yield batch


def show(title: str, story: Story) -> None:
    print(f"\n{title}")
    lines = [
        (str(item), f"{at:g}", f"{story.left[item][0]:g}", story.left[item][1])
        for item, at in enumerate(ARRIVALS)
        if item in story.left
    ]
    lay_out([("call", "comes, ms", "leaves, ms", "why"), *lines])


def draw(stories: dict[str, Story], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the backend is chosen

    with plt.rc_context(STYLE):
        # One below the other: side by side, a page would shrink their labels.
        size = 7.0, 2.6 * len(stories)
        figure, every = plt.subplots(
            len(stories), 1, figsize=size, sharex=True, layout="constrained"
        )
        for axes, (title, story) in zip(every, stories.items(), strict=True):
            _draw_story(axes, story)
            axes.set(title=title, ylabel="call", yticks=range(len(ARRIVALS)))
            axes.invert_yaxis()
        every[-1].set_xlabel("ms")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
    print(f"\ndrawn: {path}")


def _draw_story(axes: Any, story: Story) -> None:
    for item, at in enumerate(ARRIVALS):
        end, why = story.left.get(item, (max(ARRIVALS) + DURATION, "waits"))
        gone = why in ("gives up", "timeout")
        axes.plot([at, end], [item, item], color=(RAW if gone else OTHER)[0])
        axes.plot(at, item, "o", color=OTHER[0])
        if gone:
            axes.plot(end, item, "x", color=RAW[0])
    for start, items, reason in story.batches:
        low, high = min(items) - 0.3, max(items) + 0.3
        box = axes.fill_between([start, start + DURATION], low, high, color=OURS[0], alpha=0.35)
        box.set_linewidth(0.0)
        axes.text(start + DURATION / 2, (low + high) / 2, reason, ha="center", va="center")


def main() -> None:
    parser = argparse.ArgumentParser(description="Batches under three policies, in virtual time.")
    parser.add_argument("--quick", action="store_true", help="no effect: this takes no time")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    given = parser.parse_args()
    stories = {title: tell(policy) for title, policy in POLICIES.items()}
    for title, story in stories.items():
        show(title, story)
    if given.plot is not None:
        draw(stories, given.plot)


if __name__ == "__main__":
    main()
