"""The page of results: what was run on which device, and what holds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .stages import Result

MOST_LINES = 40  # of the output of a stage that failed


def page(results: Sequence[Result], facts: Sequence[str], *, total: int) -> str:
    """Return the page; `total` is the number of stages, of which some may not have run yet."""
    return "\n".join([*_lines(results, facts, total), ""])


def is_red(results: Sequence[Result], total: int) -> bool:
    """Return whether anything failed or has not run."""
    return len(results) < total or any(result.state != "passed" for result in results)


def verdict(results: Sequence[Result], total: int) -> str:
    """Return the first line of the page, in words."""
    bad = [result.stage.name for result in results if result.state == "failed"]
    if bad:
        return f"RED: failed: {', '.join(bad)}"
    if is_red(results, total):
        return f"RED: {len(results)} of {total} stages have run"
    return "GREEN: every stage has passed"


def line(result: Result) -> str:
    """Return the row of a stage."""
    words = {"passed": "passed", **STATES}
    counts = [(len(result.tests_that(state)), word) for state, word in words.items()]
    told = "; ".join([result.reason, *(f"{count} {word}" for count, word in counts if count)])
    told = told.removeprefix("; ")
    return f"| {result.stage.name} | {result.state} | {result.seconds:.0f} s | {told} |"


def _lines(results: Sequence[Result], facts: Sequence[str], total: int) -> Iterator[str]:
    yield f"# {verdict(results, total)}"
    yield ""
    yield from (f"- {fact}" for fact in facts)
    yield from ("", "| stage | state | time | |", "|---|---|---|---|")
    yield from map(line, results)
    for result in results:
        yield from _details(result)


def _details(result: Result) -> Iterator[str]:
    """Yield what has not passed and why, the slowest tests, and the output where it tells more."""
    rest = {name: each for name, each in result.tests.items() if each["state"] != "passed"}
    told = [f"- {name}: {STATES[each['state']]}{_because(each)}" for name, each in rest.items()]
    timed = [(each["seconds"], name) for name, each in result.tests.items() if "seconds" in each]
    if slowest := [f"{name} {seconds:.1f} s" for seconds, name in sorted(timed)[:-4:-1]]:
        told.append(f"- slowest: {', '.join(slowest)}")
    if result.output and (result.state == "failed" or not result.tests):
        told += [""] * bool(told)
        told += ["```", *result.output.strip("\n").splitlines()[-MOST_LINES:], "```"]
    if told:
        yield from ("", f"## {result.stage.name}", "", *told)


def _because(record: Mapping[str, Any]) -> str:
    return f": {record['reason']}" if record.get("reason") else ""


STATES = {"began": "hung, or ended the process", "failed": "failed", "skipped": "left out"}
