"""Nodes without torch's RPC: two of them in one process."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiorpc_torch import NotInWorld, WorkerLeft, WorkerLost, call
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._node import node as node_module
from aiorpc_torch._node.config import NodeConfig
from aiorpc_torch._node.node import Node
from aiorpc_torch._peers import peers as peers_module
from aiorpc_torch._peers.peers import Attachment, Event, Peers
from aiorpc_torch._torch import rrefs
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._torch.compat import WorkerInfo
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.handshake import Party
from aiorpc_torch._wire.plain import dump
from aiorpc_torch.types import Worker
from tests.support.two_ends import SOON, WORKERS, gated, two_ends, until


@pytest.fixture
def entered() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        entry_points.leave(node)


async def test_messages_are_held_until_it_starts(entered: list[Node]) -> None:
    """A peer that was quicker gets its answer then; a failure that it told is known."""
    node = Node(Peers("far"), NodeConfig())
    entered.append(node)
    entry_points.enter(node)
    introduction: Any = node.introduce(dump(("near", 0)))
    node.leave_message(dump(("near", 0, "its block raised ValueError: odd\nTraceback")))
    await node.server.handle_last_messages()
    assert not introduction.done()
    with pytest.raises(NotInWorld, match="in no world"):
        await call("near", abs, -1)
    node.start(None, WORKERS)
    assert introduction.done()
    assert not isinstance(introduction.value(), RemoteFailure)
    lost = node.members.peers["near"].error
    assert isinstance(lost, WorkerLost)
    assert lost.reason == "its block raised ValueError: odd"
    node.membership.close()
    await node.server.close(SOON)


async def test_a_node_that_cannot_listen_answers_all_the_same() -> None:
    """Whoever waits for it learns that it does not serve."""
    node = Node(Peers("far"), NodeConfig())
    introduction: Any = node.introduce(dump(("near", 0)))
    await node.server.handle_last_messages()
    with pytest.raises(OSError, match="assign"):
        node.start("192.0.2.1", WORKERS)  # an address of no machine
    with pytest.raises(WorkerLeft, match="'far' has left its world"):
        introduction.value().raise_()
    node.membership.close()
    await node.server.close(SOON)


class NoAgent:
    """Has no peers: nothing of torch runs."""

    def add_peer(self, member: PeerInfo) -> None:
        """Reach nobody."""

    def free_name(self, member: PeerInfo) -> None:
        """Forget nobody."""


def enter(node: Node, member: PeerInfo) -> None:
    """Let a worker enter the world of this node."""
    node.membership.agent = NoAgent()  # type: ignore[assignment]
    node.membership.add(member)
    node.membership.announce(member.name)


class Exiting:
    """A child that ends, nothing tells how."""

    def is_exiting(self) -> bool:
        return True

    async def wait_for_exit(self) -> None: ...

    def exit_reason(self) -> str:
        return ""


async def test_a_loss_that_is_noticed_by_a_call_that_was_not_sent() -> None:
    """It tells nothing of the calls that were."""
    async with two_ends() as ends:
        ends.near.membership._children = {"far": Exiting()}
        running = asyncio.ensure_future(call("far", gated, 1))
        await ends.gate.wait_for()
        noticed = WorkerLost("far", "its block has failed", may_have_run=False)
        assert ends.near.membership.on_disconnect("far", 1, noticed) is None
        with pytest.raises(WorkerLost, match="its block has failed; gated may have run") as raised:
            await running
        assert raised.value.may_have_run


async def test_there_is_one_current_node(entered: list[Node]) -> None:
    """The other one does not take its place, nor does its end make it leave."""
    first, second = (Node(Peers(name, WORKERS), NodeConfig()) for name in ("near", "far"))
    entered.append(first)
    entry_points.enter(first)
    with pytest.raises(RuntimeError, match="attached or in a world already"):
        entry_points.enter(second)
    entry_points.leave(second)
    assert entry_points.here is first
    entry_points.leave(first)
    assert entry_points.here is None
    for node in (first, second):
        await node.server.close(SOON)


async def test_a_lost_peer_ends_what_waits_in_both_directions() -> None:
    """At the caller it is an error, at the callee a cancellation; who asks is told of it once."""
    async with two_ends() as ends:
        running = asyncio.ensure_future(call("far", gated, 1))
        await ends.gate.wait_for()
        losses: list[Exception] = []
        error = WorkerLost("far", "for this test")
        ends.far.membership.lose("near", WorkerLost("near", "for this test"))
        ends.near.membership.report_losses(losses.append)
        ends.near.membership.report(ends.near.members.peers["far"], Event.FAILURE, error)
        ends.near.membership.lose("far", WorkerLost("far", "its connection has ended"))
        with pytest.raises(WorkerLost, match="for this test"):
            await running
        await until(lambda: ends.gate.cancelled)
        assert losses == [error]
        assert ends.near.membership.penalty("far") is None


@pytest.mark.promise("joining.flat")
@pytest.mark.parametrize("end", ["left", "failed"])
async def test_members_that_came_later_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """All but the last ones that are gone: no table of a world that changes grows for ever."""
    monkeypatch.setattr(peers_module, "KEPT_GONE", 2)
    async with two_ends() as ends:
        node = ends.near
        reading = Worker._of(node).changes()
        first = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0)
        for number in range(2, 6):
            guest = PeerInfo(f"guest{number}", number, number, "")
            enter(node, guest)
            node.membership.on_leave_message(guest.name, number, end, "odd\nTraceback")
        members = node.members
        assert [*members.peers] == ["far", "guest4", "guest5"]
        assert members.workers.keys() == {0, "near", 1, "far", 4, "guest4", 5, "guest5"}
        with pytest.raises(ValueError, match="no worker 'guest3' in this world"):
            node.pool.find("guest3")
        node.membership.probe("guest3")
        node.end_changes()
        found = [await first, *[each async for each in reading]]
        gone = "left" if end == "left" else "lost"
        assert [each.kind for each in found] == ["joined", gone] * 4


async def test_a_worker_that_leaves_takes_no_more_members() -> None:
    """Its agent may have ended when the message of a joiner comes."""
    async with two_ends() as ends:
        ends.near.end_changes()
        ends.near.add(PeerInfo("guest", 2, 2, ""))
        assert "guest" not in ends.near.members.peers


async def test_a_wait_for_a_worker_that_is_forgotten_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost: it would be waited for without end."""
    monkeypatch.setattr(peers_module, "KEPT_GONE", 1)
    async with two_ends() as ends:
        node = ends.near
        for number, name in ((2, "guest"), (3, "other")):
            guest = PeerInfo(name, number, number, "")
            enter(node, guest)
        node.membership.lose("guest", WorkerLost("guest", "for this test"))
        waiting = asyncio.ensure_future(Worker._of(node).wait_for("guest"))
        await asyncio.sleep(0)
        node.membership.lose("other", WorkerLost("other", "for this test"))
        with pytest.raises(WorkerLost, match="its name is forgotten"):
            await waiting


