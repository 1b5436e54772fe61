"""The picture of `top`, as text of a terminal of a given size."""

import io
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.console import Console

from aiorpc_torch._top.model import History
from aiorpc_torch._top.verdicts import verdicts
from aiorpc_torch._top.view import Screen, picture
from tests.support.top_samples import batches, data, durations, history, sample


def shown(
    found: History, screen: Screen | None = None, width: int = 80, height: int = 24, **detail: Any
) -> list[str]:
    """Return the lines of the picture."""
    rows = found.rows()
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(picture(screen or Screen(), rows, verdicts(found, rows), detail, width, height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def many(count: int) -> History:
    names = [f"worker-with-a-long-name-{n}" for n in range(count)]
    stats = {"served": 123456, "calls": 99999, "running": 1000, "batches": batches(7, 60, 480)}
    before = [sample(0.0, data(name, names), pid=n) for n, name in enumerate(names)]
    after = [
        sample(1.0, data(name, names, stats=stats, timings=durations(step=(0.1234, 9))), pid=n)
        for n, name in enumerate(names)
    ]
    return history(before, after)


def test_80_columns() -> None:
    """Nothing is wrapped, and each number has its column."""
    lines = shown(many(3))
    assert all(len(line) <= 80 for line in lines)
    [header] = [line for line in lines if line.startswith("worker ")]
    titles = "state in/s out/s wait oldst bat/s p50 p99 lag cpu gpu mem"
    assert " ".join(header.split()[1:]) == titles
    [row] = [line for line in lines if line.startswith("worker-w") and " ok " in line][:1]
    assert row.split()[1:6] == ["ok", "123k", "100k", "1k", "-"]


def test_a_wide_terminal_shows_all() -> None:
    """The coordinator has a star; what the kernel tells of a process needs no answer of it."""
    names, more = ["main", "w"], {"coordinator": "main", "restarts": 2, "gpus": {"0": 0.5, "1": 1}}
    before = [sample(0.0, data(name, names, **more), pid=77, cpu=9.0) for name in names]
    after = [
        sample(1.0, data("main", names, **more), pid=77, cpu=10.5),
        sample(1.0, None, name="w", pid=78, cpu=9.9, silent=0.5),
    ]
    lines = shown(history(before, after), width=125)
    assert all(len(line) <= 125 for line in lines)
    [header, main, silent] = [each.split() for each in lines if each.startswith(("wo", "ma", "w "))]
    titles = "state in/s out/s wait oldst bat/s size p50 p99 lag cpu gpu mem seg pid rst waits for"
    assert " ".join(header[1:]) == titles
    assert main == ["main*", *"ok 0 0 0 - - - - - 0µs 150% 75% - 0 77 2".split()]  # noqa: SIM905
    assert silent == ["w", *"silent - - - - - - - - - 90% - - - 78 -".split()]  # noqa: SIM905


def test_64_workers_are_scrolled_to_the_selected() -> None:
    lines = shown(many(64), Screen(selected=60))
    assert len(lines) <= 24
    assert any("q quit" in line for line in lines)


def test_wide_terminals_show_what_a_worker_waits_for() -> None:
    wait = {"worker": "ps", "calls": 3, "method": "update", "age": 0.4}
    found = history([sample(0.0, data(waits=[wait]))])
    assert any("ps 400ms" in line for line in shown(found, width=140))
    assert not any("ps 400ms" in line for line in shown(found))


def test_a_worker_of_another_host_is_waited_for() -> None:
    """It has no row here."""
    wait = {"worker": "ps", "calls": 3, "method": "update", "age": 9.0}
    lines = shown(history([sample(0.0, data(waits=[wait]))]))
    assert lines[0].startswith("ps: w waits for it: 3 calls")


def test_worlds_have_a_line_each_and_the_same_columns() -> None:
    """A worker whose name is in several worlds has its pid beside it, and its own verdicts."""
    worlds = {5: "unix://one", 6: "unix://two", 7: "tcp://127.0.0.1:29500"}
    looks = [
        [
            sample(at, data("main", world=world, slow_steps=steps), pid=pid, key=f"key{pid}")
            for pid, world in worlds.items()
        ]
        for at, steps in ((0.0, {}), (1.0, {"act": [3, 0.9]}))
    ]
    found = history(*looks)
    lines = shown(found)
    assert [line.partition(": ")[0] for line in lines[:3]] == [
        *("main (pid 7)", "main (pid 5)", "main (pid 6)"),
    ]
    titles = ["tcp://127.0.0.1:29500: 1 worker"]
    titles += [f"local world of process {pid}: 1 worker" for pid in (5, 6)]
    at = [lines.index(title) for title in titles]
    assert at == [4, 6, 8]
    assert len({lines[n + 1].index(" ok ") for n in at}) == 1
    assert lines[3].index("state") + 2 == lines[5].index(" ok ")
    detail = "\n".join(shown(found, Screen(opened="key6")))
    assert detail.count("held the loop") == 1


def test_no_worker() -> None:
    assert shown(history([])) == ["no worker of this user in this network namespace; q quit"]
    alone = shown(history([]), Screen(pid=7))
    assert alone == ["process 7 is no worker of this user in this network namespace; q quit"]


def test_the_keys() -> None:
    found = many(3)
    rows, screen = found.rows(), Screen()
    for key in ("down", "j", "down", "down", "k"):
        assert screen.handle(key, rows)
    assert screen.selected == 1
    screen.handle("\r", rows)
    assert screen.opened == rows[1].key
    screen.handle("escape", rows)
    screen.handle("p", rows)
    assert (screen.opened, screen.sort) == ("", "p")
    assert not screen.handle("q", rows)
    assert Screen().handle("\r", [])  # an empty table


@pytest.mark.promise("where.top")
def test_one_worker() -> None:
    """Its methods, batches, waits, and its oldest calls with their stacks."""
    stack = ["/home/me/policy.py:12 in Policy.act"]
    loop = {"lag": 3.2, "blocked": 3.2, "function": "Policy.act", "stack": stack}
    wait = {"worker": "ps", "calls": 3, "method": "update", "age": 0.4}
    stats = {"batches": batches(7, 60, 480)}
    found = history(
        [sample(0.0, data())],
        [
            sample(
                1.0,
                data(loop=loop, waits=[wait], stats=stats, timings=durations(act=(0.1, 9))),
                pid=7,
            )
        ],
    )
    call = {"method": "Policy.act", "worker": "main", "age": 3.3, "stack": ["in act"]}
    screen = Screen(opened=found.rows()[0].key)
    text = "\n".join(
        shown(found, screen, calls=[call], threads={"aiorpc-def-0": ["in f"]}, where=["f at x"])
    )
    for part in (
        *("w  rank 1  pid 7  blocked", "policy.py:12 in Policy.act", "act  9 calls", "p50 "),
        *("Model.infer  60 batches/s of 8  7 calls wait", "waits for ps: 3 calls"),
        *("Policy.act of main for 3.3s", "in act", "thread aiorpc-def-0:", "in f"),
        *("where its calls stand:", "  f at x"),
    ):
        assert part in text
