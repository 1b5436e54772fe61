"""What one worker knows of registered names, without a world: states that come in any order."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._endpoint.names import NameTable
from aiorpc_torch._node import registry as module
from aiorpc_torch._node.registry import Registry
from aiorpc_torch._peers.peers import Event, Peers
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.handshake import Party
from aiorpc_torch.errors import WorkerLost, WorkerUnreachable

A, OLD = Party("a", 1), Party("a", 0)


def registry() -> tuple[Registry, Peers]:
    members = Peers("main", [PeerInfo("main", 0, 9, ""), PeerInfo("a", 1, 1, "")])

    async def never(_: str) -> None:
        await asyncio.Event().wait()

    return Registry(members, NameTable(), never), members


async def drained(found: Registry) -> None:
    """Close it, and let its tasks end."""
    found.close()
    await asyncio.sleep(0)


@given(st.permutations(range(5)), st.booleans())
def test_the_last_state_wins(order: list[int], is_last_empty: bool) -> None:
    """In whatever order a process's states arrive; those of other processes count for nothing."""

    async def main() -> None:
        found, _ = registry()
        found.watch("env", lambda: None)
        for change in order:
            rref: Any = None if is_last_empty and change == max(order) else f"object {change}"
            assert found.take("env", A, (change, rref))
            assert found.take("env", OLD, (100, "of a dead process"))  # type: ignore[arg-type]
        assert found.living("env") == ([] if is_last_empty else ["object 4"])
        await drained(found)

    asyncio.run(main())


async def test_names_that_nobody_watches() -> None:
    """Whoever tells of them learns it; nothing is kept."""
    found, _ = registry()
    assert not found.take("env", A, (1, None))
    found.watch("env", heard := lambda: None)
    assert found.take("env", A, (1, "object"))  # type: ignore[arg-type]
    found.unwatch("env", heard)
    assert not found.take("env", A, (2, "object"))  # type: ignore[arg-type]
    assert found.living("env") == []
    await drained(found)


async def test_a_lost_peer_and_one_that_is_replaced() -> None:
    """The object of a lost one is back when it is; that of an old process is forgotten."""
    found, members = registry()
    changes: list[int] = []
    found.watch("env", lambda: changes.append(1))
    found.take("env", A, (1, "object"))  # type: ignore[arg-type]
    members.apply(members.peers["a"], Event.LOSS, WorkerLost("a"))
    found.on_change("a")
    assert found.living("env") == []
    members.apply(members.peers["a"], Event.MESSAGE)
    found.on_change("a")
    assert found.living("env") == ["object"]
    members.replace(PeerInfo("a", 1, 2, ""))
    found.on_change("a")
    assert found.living("env") == []
    assert len(changes) == 4
    await drained(found)


class Calls(list[tuple[Any, ...]]):
    """The calls to peers: the worker, the name and what follows it. Each waits for its answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.answers: list[asyncio.Future[Any]] = []
        monkeypatch.setattr(module, "RemoteCall", self.call)

    def call(self, worker: str, _: Any, __: Any, *args: Any) -> "asyncio.Future[Any]":
        self.append((worker, *args))
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


async def steps() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_answer_that_is_lost_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is alive, so no change of it follows: it is asked again."""
    found, _ = registry()
    calls, lives = Calls(monkeypatch), asyncio.Event()

    async def wait_until_alive(_: str) -> None:
        await lives.wait()

    monkeypatch.setattr(found, "_wait_until_alive", wait_until_alive)
    found.watch("env", lambda: None)
    await steps()
    calls.answers[0].set_exception(WorkerLost("a", "its connection has ended"))
    await steps()
    assert len(calls) == 1
    lives.set()
    await steps()
    assert calls == [("a", "env", "main", 9)] * 2
    calls.answers[1].set_result((1, "object"))
    await steps()
    assert found.living("env") == ["object"]
    found.on_change("a")
    await steps()
    monkeypatch.setattr(found._members, "is_here", lambda _: False)  # it has left meanwhile
    calls.answers[2].set_exception(WorkerLost("a", "its connection has ended"))
    await steps()
    assert len(calls) == 3
    assert not found._tasks
    await drained(found)


