"""The failures of the children of a local world: their texts, and that none is missed."""

import asyncio
import os
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from aiorpc_torch import WorkerLost, WorldTimeout
from aiorpc_torch._children import supervisor as supervisor_module
from aiorpc_torch._children.forkserver import ProcessOptions
from aiorpc_torch._children.supervisor import Supervisor, _reason
from aiorpc_torch._wire.exceptions import RemoteFailure
from tests.support.two_ends import until

SOON = 30.0


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (WorkerLost("a", "it died"), "it died"),
        (WorkerLost("b", "it died"), "worker 'b' is lost: it died"),
        (ValueError("no data"), "no data"),
    ],
)
def test_the_reason_of_a_failure(failure: Exception, reason: str) -> None:
    """The death of a child is said without its name, that of a peer which it met with its name."""
    assert _reason("a", failure) == reason


class Process:
    """A process whose end the test decides, and the child's end of the pipe to its parent."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.was_killed = False

    def made(self, _: Any, args: tuple[Any, ...], __: str) -> Any:
        self._inherited = args[0]
        return self

    def start(self) -> None:
        self.pid = 1 << 30  # no process has it
        self._pipe = Connection(os.dup(self._inherited.fileno()))

    def enter(self) -> None:
        """Tell as a child does that is in its world."""
        self._pipe.send("entered")

    def fail(self) -> None:
        """End as a child does whose `main` has raised."""
        self._pipe.send(RemoteFailure.of(ValueError("odd"), "b"))
        self.exitcode = 1
        self._pipe.close()

    def kill(self) -> None:
        self.was_killed = True
        self.exitcode = -9
        self._pipe.close()

    def join(self, timeout: float) -> None:
        self.exitcode = self.exitcode or -9

    def close(self) -> None:
        """Free nothing."""


async def test_the_exception_of_a_child_that_ends_late() -> None:
    """It has told its peers of its failure, but needs longer to end than children may."""
    process = Process()

    def failure_of(_: str) -> WorkerLost:  # called when the time of all children is over
        asyncio.get_running_loop().call_soon(process.fail)
        return WorkerLost("b", "its block raised ValueError: odd")

    config: Any = SimpleNamespace(name="b", watchdog=None)
    membership: Any = SimpleNamespace(
        failure_of=failure_of, abandon=lambda *_: None, is_lost=lambda _: False
    )
    supervisor = Supervisor([config], None, (), 0, ProcessOptions())
    supervisor._make_process = process.made
    await supervisor._start(config)
    me: Any = SimpleNamespace(_node=SimpleNamespace(membership=membership))
    supervisor.watch_children(me)
    await supervisor._close(0.0)
    assert [repr(each) for each in supervisor.failures] == ["ValueError('odd')"]
    assert not process.was_killed


@pytest.mark.parametrize("has_entered", [False, True])
async def test_a_child_that_fails_before_the_world_is_complete(*, has_entered: bool) -> None:
    """Also with "continue": without it the world would wait for all of its `start_timeout`."""
    process = Process()
    config: Any = SimpleNamespace(name="b", watchdog=None)
    supervisor = Supervisor([config], None, (), 0, ProcessOptions())
    supervisor._make_process = process.made
    await supervisor._start(config)
    failure: BaseException | None = None
    try:
        async with supervisor.raising_failures("continue"):
            if has_entered:
                process.enter()
            process.fail()
            await asyncio.wait((supervisor._children[0].ended,))
            await asyncio.sleep(0)
    except ValueError as exc:
        failure = exc
    assert (failure is None) == has_entered
    watch(supervisor)
    assert [repr(each) for each in supervisor.failures] == ["ValueError('odd')"]
    await supervisor._close(0.0)


def watch(supervisor: Supervisor) -> None:
    """Let the world be complete."""
    ignore = lambda *_: None  # noqa: E731
    membership: Any = SimpleNamespace(
        failure_of=ignore, abandon=ignore, lose=ignore, is_lost=ignore
    )
    me: Any = SimpleNamespace(_node=SimpleNamespace(membership=membership))
    supervisor.watch_children(me)


async def test_a_child_that_fails_before_its_parent_has_entered() -> None:
    """Its world is complete, so it is restarted."""
    processes = [Process(), Process()]
    made = iter(processes)
    config: Any = SimpleNamespace(name="b", watchdog=None)
    supervisor = Supervisor([config], None, (), 1, ProcessOptions())
    supervisor._make_process = lambda *of: next(made).made(*of)
    await supervisor._start(config)
    async with supervisor.raising_failures("stop"):
        [first] = supervisor._children
        processes[0].enter()
        processes[0].fail()
        await asyncio.wait((first.ended,))
        await asyncio.sleep(0)
        watch(supervisor)
        await until(lambda: supervisor._children not in ([], [first]))
        [second] = supervisor._children
    assert second is not first
    assert supervisor.failures == []
    supervisor._send("cancel")
    await supervisor._close(0.0)


async def test_a_death_before_the_world_is_complete_names_no_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no world whose `restart` could start it again."""
    process = Process()
    config: Any = SimpleNamespace(name="b", watchdog=None)
    supervisor = Supervisor([config], None, (), 0, ProcessOptions())
    supervisor._make_process = process.made
    await supervisor._start(config)
    process.kill()
    await asyncio.wait((supervisor._children[0].ended,))
    await asyncio.sleep(0)
    [text] = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert text.startswith("worker 'b' is lost: ")
    assert text.endswith("; it is not restarted")
    await supervisor._close(0.0)