async def test_a_forgotten_name_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that has come again before is kept."""
    monkeypatch.setattr(peers_module, "KEPT_GONE", 0)
    async with two_ends() as ends:
        node = ends.near
        for number in (2, 3):
            guest = PeerInfo("guest", number, number, "")
            enter(node, guest)
            if number == 2:
                monkeypatch.setattr(peers_module, "KEPT_GONE", 1)
                node.membership.on_leave_message("guest", number, "left", "")
                monkeypatch.setattr(peers_module, "KEPT_GONE", 0)
        other = PeerInfo("other", 4, 4, "")
        enter(node, other)
        node.membership.on_leave_message("other", 4, "left", "")
        assert "guest" in node.members.present()


async def test_attached_peers_join_and_leave(entered: list[Node]) -> None:
    """By their epochs: a late message changes nothing."""
    node = Node(Peers("far", WORKERS, is_attached=True), NodeConfig())
    assert node.attachments is not None
    peer, reading = node.members.peers["near"], Worker._of(node).changes()
    first = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)

    def tell(epoch: int, is_attached: bool) -> None:
        assert node.attachments is not None
        message = entry_points.attach_message_of(Party("near", 0), epoch, is_attached)
        node.attachments._record(peer, entry_points.read_attach_message(message))

    for epoch, is_attached in ((1, True), (1, True), (1, False), (1, True), (2, True)):
        tell(epoch, is_attached)
    await node.attachments.on_refused(peer, 2)
    node.end_changes()
    found = [await first, *[each async for each in reading]]
    assert [each.kind for each in found] == ["joined", "left", "joined", "left"]
    await node.server.close(SOON)


async def test_a_lost_peer_that_attaches_again(entered: list[Node]) -> None:
    """It is alive, whoever waits for it goes on, and its RRefs may be sent again."""
    node = Node(Peers("far", WORKERS, is_attached=True), NodeConfig())
    peer, me = node.members.peers["near"], Worker._of(node)
    node.membership.report(peer, Event.ATTACH, epoch=1)
    node.membership.report(peer, Event.DETACH, epoch=1)
    node.membership.lose("near", WorkerLost("near", "for this test"))
    with pytest.raises(ReferenceError, match="lost or has left"):
        rrefs._check_owner(peer.worker_id)
    waiting = asyncio.ensure_future(me.wait_for("near"))
    await asyncio.sleep(0)
    node.membership.report(peer, Event.ATTACH, epoch=2)
    await waiting
    rrefs._check_owner(peer.worker_id)
    await node.server.close(SOON)


async def test_what_a_worker_that_leaves_the_group_learns(
    entered: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections end with the reason: it has left, and was not replaced."""
    node = Node(Peers("far", WORKERS, is_attached=True), NodeConfig())
    told: list[str] = []
    monkeypatch.setattr(node.server, "end_process", lambda _, text: told.append(text))
    node._on_left_group(WorkerInfo("near", 0))
    assert told == ["worker 'near' has left its world: it has left torch's group (rpc.shutdown)"]
    await node.server.close(SOON)


