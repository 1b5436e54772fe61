"""Weights to four followers on each of two machines: what crosses the line between them."""

import contextlib
import json

import pytest

from tests.support.network_namespaces import (
    ADDRESSES,
    HERE,
    LINK,
    Machine,
    Node,
    machines as machines,
    running,
)

WHERE = f"tcp://{ADDRESSES[0]}:29500"
MANY = 50  # versions, as in weights_on_hosts.py
WORLD = {
    "init_method": WHERE,
    "interface": LINK,
    "channels": ["basic"],  # others copy between processes of one machine, past the line
    "heartbeat": 60.0,  # longer than a follower is stopped
}


@pytest.mark.promise("training.relays", "training.once")
async def test_four_followers_on_each_of_two_machines(machines: tuple[Machine, Machine]) -> None:
    """Each version crosses the line once, also after the relay was killed."""
    async with contextlib.AsyncExitStack() as stack:
        script = str(HERE / "weights_on_hosts.py")
        learner, far = [
            await stack.enter_async_context(running(machine, script, str(host), json.dumps(WORLD)))
            for host, machine in enumerate(machines)
        ]
        await learner.hears("imported")
        await learner.hears("entered")
        size = await learner.hears("following")
        count = Count(machines[0], size)
        (relay,) = await step(learner)
        assert 1.0 <= count.more() < 1.1
        (other,) = await step(learner)
        assert other != relay
        assert 1.0 <= count.more() < 1.1
        assert await learner.hears("stalled") == [4, [4.0]]
        assert 2.0 <= count.more() < 2.1
        await check_rest(learner, count)
        for node in (learner, far):
            code, errors = await node.end()
            assert code == 0, errors


async def step(learner: Node) -> set[str]:
    """Let the learner publish; return the relays of the followers."""
    learner.tell()
    return {relay for relay in await learner.hears("arrived") if relay}


async def check_rest(learner: Node, count: "Count") -> None:
    """Followers skip versions that come too fast. One that is late gets the newest."""
    learner.tell()
    assert await learner.hears("at once") == [[4.0 + MANY]] * 6
    assert 1.0 <= count.more() < 1.1 * MANY
    learner.tell()
    assert await learner.hears("late") == [4 + MANY, [4.0 + MANY]]
    assert count.more() < 1.1


class Count:
    """The bytes that a machine has sent, as multiples of a size."""

    def __init__(self, machine: Machine, size: int) -> None:
        self._machine, self._size = machine, size
        self._before = machine.sent()

    def more(self) -> float:
        """Return how much was sent since the last time."""
        before, self._before = self._before, self._machine.sent()
        return (self._before - before) / self._size
