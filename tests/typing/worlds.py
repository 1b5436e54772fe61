"""Worlds, membership and TLS as a user writes them: checked by mypy and pyright, never run."""

from pathlib import Path
from typing import Any, assert_type

from aiorpc_torch import RRef, Tls, call, local_world, members, remote, worker
from aiorpc_torch.types import LocalWorker, NamedMembers, Worker


class Env:
    async def step(self, action: int) -> float:
        return float(action)


async def between_hosts() -> None:
    """Certificates are files; a process may join a world that runs."""
    tls = Tls("worker.pem", Path("worker.key"), ca="ca.pem")
    async with worker("env7", join=True, port=29_500, tls=tls) as me:
        assert_type(me, Worker)
    worker("env7", tls="worker.pem")  # type: ignore[arg-type]  # pyright: ignore
    Tls("worker.pem", "worker.key")  # type: ignore[call-arg]  # pyright: ignore


async def grow() -> None:
    async with local_world(["env0"], max_restarts=1) as me:
        assert_type(me, LocalWorker)
        assert_type(await me.start("env1"), None)
        await me.stop("env1")
        await me.start(1)  # type: ignore[arg-type]  # pyright: ignore
        await me.serve()


async def groups_that_change(rref: RRef[Env]) -> None:
    """The class of the members is said where they are named."""
    assert_type(members("env"), NamedMembers[Any])
    envs: NamedMembers[Env] = members("env")
    assert_type(await envs.wait(2), None)
    assert_type([*envs], list[RRef[Env]])
    assert_type(rref in envs, bool)
    assert_type(await call(envs, Env.step, 3), list[float])
    assert_type(await call(envs.any(), Env.step, 3), float)
    async for member, _ in remote(envs).step(3):
        assert_type(member, RRef[Env])
    async for result in envs.map(Env.step, range(3), in_flight=4):
        assert_type(result, float)
    members(0)  # type: ignore[arg-type]  # pyright: ignore
