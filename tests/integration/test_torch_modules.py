"""What torch's own RPC pickler sends: script modules, script functions and RemoteModules."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiorpc_torch import call, create, fetch, remote
from aiorpc_torch.testing import world
from tests.support.kinds_of_objects import increase, script, trace
from tests.support.scripts import program, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),  # of torch.jit.load itself
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

X = torch.ones(1, 2)


def apply(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)


def made(kind: str) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    return script(net) if kind == "script" else trace(net)


def same(value: Any) -> Any:
    return value


def load(path: Path) -> Any:
    """Load the module without the warning of `torch.jit.load`."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(path)


@pytest.mark.promise("calls.torch_modules")
@pytest.mark.parametrize("kind", ["script", "trace"])
async def test_script_modules(kind: str, tmp_path: Path) -> None:
    """As arguments, results, in containers, behind RRefs, as copies, for one worker and many."""
    async with world(["a", "b"]), asyncio.timeout(60.0):
        net = made(kind)
        expected = apply(net, X)
        assert torch.equal(await call("a", apply, net, X), expected)
        assert torch.equal((await call(["a", "b"], apply, net, X))[1], expected)
        back = (await call("a", same, {"nets": [net, net]}))["nets"]
        assert isinstance(back[0], torch.jit.ScriptModule)
        assert back[0] is back[1]
        assert torch.equal(apply(back[0], X), expected)
        assert back[0].state_dict().keys() == net.state_dict().keys()
        behind = await create("a", made, kind)
        assert torch.equal((await remote(behind)(X)).detach(), expected)
        assert torch.equal((await remote(behind).forward(X)).detach(), expected)
        assert torch.equal(apply(await fetch(behind), X), expected)
        torch.jit.save(net, tmp_path / "net.pt")
        loaded = await create("a", load, tmp_path / "net.pt")
        assert torch.equal((await remote(loaded)(X)).detach(), expected)


@pytest.mark.promise("calls.torch_modules")
async def test_torchs_own_load_is_a_factory(tmp_path: Path) -> None:
    """`create(worker, torch.jit.load, path)`."""
    async with world(), asyncio.timeout(60.0):
        torch.jit.save(made("script"), tmp_path / "net.pt")
        net = await create("main", torch.jit.load, tmp_path / "net.pt")
        assert torch.equal((await remote(net)(X)).detach(), apply(made("script"), X))


def local_script_function() -> Any:
    def double(x: Tensor) -> Tensor:
        return x * 2

    return script(double)


@pytest.mark.promise("calls.torch_modules")
async def test_script_functions() -> None:
    """As what is called, arguments and results: by name, or with their code if they have none."""
    async with world(["a"]), asyncio.timeout(60.0):
        double = local_script_function()
        assert torch.equal(await call("a", increase, X), X + 1)
        assert torch.equal(await call("a", apply, increase, X), X + 1)
        assert await call("a", same, increase) is increase
        assert torch.equal(await call("a", double, X), X * 2)
        assert torch.equal(await call("a", apply, double, X), X * 2)
        assert torch.equal((await call("a", local_script_function))(X), X * 2)
        assert torch.equal(await fetch(await create("a", increase, X)), X + 1)
        with pytest.raises(Exception, match="increase"):  # the error names the function
            await call("a", increase, "text")


REMOTE = """
import torch
from torch import nn
from aiorpc_torch import Group, call, remote
from torch.distributed.nn import RemoteModule
from tests.integration.test_torch_modules import X, apply, same


async def main():
    async with aiorpc.local_world(["a", "b"]):
        net = await asyncio.to_thread(RemoteModule, "a/cpu", nn.Linear, (2, 2))
        expected = await asyncio.to_thread(net, X)
        for worker in ("a", "b", "main"):
            assert torch.equal(await call(worker, apply, net, X), expected)
        back = (await call("b", same, {"net": net}))["net"]
        assert type(back) is RemoteModule
        assert torch.equal(await asyncio.to_thread(back, X), expected)
        assert torch.equal(await asyncio.to_thread(back.forward_async(X).wait), expected)
        assert back.get_module_rref().owner_name() == "a"
        assert torch.equal(await remote(back.get_module_rref())(X), expected)
        for wrong in (remote, lambda m: Group([m]), lambda m: call(m, apply, X)):
            try:
                wrong(net)
            except TypeError as exc:
                assert "a RemoteModule: pass its get_module_rref()" in str(exc), exc
            else:
                raise AssertionError("accepted")
        print("done")


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.promise("calls.torch_modules")
def test_remote_modules(tmp_path: Path) -> None:
    """They arrive with their module's RRef, at workers that have not imported torch's class.

    In a process's first world: torch itself cannot send an RRef of `rpc.remote` in a later one.
    """
    done = run(program(tmp_path, REMOTE))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


async def test_modules_in_autograd_contexts() -> None:
    """A script module behind an RRef gives gradients."""
    from aiorpc_torch import autograd

    async with world(["a"]), asyncio.timeout(60.0):
        net = await create("a", made, "script")
        params = await autograd.parameter_rrefs(net)
        opt = await autograd.DistributedOptimizer.create(torch.optim.SGD, params, lr=1.0)
        before = [await fetch(each) for each in params]
        async with autograd.context() as ctx:
            loss = (await remote(net)(X)).sum()
            await ctx.backward(loss)
            await opt.step(ctx)
        after = [await fetch(each) for each in params]
        assert all(torch.equal(new, old - 1) for new, old in zip(after, before, strict=True))
