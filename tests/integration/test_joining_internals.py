"""Another program at the address of a worker that died."""

import asyncio
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLost, call
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch.testing import kill
from tests.support import actors
from tests.support.servers import serving

from .test_joining import SOON


def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speak first, as servers of many protocols do."""
    writer.write(b"220 not torch\r\n")


async def names_of_lost() -> list[str]:
    """The peers that this worker has lost."""
    return [*entry_points.here.pool._members.lost()]  # type: ignore[union-attr]


@pytest.mark.promise("joining.death")
async def test_another_program_at_the_address_of_one_that_died() -> None:
    """Those that enter later do not connect there: torch would end their processes."""
    async with asyncio.timeout(2 * SOON), aiorpc.local_world(0) as me:
        await me.start("dead")
        address = urlsplit(me._node.members.peers["dead"].member.address)
        assert await call("dead", abs, -1) == 1  # so this process does not connect there later
        kill("dead")
        with pytest.raises(WorkerLost):
            await call("dead", asyncio.sleep, 600)
        async with serving(asyncio.start_server(greet, address.hostname, address.port)):
            await me.start("late")
            assert await call("late", actors.ask_back, me.name) == me.name
            assert await call("late", names_of_lost) == ["dead"]


@pytest.mark.promise("joining.death")
async def test_a_child_that_has_registered_is_known_after_its_end() -> None:
    """No process follows it, and who waits for one is told."""
    async with asyncio.timeout(2 * SOON), aiorpc.local_world(["a"]) as me:
        member = me._node.members.peers["a"].member
        kill("a")
        with pytest.raises(WorkerLost, match="it is not restarted"):
            await call("a", asyncio.sleep, 600)
        with pytest.raises(WorkerLost, match="it is not restarted"):
            await me.wait_for("a")
        assert me._node.membership.add(replace(member, worker_id=member.worker_id + 1))
        with pytest.raises(WorkerLost, match="it is not restarted"):
            await asyncio.wait_for(me.wait_for("a"), SOON / 4)