async def test_a_child_that_dies_leaves_no_descriptor() -> None:
    """Nor does the supervisor know it any longer, though it is not restarted."""
    process = Process()
    config: Any = SimpleNamespace(name="b", watchdog=None)
    supervisor = Supervisor([config], None, (), 0, ProcessOptions())
    supervisor._make_process = process.made
    await supervisor._start(config)
    child = supervisor.last["b"]
    watch(supervisor)
    process.enter()
    process.kill()
    await asyncio.wait((child.ended,))
    await asyncio.sleep(0)
    assert child._pipe.closed
    assert not supervisor.last
    assert len(supervisor.failures) == 1
    await supervisor._close(0.0)


@pytest.mark.parametrize("why", ["cancelled", "frozen"])
async def test_a_child_that_is_killed_as_it_joins(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop reads no more from its descriptor, which may be that of another file."""
    monkeypatch.setattr(supervisor_module, "JOIN_GRACE", 0.0)
    process = Process()
    seconds = SOON if why == "cancelled" else 0.0
    config: Any = SimpleNamespace(name="b", start_timeout=seconds, watchdog=None)
    supervisor = Supervisor([], None, (), 0, ProcessOptions())
    supervisor._make_process = process.made
    starting = asyncio.create_task(supervisor.add(config, asyncio.sleep(SOON)))
    while not supervisor._children:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    descriptor = supervisor._children[0]._pipe.fileno()
    if why == "cancelled":
        starting.cancel()
    async with asyncio.timeout(SOON):
        await asyncio.wait((starting,))
    assert starting.cancelled() or isinstance(starting.exception(), WorldTimeout)
    assert process.was_killed
    assert not supervisor._children
    assert not asyncio.get_running_loop().remove_reader(descriptor)


async def test_a_former_process_that_ends_late() -> None:
    """It was frozen; another one has its name, and is not lost with it."""
    processes = [Process(), Process()]
    made = iter(processes)
    config: Any = SimpleNamespace(name="b", watchdog=None)
    supervisor = Supervisor([config, config], None, (), 0, ProcessOptions())
    supervisor._make_process = lambda *of: next(made).made(*of)
    for _ in processes:
        await supervisor._start(config)
    told: list[str] = []
    membership: Any = SimpleNamespace(
        failure_of=lambda _: None,
        lose=lambda *_: told.append("lost"),
        abandon=told.append,
        is_lost=lambda _: False,
    )
    me: Any = SimpleNamespace(_node=SimpleNamespace(membership=membership))
    supervisor.watch_children(me)
    former, latter = supervisor._children
    former.ended.set_result(WorkerLost("b", "its process was killed by SIGKILL"))
    await asyncio.sleep(0)
    assert told == []
    assert supervisor.failures == []
    assert latter in supervisor._children
    await supervisor._close(0.0)


async def test_two_children_of_one_name() -> None:
    """The second one is refused: when the first one joins, it would be taken for joined too."""
    process, joined = Process(), asyncio.Event()
    config: Any = SimpleNamespace(name="b", start_timeout=SOON, watchdog=None)
    supervisor = Supervisor([], None, (), 0, ProcessOptions())
    supervisor._make_process = process.made
    starting = asyncio.create_task(supervisor.add(config, joined.wait()))
    while not supervisor._children:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    with pytest.raises(ValueError, match="two workers have the name 'b': the first one is joining"):
        await supervisor.add(config, joined.wait())
    joined.set()
    await starting
    assert len(supervisor._children) == 1
    supervisor._send("cancel")
    await supervisor._close(0.0)


@pytest.mark.parametrize("why", ["cancelled at once", "cancelled", "dead"])
async def test_a_start_that_fails_in_place_of_a_restart(why: str) -> None:
    """No process follows. Calls that wait for one end, and are told the remedy."""
    process, told = Process(), list[str]()
    config: Any = SimpleNamespace(name="b", start_timeout=SOON, watchdog=None)
    supervisor = Supervisor([], None, (), 1, ProcessOptions())
    supervisor._make_process = process.made
    membership: Any = SimpleNamespace(
        abandon=lambda name, error: told.append(f"{name}: {error.reason}"), is_lost=lambda _: True
    )
    me: Any = SimpleNamespace(_node=SimpleNamespace(membership=membership))
    supervisor.watch_children(me)
    supervisor._restart(config, WorkerLost("b", "its process was killed by SIGKILL"), SOON)
    starting = asyncio.create_task(supervisor.add(config, asyncio.sleep(SOON)))
    await asyncio.sleep(0)
    while why != "cancelled at once" and not supervisor._children:  # noqa: ASYNC110
        await asyncio.sleep(0)
    if why == "dead":
        process.kill()
    else:
        starting.cancel()
    async with asyncio.timeout(SOON):
        await asyncio.wait((starting,))
        while not told:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    reason = "it was stopped before it was restarted"
    if why != "cancelled at once":
        name = "CancelledError" if why == "cancelled" else "WorkerLost"
        remedy = "it is not restarted: `await me.restart('b')` starts it again"
        reason = f"its start has failed: {name}; {remedy}"
    assert told == [f"b: {reason}"]
    assert not supervisor._restarting
    await supervisor._close(0.0)


async def test_a_stop_that_is_cancelled_before_a_restart() -> None:
    """The restart does not follow all the same, and who waits for it is told."""
    told = list[str]()
    config: Any = SimpleNamespace(name="b", start_timeout=SOON, watchdog=None)
    supervisor = Supervisor([], None, (), 1, ProcessOptions())
    membership: Any = SimpleNamespace(abandon=lambda _, error: told.append(error.reason))
    me: Any = SimpleNamespace(_node=SimpleNamespace(membership=membership))
    supervisor.watch_children(me)
    supervisor._restart(config, WorkerLost("b", "its process was killed by SIGKILL"), SOON)
    stopping = asyncio.create_task(supervisor.remove("b", 0.0))
    await asyncio.sleep(0)
    stopping.cancel()
    async with asyncio.timeout(SOON):
        await asyncio.wait((stopping,))
        while not told:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    assert stopping.cancelled()
    assert told == ["it was stopped before it was restarted"]