async def test_a_peer_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not now. It is asked, and told, until it can be: nobody else would do it."""
    found, _ = registry()
    calls, table = Calls(monkeypatch), found._table
    monkeypatch.setattr(found, "_wait_until_alive", lambda _: asyncio.sleep(0))
    monkeypatch.setattr(module, "UNREACHED_PAUSE", 0.0)
    found.watch("env", lambda: None)
    found.add_watcher("policy", A)
    table.add("policy", object())  # type: ignore[arg-type]
    await steps()
    for attempt in range(3):
        assert len(calls) == 2 * (attempt + 1)
        for answer in calls.answers[-2:]:
            answer.set_exception(WorkerUnreachable("a", "its port is closed"))
        await steps()
    asking, telling = sorted(calls[-2:], key=lambda call: call[1])
    assert (asking[1], telling[1]) == ("env", "policy")
    for call, answer in zip(calls[-2:], calls.answers[-2:], strict=True):
        answer.set_result((1, "object") if call[1] == "env" else True)
    await steps()
    assert found.living("env") == ["object"]
    assert not found._tasks
    await drained(found)


async def test_an_object_of_a_worker_that_is_lost_at_this_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot be read. The question and the news end without an error; its return asks again."""
    found, _ = registry()
    calls, table = Calls(monkeypatch), found._table
    found.watch("env", lambda: None)
    found.add_watcher("policy", A)
    table.add("policy", object())  # type: ignore[arg-type]
    await steps()
    tasks = [*found._tasks]
    for answer in calls.answers:
        answer.set_exception(ReferenceError("an object of a worker that is lost"))
    await steps()
    assert [each.exception() for each in tasks] == [None, None]
    found.on_change("a")
    await steps()
    assert calls[-1] == ("a", "env", "main", 9)
    await drained(found)


async def test_a_question_about_a_name_that_is_not_watched_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is cancelled, and leaves no call behind."""
    found, _ = registry()
    calls = Calls(monkeypatch)
    found.watch("env", heard := lambda: None)
    await steps()
    found.unwatch("env", heard)
    await steps()
    assert calls.answers[0].cancelled()
    assert not found._tasks
    await drained(found)


async def test_a_watcher_that_asks_again_while_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not watch for a moment. Its answer comes later than its question."""
    found, _ = registry()
    calls, table = Calls(monkeypatch), found._table
    found.add_watcher("env", A)
    table.add("env", first := object())  # type: ignore[arg-type]
    await steps()
    assert found.add_watcher("env", A) == (1, first)
    calls.answers[0].set_result(False)
    await steps()
    assert len(calls) == 2, "told once more, without harm"
    calls.answers[1].set_result(True)
    table.remove("env")
    await steps()
    assert calls[-1] == ("a", "env", "main", 9, (2, None))
    calls.answers[-1].set_result(False)
    await steps()
    assert not found._watchers
    await drained(found)


@pytest.mark.parametrize("before", [0, 5], ids=["before its first step", "later"])
async def test_the_task_that_tells_is_cancelled_by_other_code(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next change is told all the same."""
    found, _ = registry()
    calls, table = Calls(monkeypatch), found._table
    found.add_watcher("env", A)
    table.add("env", object())  # type: ignore[arg-type]
    await asyncio.sleep(0)  # `_tell_all`
    (telling,) = found._tasks
    for _ in range(before):
        await asyncio.sleep(0)
    telling.cancel()
    await steps()
    table.remove("env")
    table.add("env", second := object())  # type: ignore[arg-type]
    await steps()
    assert calls[-1] == ("a", "env", "main", 9, (3, second))
    await drained(found)
