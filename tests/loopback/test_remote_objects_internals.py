"""How often the RRef of a call is forked."""

import pytest
from torch.distributed import rpc

from aiorpc_torch import remote
from aiorpc_torch._wire import wire_targets

from .test_remote_objects import Slotted


@pytest.mark.usefixtures("world")
async def test_a_call_forks_an_rref_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an object that only torch finds: a fork that nobody receives would keep it alive."""
    numbers = rpc.remote("main", Slotted)
    await remote(numbers).push(1)
    forked = []
    serialize = wire_targets.serialize_rref
    monkeypatch.setattr(
        wire_targets, "serialize_rref", lambda rref: forked.append(rref) or serialize(rref)
    )
    for _ in range(3):
        await remote(numbers).total()
    assert len(forked) == 3
