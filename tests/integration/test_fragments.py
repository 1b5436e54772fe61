"""Fragments of the reference pages, run in a world with the objects that they name."""

import ast
import asyncio
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import call, create, training
from aiorpc_torch.testing import Workers, kill
from tests.support import guides, page_objects as objects

WORKERS = ["ps", "a", "b", "env0", "env1"]
PAGES = ["calls", "groups", "batching", "autograd"]


async def names_for(fragment: str) -> dict[str, Any]:
    """Return the objects that a fragment of a page takes for granted."""
    names: dict[str, Any] = {"torch": torch, "rpc": rpc, "aiorpc": aiorpc, "asyncio": asyncio}
    names |= {name: thing for name, thing in vars(objects).items() if not name.startswith("_")}
    names |= {
        "Any": Any,
        "x": torch.ones(2),
        "y": torch.ones(2),
        "n": 3,
        "Grads": Tensor,
        "Parameters": Tensor,
    }
    net = await create("a", objects.Net)
    names |= {
        "rref": net,
        "net": net,
        "function": objects.double,
        "torch_future": objects.finished_future(),
    }
    names |= {"seeds": [1, 2], "agent": net, "xs": range(5), "weights": torch.ones(100_000)}
    if "members(" in fragment:
        for name in ("a", "b"):
            await call(name, objects.register_env)
    else:
        names["envs"] = await aiorpc.create(["env0", "env1"], objects.Env, net, 1)
    if "infer(x)" in fragment:
        names["x"] = 1
    names["a"], names["b"] = await create("a", objects.Pair), await create("b", objects.Pair)
    names["ps"] = names["learner"] = await create("ps", objects.ParameterServer)
    names["grads"] = torch.ones(3 if "timeout" in fragment else 2)
    names["models"] = await aiorpc.create(["a", "b"], objects.Model)
    names["encoder"], names["my_head"] = await create("a", nn.Linear, 2, 2), nn.Linear(2, 2)
    names["loss_fn"] = nn.functional.mse_loss
    return names


def run_as_torch_client(fragment: str, server: Any) -> None:
    """Run a fragment of plain torch calls, in a thread of a worker."""
    names = {"rref": server, "grads": torch.ones(3), "a": 1, "b": 2}
    exec(fragment, {"rpc": rpc, **vars(objects), **names})


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
async def test_fragments_run(name: str, workers: Workers) -> None:
    await workers(WORKERS, name="server")
    fragments = [
        each for each in guides.read(guides.DOCS / f"{name}.md").unnamed if "__main__" not in each
    ]
    assert fragments
    for fragment in fragments:
        if "rref.rpc_sync" in fragment:
            server = await create("ps", objects.ParameterServer)
            # By a process in its first world, which this one may not be.
            await call("a", run_as_torch_client, fragment, server)
            continue
        names = await names_for(fragment)
        if "WorkerLost as lost" in fragment:
            kill("env1")
        code = compile(fragment, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result


async def learn(names: dict[str, Any]) -> None:
    """Do what a page's learner and its other actors do, as far as their objects are there."""
    while True:
        await asyncio.sleep(0.01)
        if "weights" in names:
            await names["weights"].publish(names["model"].state_dict())
        if "replay" in names and isinstance(names["replay"], training.Replay):
            for item in range(1_000):
                await names["replay"].insert(item)


TRAINERS = ["trainer0", "trainer1"]


async def publish_on_a_trainer(fragment: str) -> None:
    exec(fragment, {"aiorpc": aiorpc, "Weights": training.Weights, "model": nn.Linear(4, 2)})


@pytest.mark.slow
async def test_fragments_on_training_run(workers: Workers) -> None:
    """One after another: the later ones use what the first ones have made."""
    await workers(TRAINERS, name="learner")
    names: dict[str, Any] = {"aiorpc": aiorpc}
    names |= {name: getattr(training, name) for name in training.__all__}
    names |= {"model": nn.Linear(4, 2), "transition": 1}
    learning = asyncio.create_task(learn(names))
    for fragment in guides.read(guides.DOCS / "training.md").unnamed:
        if "insert(transition" in fragment:
            limit = training.StalenessLimit(max_staleness=2, max_in_flight=1)
            names["ticket"] = await limit.ticket().__aenter__()
        if "Weights(model.state_dict()))" in fragment:
            for trainer in TRAINERS:
                await call(trainer, publish_on_a_trainer, fragment)
            continue
        is_replaced = "recover(" in fragment  # as if the learner had died
        if is_replaced:
            aiorpc.unregister("policy")
        code = compile(fragment, "training", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        own = {**names} if is_replaced or "on=[" in fragment else names
        if inspect.isawaitable(result := eval(code, own)):
            async with asyncio.timeout(30.0):
                await result
        if "on=[" in fragment:
            await own["policy"].aclose()
        if is_replaced:
            aiorpc.unregister("policy")
            aiorpc.register("policy", names["weights"])
    learning.cancel()
    await names["policy"].aclose()


def test_every_fragment_is_on_a_page_that_is_run() -> None:
    """No other page of the reference has a block of Python that is no file."""
    others = [
        each
        for each in guides.DOCS.glob("*.md")
        if each.stem not in {*PAGES, "training", "index", "testing"}
    ]
    assert not [each.name for each in others if guides.read(each).unnamed]
