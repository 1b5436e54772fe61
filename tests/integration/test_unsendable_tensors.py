"""Tensors that cannot be sent, between two processes: both live on, with the same connection."""

from typing import Any

import pytest
import torch

from aiorpc_torch import call, create, fetch, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Workers, connection
from tests.support.tensor_kinds import UNSENDABLE, WARNINGS, make
from tests.support.tensor_shelf import TensorShelf
from tests.support.tensor_ways import TENSOR_WAYS, set_way

pytestmark = pytest.mark.filterwarnings(WARNINGS)


def give(kind: str) -> Any:
    """Return a tensor of that kind."""
    return make(kind)


@pytest.mark.slow
@pytest.mark.promise("transport.apart")
@pytest.mark.parametrize("way", TENSOR_WAYS)
async def test_both_processes_live_on(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """As an argument, as a result, and of an object that is fetched."""
    set_way(monkeypatch, way)
    await workers(["a"])
    shelf = remote(await create("a", TensorShelf))
    await shelf.echo(0)
    number = connection("a").number
    for kind in UNSENDABLE:
        made = await create("a", give, kind)
        for attempt in (shelf.echo([make(kind)]), call("a", give, kind), fetch(made)):
            with pytest.raises(ValueError, match="cannot be sent: "):
                await attempt
    x = torch.ones(50_000)
    assert torch.equal(await shelf.echo(x), x)
    assert connection("a").number == number
    assert stats().in_flight == 0
