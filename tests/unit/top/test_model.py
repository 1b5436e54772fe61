"""The rows of `top`: rates and quantiles are differences between snapshots."""

from typing import Any

import pytest

from tests.support.top_samples import WORLD, batches, data, durations, history, sample


def only(*snapshots: dict[str, object]) -> Any:
    """Return the row of one worker, with a snapshot in each second."""
    [row] = history(*([sample(at, each)] for at, each in enumerate(snapshots))).rows()
    return row


def test_rates_are_differences() -> None:
    before, after = {"served": 100, "calls": 5}, {"served": 150, "calls": 25}
    row = only(data(stats=before), data(stats=before), data(stats=after))
    assert (row.incoming, row.outgoing) == (25.0, 10.0)


def test_one_snapshot_has_no_rate() -> None:
    row = only(data(stats={"served": 100}))
    assert (row.incoming, row.waiting, row.rank, row.state) == (None, 0, 1, "ok")


def test_a_counter_that_began_anew_is_no_negative_rate() -> None:
    assert only(data(stats={"served": 100}), data(stats={"served": 3})).incoming == 0.0


def test_quantiles_are_of_the_window() -> None:
    first = durations(step=(5.0, 1000))
    last = {"step": first["step"] | durations(step=(0.010, 99))["step"]}
    last["step"] |= durations(step=(0.5, 1))["step"]
    row = only(data(timings=first), data(timings=last))
    assert row.p50 == pytest.approx(0.010, rel=0.1)
    assert row.methods[0].calls == 100


def test_batches() -> None:
    row = only(data(stats={"batches": batches(3)}), data(stats={"batches": batches(4, 10, 80)}))
    assert (row.batches, row.batch_size, row.functions[0].waiting) == (10.0, 8.0, 4)


def test_the_oldest_call_is_no_stream() -> None:
    serving = [
        {"method": "Env.watch", "worker": "a", "age": 900.0, "stream": True},
        {"method": "Env.step", "worker": "a", "age": 1.0, "stream": False},
    ]
    wait = {"worker": "ps", "calls": 3, "method": "update", "age": 2.0}
    assert only(data(serving=serving)).oldest_method == "Env.step"
    row = only(data(serving=serving, waits=[wait]))
    assert (row.oldest, row.oldest_method, row.waits[0].worker) == (2.0, "update", "ps")


def test_a_worker_that_does_not_answer_keeps_its_row() -> None:
    looks = [[sample(0.0, data())], [sample(3.0, None, silent=2.5, pid=7)]]
    [row] = history(*looks).rows()
    assert (row.state, row.silent, row.world, row.rank) == ("silent", 3.0, WORLD, 1)


def test_a_stopped_process_is_known_without_an_answer() -> None:
    [row] = history([sample(0.0, None, name="env", state="T", pid=9)]).rows()
    assert (row.state, row.name, row.pid) == ("stopped", "env", 9)


def test_a_slow_answer_is_no_silence() -> None:
    [row] = history([sample(0.0, data())], [sample(0.2, None, silent=0.2)]).rows()
    assert row.state == "ok"


def test_workers_of_one_name_that_have_not_answered_have_a_row_each() -> None:
    """Their worlds are unknown yet."""
    look = [sample(0.0, None, name="main", key=f"key{pid}", pid=pid) for pid in (5, 6)]
    assert sorted(row.pid for row in history(look).rows()) == [5, 6]


def test_a_lost_worker_without_a_process_has_a_row() -> None:
    """Once, however many peers tell of it; one with a process has its own row."""
    members = ("main", "w", "x", "y")
    told = {"lost": {"x": "its process was killed by SIGKILL", "y": "silent"}}
    look = [sample(0.0, data(name, members, **told)) for name in ("main", "w")]
    rows = history([*look, sample(0.0, None, name="y", state="T")]).rows()
    [lost] = [row for row in rows if row.state == "lost"]
    assert (lost.name, lost.rank, lost.key) == ("x", 2, "")
    assert [row.name for row in rows if row.state == "stopped"] == ["y"]


def test_a_process_that_has_ended_has_no_row() -> None:
    found = history(
        [sample(0.0, data("main")), sample(0.0, data("w"))], [sample(1.0, data("main"))]
    )
    assert [row.name for row in found.rows()] == ["main"]
    assert len(found.tracks) == 1


def test_old_samples_are_dropped() -> None:
    found = history(*([sample(at, data())] for at in range(100)))
    [track] = found.tracks.values()
    assert track.seconds() == 10.0


def test_only_the_worlds_of_one_process() -> None:
    other = data("other") | {"world": "tcp://host:1"}
    found = history([sample(0.0, data(), pid=5), sample(0.0, other, pid=6)])
    assert [row.name for row in found.rows(of_pid=6)] == ["other"]
    assert len(found.rows()) == 2


@pytest.mark.promise("top.use")
def test_processor_time_needs_no_answer() -> None:
    """A process that keeps the GIL does not answer, and its processor time matters."""
    looks = [[sample(at, data() if at < 1 else None, cpu=3.0 + 2 * at)] for at in (0.0, 1.0, 2.0)]
    assert history(*looks[:1]).rows()[0].cpu is None
    assert history(*looks).rows()[0].cpu == pytest.approx(2.0)
    later = [[sample(9.0, None, cpu=7.0)], [sample(10.0, None, cpu=7.0)]]
    assert history(*looks, *later).rows()[0].cpu == 0.0  # of the last seconds


@pytest.mark.promise("top.use")
def test_gpus_restarts_and_the_coordinator() -> None:
    row = only(data(gpus={"0": 0.2, "3": 0.6}, restarts=2, coordinator="w"))
    assert (row.gpu, row.restarts, row.is_coordinator) == (pytest.approx(0.4), 2, True)
    assert (only(data()).gpu, only(data()).is_coordinator) == (None, False)


@pytest.mark.promise("top.use")
def test_a_process_that_was_replaced() -> None:
    """It is told from the process that has its place, and its losses are not those of its peers."""
    old = data("w", processes={"main": 0, "w": 1}, lost={"main": "it was silent"}, pid=70)
    new = data("w", processes={"main": 0, "w": 5}, pid=71)
    main = data("main", processes={"main": 0, "w": 5})
    looks = [
        sample(0.0, found, pid=found["pid"], key=f"{name}{found['pid']}")
        for name, found in (("w", old), ("w", new), ("main", main))
    ]
    rows = {row.pid: row for row in history(looks).rows()}
    assert [rows[pid].state for pid in (7, 70, 71)] == ["ok", "replaced", "ok"]
    assert not rows[7].lost_to
