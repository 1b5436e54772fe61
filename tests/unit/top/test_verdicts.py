"""What `top` says of a world: each verdict, and none where all is well."""

from typing import Any

import pytest

from aiorpc_torch._top.model import History
from aiorpc_torch._top.verdicts import Verdict, is_growing, verdicts
from tests.support.top_samples import batches, data, durations, history, sample


def said(found: History) -> list[Verdict]:
    return verdicts(found, found.rows())


def of(*snapshots: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts on one worker, with a snapshot in each second."""
    return said(history(*([sample(at, each)] for at, each in enumerate(snapshots))))


def test_nothing_is_said_of_a_world_that_works() -> None:
    busy = data(stats={"served": 500, "running": 6}, timings=durations(step=(0.02, 50)))
    assert not of(data(), busy)


def test_a_worker_that_has_not_answered_yet() -> None:
    """It ends as it is asked, or its snapshot fails; the latter is said after a while."""
    begun = sample(0.0, None)
    assert not said(history([begun]))
    [found] = said(history([begun], [sample(1.0, None)]))
    assert (found.kind, found.worker) == ("silent", "w")


def test_a_blocked_loop_is_named() -> None:
    stack = ["/home/me/policy.py:12 in Policy.act", "/lib/x.py:1 in run"]
    loop = {"lag": 3.2, "blocked": 3.2, "function": "Policy.act", "stack": stack}
    [found] = of(data(loop=loop))
    assert (found.kind, found.worker, found.method) == ("blocked", "w", "Policy.act")
    assert found.text == "loop blocked for over 3.2s in Policy.act (policy.py:12)"


def test_a_method_that_held_the_loop_is_named() -> None:
    [found] = of(
        data(slow_steps={"act": [2, 0.9]}), data(slow_steps={"act": [5, 0.9], "old": [0, 0]})
    )
    assert (found.kind, found.method) == ("held", "act")
    assert found.text == "act held the loop 3 times in 1s, at most 900ms"


def test_a_short_queue_is_none() -> None:
    """Two full batches may wait: callers that are answered together call again together."""
    assert not of(*(data(stats={"batches": batches(n)}) for n in (0, 5, 10, 16)))


def test_a_lag_without_a_method() -> None:
    [found] = of(data(loop={"lag": 0.4}))
    assert (found.kind, found.method) == ("held", "")


def test_a_queue_that_grows() -> None:
    looks = (data(stats={"batches": batches(n), "running": n}) for n in (100, 180, 240, 300))
    [found] = of(*looks)
    assert (found.kind, found.method) == ("grows", "Model.infer")
    assert found.text == "queue of Model.infer grows: 100 → 300 calls in 3s"


def test_calls_that_come_faster_than_their_answers() -> None:
    call = {"method": "PS.update", "worker": "a", "age": 0.5, "stream": False}
    [found] = of(*(data(stats={"running": n}, serving=[call]) for n in (0, 10, 20, 40)))
    assert (found.kind, found.method) == ("grows", "PS.update")


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ([0, 2, 4, 8], True),
        ([0, 2, 4, 7], False),
        ([0, 100, 200], False),
        ([1000, 1010, 1030, 1050], False),
        ([1000, 1010, 1050, 1100], True),
        ([0, 64, 0, 64], False),
        ([0, 0, 64, 64, 64], False),
    ],
)
def test_growth(values: list[float], grows: bool) -> None:
    assert is_growing(values) is grows


def test_a_slow_worker_is_compared_with_the_others() -> None:
    taken = {"env0": 0.2, "env1": 0.02, "env2": 0.021}
    names = ("main", *taken)
    before = [sample(0.0, data(name, names)) for name in taken]
    after = [
        sample(1.0, data(name, names, timings=durations(step=(seconds, 9))))
        for name, seconds in taken.items()
    ]
    [found] = said(history(before, after))
    assert (found.kind, found.worker, found.method) == ("slow", "env0", "step")


def test_a_slow_worker_whose_call_has_not_ended() -> None:
    call = {"method": "step", "worker": "main", "age": 5.0, "stream": False}
    others = [data(f"env{n}", timings=durations(step=(0.02, 9))) for n in (1, 2)]
    before = [sample(0.0, data(f"env{n}")) for n in range(3)]
    after = [sample(1.0, each) for each in [data("env0", serving=[call]), *others]]
    assert [each.worker for each in said(history(before, after))] == ["env0"]


@pytest.mark.parametrize(
    ("lags", "told"),
    [
        ([0.17, 0.15, 0.16, 0.17], ["env2"]),
        ([0.17, 0.15, 0.16], []),
        ([0.17, 0.01, 0.02, 0.17, 0.01], []),
        ([0.04] * 4, []),
        ([0.3] * 4, ["env2"]),
    ],
    ids=["always", "too few looks", "at times", "hardly", "told without the others"],
)
def test_a_loop_that_is_later_than_the_others(lags: list[float], told: list[str]) -> None:
    """Steps of 20 ms, of eight tasks: none of them holds the loop for long."""
    usual = [{"env0": 0.02, "env1": 0.015, "main": 0.005} for _ in lags]
    looks = [
        [sample(at, data(name, loop={"lag": lag})) for name, lag in (of | {"env2": own}).items()]
        for at, (of, own) in enumerate(zip(usual, lags, strict=True))
    ]
    found = said(history(*looks))
    assert [each.worker for each in found] == told
    if told and max(lags) < 0.25:
        assert found[0].text == "loop 165ms late; of other workers 15ms: many steps of it block"


def test_who_waits_for_whom() -> None:
    """The workers that wait are named, whoever they wait for; short waits are not told."""
    wait = {"worker": "ps", "calls": 3, "method": "update", "age": 4.0}
    look = [sample(0.0, data(f"t{n}", waits=[wait | {"age": 1.5 + n}])) for n in range(5)]
    look.append(sample(0.0, data("ps", waits=[wait | {"worker": "t0", "age": 0.2}])))
    [found] = said(history(look))
    assert (found.kind, found.worker, found.method) == ("waits", "ps", "update")
    assert found.text == "t0, t1, t2 and 2 more wait for it: 15 calls, update for 5.5s"


def test_the_callers_of_a_blocked_worker_are_not_accused() -> None:
    """Nor are theirs: of those that wait, the verdict is on the worker for which all wait."""
    names = ("main", "a", "b", "ps")
    loop = {"lag": 5.0, "blocked": 5.0, "function": "PS.pull"}
    serving = {"method": "A.step", "worker": "main", "age": 5.0, "stream": False}
    look = [
        sample(0.0, data("ps", names, loop=loop)),
        sample(0.0, data("main", names, waits=[wait("a", 5.0)])),
        sample(0.0, data("a", names, waits=[wait("ps", 5.0)], serving=[serving])),
        sample(0.0, data("b", names, serving=[serving | {"age": 1.5}])),
    ]
    found = [(each.kind, each.worker) for each in said(history(look))]
    assert found == [("blocked", "ps"), ("waits", "ps")]
    look[0] = sample(0.0, data("ps", names))
    found = [(each.kind, each.worker) for each in said(history(look))]
    assert found == [("slow", "a"), ("waits", "a"), ("waits", "ps")]


def wait(worker: str, age: float) -> dict[str, Any]:
    return {"worker": worker, "calls": 1, "method": "step", "age": age}


def test_a_lost_worker_whose_process_is_there() -> None:
    """Two that have lost it say so; one that does not answer now may have it again."""
    names = ("main", "w", "x")
    told = [data(name, names, lost={"x": "no sign of life for 5 s"}) for name in names[:2]]
    first = [sample(0.0, data("x", names)), *(sample(0.0, each) for each in told)]
    [found] = said(history(first))
    assert (found.kind, found.worker) == ("lost", "x")
    assert found.text == "is lost to main, w: no sign of life for 5 s"
    silent = [sample(0.1, None, name=name) for name in names[:2]]
    assert not said(history(first, [sample(0.1, data("x", names)), *silent]))


def test_a_process_that_was_replaced_is_to_be_ended() -> None:
    looks = [
        sample(0.0, data("w", processes={"w": process}), pid=pid, key=f"key{pid}", state="T")
        for pid, process in ((70, 1), (71, 5))
    ]
    found = history(looks)
    kinds = [(each.kind, each.text) for each in verdicts(found, found.rows())]
    assert [kind for kind, _ in kinds] == ["replaced", "stopped"]
    assert kinds[0][1].startswith("process 70 is out of its world")


def test_the_gravest_come_first() -> None:
    wait = {"worker": "ps", "calls": 1, "method": "update", "age": 4.0}
    lost = data("main", ("main", "w", "x", "y"), lost={"x": "killed"}, waits=[wait])
    look = [sample(0.0, lost), sample(0.0, None, name="y", state="T", pid=9)]
    look.append(sample(0.0, None, name="z", silent=2.0))
    found = said(history(look))
    assert [each.kind for each in found] == ["lost", "stopped", "silent", "waits"]
    assert "kill -CONT 9" in found[1].text
