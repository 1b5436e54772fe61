"""The workers of one host of tests/network/test_weights.py.

`python weights_on_hosts.py HOST '{"arguments": "of worker"}'` runs the learner and four followers
on host 0, four followers on host 1: processes that this one forks. The learner tells what happens
in lines of JSON, and goes on when told.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import Any

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, RRef, WorkerLost, call, create, remote
from tests.support.followers import Actor, Learner
from tests.support.network_scenarios import tell, told

NEAR = [f"near{number}" for number in range(4)]
FAR = [f"far{number}" for number in range(4)]
NAMES = ["learner", *NEAR, *FAR]
SIZE = 512  # a model of 4 MiB
MANY = 50


async def lead() -> None:
    """Publish to all, of whom the last one on the other host follows later."""
    tell("entered")
    learner = await create("learner", Learner, size=SIZE)
    actors = await create([*NEAR, *FAR], Actor, size=SIZE)
    early, late = Group([*actors][:-1]), actors[-1]
    await remote(early).start()
    tell("following", sum(each.nbytes for each in (await remote(learner).state()).values()))
    await publish(learner, early, 1)
    early = await kill_relay(early)
    await publish(learner, early, 2)
    await stall(learner, early)
    await at_once(learner, early)
    await told()
    tell("late", [await remote(late).start(), list(await remote(late).values())])


async def publish(learner: RRef[Learner], actors: Group[Actor], version: int) -> None:
    await told()
    assert await remote(learner).publish() == version
    assert set(await remote(actors).wait(version)) == {version}
    assert set.union(*await remote(actors).values()) == {version}
    tell("arrived", [await remote(each).relay() for each in actors])


async def kill_relay(actors: Group[Actor]) -> Group[Actor]:
    """Kill the worker from which the others of its host receive versions; return these."""
    relay = await remote(actors[-1]).relay()
    with contextlib.suppress(WorkerLost):
        await call(relay, os.kill, await call(relay, os.getpid), signal.SIGKILL)
    return Group([each for each in actors if each.owner_name() != relay])


async def stall(learner: RRef[Learner], actors: Group[Actor]) -> None:
    """Publish while a follower behind a relay is stopped; then it goes on."""
    relay = await remote(actors[-1]).relay()
    (slow,) = [each for each in actors[-2:] if each.owner_name() != relay]
    others = Group([each for each in actors if each is not slow])
    process = await call(slow.owner_name(), os.getpid)
    await call(relay, os.kill, process, signal.SIGSTOP)
    for version in (3, 4):
        assert await remote(learner).publish() == version
        assert set(await remote(others).wait(version)) == {version}
    await call(relay, os.kill, process, signal.SIGCONT)
    tell("stalled", [await remote(slow).wait(4), list(await remote(slow).values())])


async def at_once(learner: RRef[Learner], actors: Group[Actor]) -> None:
    """Publish about each millisecond."""
    await told()
    for _ in range(MANY):
        await asyncio.gather(remote(learner).publish(), asyncio.sleep(0.001))
    await remote(actors).wait(4 + MANY)
    tell("at once", [list(each) for each in await remote(actors).values()])


async def member(rank: int, world: dict[str, Any]) -> None:
    size = len(NAMES)
    async with aiorpc.worker(NAMES[rank], rank=rank, world_size=size, **world) as me:
        await (me.serve(until="learner") if rank else lead())


def fork(rank: int, world: dict[str, Any]) -> int:
    """Run a worker in a process that ends with this one."""
    if process := os.fork():
        return process
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    asyncio.run(member(rank, world))
    os._exit(0)


if __name__ == "__main__":
    _, host, arguments = sys.argv
    own = range(1, 5) if host == "0" else range(5, 9)
    children = [fork(rank, json.loads(arguments)) for rank in own]
    if host == "0":
        tell("imported")  # which takes long on a busy machine
        asyncio.run(member(0, json.loads(arguments)))
    for child in children:
        os.waitpid(child, 0)