async def test_a_loss_that_is_known_before_the_block_begins() -> None:
    """It ends the block all the same."""
    async with two_ends() as ends:
        error, losses = WorkerLost("far", "its block raised"), list[Exception]()
        ends.near.membership.report(ends.near.members.peers["far"], Event.FAILURE, error)
        ends.near.membership.report_losses(losses.append)
        assert losses == [error]


@pytest.mark.promise("worlds.unreached")
async def test_the_error_for_silence() -> None:
    """A peer on another host that was never heard of may be out of reach: it names the address."""
    async with two_ends() as ends:
        peer = ends.near.members.peers["far"]
        found = ends.near.membership._silence_error(peer, 8.74)
        assert str(found) == "worker 'far' is lost: no sign of life for 8.74 s"
        peer.member = dataclasses.replace(peer.member, address="uv://10.0.0.2:7")
        found = ends.near.membership._silence_error(peer, 8.74)
        assert "for 8.74 s, nor any before, at uv://10.0.0.2:7. If it runs, give it" in str(found)
        peer.last_heard = 1.0
        found = ends.near.membership._silence_error(peer, 8.74)
        assert found.reason == "no sign of life for 8.74 s"


@pytest.mark.promise("lost.frozen")
async def test_no_error_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it that fails each time leaves the others: the peer that is silent is lost."""
    async with two_ends() as ends:
        node, raised = ends.near, list[Exception]()
        monkeypatch.setattr(node.membership, "_heartbeat", 0.08)
        monkeypatch.setattr(node.membership, "_ping", lambda _: None)

        def fail(_: float) -> None:
            raise OSError("for this test")

        monkeypatch.setattr(node.pool, "check_paths", fail)
        node.membership._loop.set_exception_handler(
            lambda _, each: raised.append(each["exception"])
        )
        running = asyncio.ensure_future(call("far", gated, 1))
        await ends.gate.wait_for()
        node.membership.start()
        with pytest.raises(WorkerLost, match="no sign of life"):
            async with asyncio.timeout(SOON):
                await running
        async with asyncio.timeout(SOON):
            while len(raised) <= 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


class Failed:
    """The answer to a ping that torch could not send."""

    def wait(self) -> None:
        raise RuntimeError("connection timed out")


@pytest.mark.promise("worlds.cut")
async def test_a_ping_that_fails_after_the_peer_was_heard() -> None:
    """It was sent while a link was cut: torch tells of it when the link has long been whole."""
    async with two_ends() as ends:
        peer, membership = ends.near.members.peers["far"], ends.near.membership
        peer.last_heard = time.monotonic()
        answer: Any = Failed()
        membership._on_answer(peer, peer.last_heard - 1.0, answer)
        assert not peer.is_lost
        membership._on_answer(peer, peer.last_heard + 1.0, answer)
        assert peer.is_lost


async def test_waits_are_looked_at_when_a_state_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at each ping and answer, of which a coordinator has many."""
    async with two_ends() as ends:
        looks: list[int] = []
        monkeypatch.setattr(ends.near.departures, "settle", lambda: looks.append(1))
        monkeypatch.setattr(ends.near.membership, "_ping", lambda _: None)
        peer = ends.near.members.peers["far"]
        for event in (Event.CUT, Event.ANSWER, Event.CUT, Event.LOSS, Event.LOSS):
            ends.near.membership.report(peer, event, WorkerLost("far", "for this test"))
        assert looks == [1]


async def test_an_answer_while_it_attaches(entered: list[Node]) -> None:
    """A peer that attaches meanwhile hears that it has not, and learns later that it has."""
    node = Node(Peers("far", WORKERS, is_attached=True), NodeConfig())
    entered.append(node)
    assert node.attachments is not None
    asking = Peers("near", WORKERS, is_attached=True)
    state = asking.peers["far"]

    def tell(message: Any) -> bool:
        _, _, epoch, is_attached, _ = entry_points.read_attach_message(message)
        asking.apply(state, Event.ATTACH if is_attached else Event.DETACH, epoch=epoch)
        return state.attachment is Attachment.ATTACHED

    assert not tell(entry_points.attach_message(b"").value())
    entry_points.enter(node)
    node.attachments.open()
    assert tell(node.attachments._message("near"))
    node.attachments.close()
    assert not tell(entry_points.attach_message(b"").value())
    assert state.has_told
    entry_points.leave(node)
    assert not tell(entry_points.attach_message(b"").value())
    await node.server.close(SOON)


async def test_a_device_map_for_a_worker_that_enters_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors on its devices may be sent there, and results may come back."""
    devices = {"cuda:0": "cuda:1"}
    monkeypatch.setattr(node_module, "device_map_for", lambda info: devices)
    node = Node(Peers("far", WORKERS, is_attached=True), NodeConfig())
    node._on_entered_group(WorkerInfo("late", 2))
    assert node.members.device_maps()["far"] == {"late": devices}
    assert node.pool.devices["late"].keys() == {torch.device("cuda:0")}
    assert node.members.present() == ("near", "late")
    assert node.attachments is not None
    node.attachments.close()
    await node.server.close(SOON)
