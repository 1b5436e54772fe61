"""Departures of three workers in one event loop: the messages between them wait for the test."""

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiorpc_torch import NotInWorld, WorkerLost
from aiorpc_torch._node import departures
from aiorpc_torch._node.departures import Departures, Request
from aiorpc_torch._peers.peers import Activity, Event, Peers, Report
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.plain import dump

NAMES = ("a", "b", "c")
SOON = 30.0


def lose(worker: Departures, peer: str, reason: str) -> None:
    worker.members.apply(worker.members.peers[peer], Event.LOSS, WorkerLost(peer, reason))


class Network:
    """Three workers, of which `a` is the coordinator. Answers to those in `held` wait."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self._late: list[Callable[[], None]] = []
        self.workers = {name: self._worker(name) for name in NAMES}

    def _worker(self, name: str) -> Departures:
        workers = [PeerInfo(each, number, number, "") for number, each in enumerate(NAMES)]
        pool: Any = SimpleNamespace(watching_peers=lambda *_: contextlib.nullcontext())
        linked = lambda: {*NAMES}  # noqa: E731
        made = Departures(Peers(name, workers), pool, linked, lambda _: None)
        made._send = self.send  # type: ignore[method-assign]
        return made

    def send(self, peer: str, request: Request) -> "asyncio.Future[Any]":
        """Deliver a request at once; return the future of its answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answer(data: Any) -> None:
            deliver = lambda: future.done() or future.set_result(data)  # noqa: E731
            if request.name in self.held:
                self._late.append(deliver)
            else:
                deliver()

        reply = SimpleNamespace(set_result=answer)
        self.workers[peer].handle(dump(request), reply)
        return future

    def deliver(self) -> None:
        """Deliver the answers that are held."""
        self.held.clear()
        for each in self._late:
            each()

    def serve(self, name: str) -> "asyncio.Task[None]":
        """Let a worker serve until all others do."""
        return asyncio.create_task(self.workers[name].serve())


async def turns() -> None:
    """Let all that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_call_of_serve_beside_one_that_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts, though its request is sent before the answer to the other one is here."""
    monkeypatch.setattr(departures, "is_running", lambda: True)
    network = Network()
    network.held = {"b"}
    first = [network.serve(name) for name in NAMES]
    await turns()
    assert [each.done() for each in first] == [True, False, True]
    beside = network.serve("b")
    await turns()
    network.deliver()
    second = [network.serve(name) for name in ("a", "c")]
    async with asyncio.timeout(SOON):
        await asyncio.gather(*first, beside, *second)
    await network.workers["a"].close()


async def test_a_wait_that_is_repeated_when_the_coordinator_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last answer says who has left: it is not waited for without end."""
    monkeypatch.setattr(departures, "is_running", lambda: True)
    network = Network()
    coordinator, other, _ = network.workers.values()
    network.held = {"b"}
    leaving = [asyncio.create_task(each.leave()) for each in (coordinator, other)]
    await turns()
    for wait in [*coordinator._waits._waits]:
        if wait.asker == "b":
            coordinator._waits.expire(wait)  # its patience is over; the answer is on its way
    async with asyncio.timeout(SOON):
        await asyncio.gather(network.workers["c"].leave(), leaving[0])
        await coordinator.close()
        network.deliver()
        await leaving[1]


@pytest.mark.promise("joining.serve")
async def test_workers_that_only_the_coordinator_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that left before this worker joined, and one whose name a newer process has here."""
    monkeypatch.setattr(departures, "is_running", lambda: True)
    network = Network()
    coordinator, other, third = network.workers.values()
    coordinator.members.admit(PeerInfo("d", 3, 3, ""))
    for name, number in (("d", 3), ("c", 2)):
        coordinator.members.peers[name].record(Report(number, 0, Activity.DONE))
    other.members.admit(PeerInfo("c", 4, 4, ""))
    await other.refresh()
    assert other.left() == set(), "the newer process is here"
    lose(third, "b", "for this test")
    await third.refresh()
    assert third.left() == set(), "it is not a peer of itself, and d is none here"
    await coordinator.close()


async def test_a_loss_of_which_the_reason_is_no_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told to the others all the same: a failed child has raised any text to its parent."""
    monkeypatch.setattr(departures, "is_running", lambda: True)
    network = Network()
    coordinator, other, _ = network.workers.values()
    for each in (coordinator, other):
        lose(each, "c", "no file caf\udce9")
    async with asyncio.timeout(SOON):
        await asyncio.gather(coordinator.leave(), other.leave())
    assert await other.failure_of("c") == "no file caf\\udce9"
    other.members.apply(other.members.peers["c"], Event.MESSAGE)
    assert await other.failure_of("c") == "no file caf\\udce9"
    await coordinator.close()


@pytest.mark.promise("rejoin.replaced")
@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_worker_that_was_replaced_waits_for_nobody(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the coordinator or not."""
    monkeypatch.setattr(departures, "is_running", lambda: True)
    monkeypatch.setattr(departures, "PROBE_INTERVAL", 0.0)
    network = Network()
    replaced, serving = network.workers[name], network.serve(name)
    await turns()
    assert not serving.done()
    replaced.exclude("it was replaced")
    async with asyncio.timeout(SOON):
        with pytest.raises(NotInWorld, match="it was replaced"):
            await serving
        await replaced.leave()
        await network.workers["a"].close()


@pytest.mark.parametrize("before", [0, 5], ids=["before its first step", "later"])
async def test_the_task_that_watches_is_cancelled_by_other_code(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next wait starts it again: peers that freeze are still lost in time."""
    monkeypatch.setattr(departures, "is_running", lambda: True)
    network = Network()
    coordinator = network.workers["a"]
    serving = [network.serve("a")]
    for _ in range(1 + before):
        await asyncio.sleep(0)
    assert coordinator._attendant is not None
    coordinator._attendant.cancel()
    await turns()
    serving += [network.serve("b")]
    await turns()
    assert not coordinator._attendant.done()
    serving += [network.serve("c")]
    async with asyncio.timeout(SOON):
        await asyncio.gather(*serving)
    await coordinator.close()
