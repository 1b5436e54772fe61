"""TorchRL's inference server and weight synchronization, for `benchmarks.torchrl` and `peers`.

Each in the form that its documentation and its own benchmark use on one machine: the server in a
process with slots in shared memory, and the two schemes for processes. A process with several
environments sends all of its requests before it waits for the first answer.
"""

import importlib
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from examples._learning import CartPole

from .batching import new_policy

PATIENCE = 120.0
"""Seconds until every process has imported torchrl."""

spawn = multiprocessing.get_context("spawn")


class Choice(nn.Module):
    """The best action of the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = new_policy()

    def forward(self, states: Tensor) -> Tensor:
        best: Tensor = self.policy(states).argmax(-1)
        return best


def served() -> Any:
    """Return the policy as TorchRL's server runs it, in its process."""
    torch.set_num_threads(1)
    module = importlib.import_module("tensordict.nn").TensorDictModule
    return module(Choice(), in_keys=["observation"], out_keys=["action"])


def play(clients: list[Any], seconds: float, ready: Any, counts: Any) -> None:
    """Play an environment for each client; put the steps a second."""
    torch.set_num_threads(1)
    wrap: Any = importlib.import_module("tensordict").TensorDict
    games = [CartPole(number) for number in range(len(clients))]
    states = [game.reset() for game in games]
    with torch.inference_mode():
        clients[0](wrap({"observation": states[0]}))  # warms up
        ready.wait(PATIENCE)
        steps, begun = 0, time.perf_counter()
        while (took := time.perf_counter() - begun) < seconds:
            futures = [
                client.submit(wrap({"observation": state}))
                for client, state in zip(clients, states, strict=True)
            ]
            for number, (game, future) in enumerate(zip(games, futures, strict=True)):
                state, _, done = game.step(int(future.result()["action"]))
                states[number] = game.reset() if done else state
            steps += len(games)
    counts.put(steps / took)


@contextmanager
def serving(size: int) -> Iterator[list[Any]]:
    """Run the server in a process of its own; yield so many clients of it."""
    wrap: Any = importlib.import_module("tensordict").TensorDict
    served_by: Any = importlib.import_module("torchrl.modules.inference_server")
    request = wrap({"observation": torch.zeros(4)})
    response = wrap(
        {
            "action": torch.zeros((), dtype=torch.long),
            "policy_version": torch.zeros((), dtype=torch.long),
        }
    )
    transport = served_by.ProcessSlotTransport(request, response, num_slots=size, ctx=spawn)
    server = served_by.ProcessInferenceServer(
        policy_factory=served,
        transport=transport,
        request_spec=request,
        max_batch_size=size,
        output_device="cpu",
        mp_context=spawn,
    )
    clients = server.clients(size)
    with server:
        yield clients


def inference(processes: int, environments: int, seconds: float) -> float:
    """Return the steps a second of all environments."""
    ready, counts = spawn.Barrier(processes), spawn.Queue()
    with serving(processes * environments) as clients:
        shares = [clients[first::processes] for first in range(processes)]
        with children(play, [(each, seconds, ready, counts) for each in shares]):
            return float(sum(counts.get(timeout=PATIENCE + seconds) for _ in range(processes)))


@contextmanager
def children(main: Any, arguments: list[tuple[Any, ...]]) -> Iterator[None]:
    """Run a function in a process for each tuple of arguments."""
    started = [spawn.Process(target=main, args=each, daemon=True) for each in arguments]
    for each in started:
        each.start()
    try:
        yield
    finally:
        for each in started:
            each.join(10.0)
            each.kill()
            each.join()


# ── weights ─────────────────────────────────────────────────────────────────────────────────────


class Layers(nn.Module):
    """Parameters of some bytes altogether."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.ones(elements) for _ in range(tensors))


def receive(scheme: Any, number: int, tensors: int, elements: int, ended: Any) -> None:
    """Receive weights until the end."""
    torch.set_num_threads(1)
    scheme.init_on_receiver(model_id="policy", worker_idx=number, model=Layers(tensors, elements))
    scheme.connect(worker_idx=number)
    ended.wait()


def weights(scheme: str, receivers: int, tensors: int, elements: int, repeat: int) -> list[float]:
    """Return the seconds of each sending, until all receivers have acknowledged it."""
    whole: Any = importlib.import_module("tensordict").TensorDict
    sender = getattr(importlib.import_module("torchrl.weight_update"), scheme)()
    model = Layers(tensors, elements)
    sender.init_on_sender(
        model_id="policy",
        weights=whole.from_module(model),
        devices=[torch.device("cpu")] * receivers,
        num_workers=receivers,
        ctx=spawn,
    )
    ended = spawn.Event()
    each = [(sender, number, tensors, elements, ended) for number in range(receivers)]
    with children(receive, each):
        sender.connect()
        seconds = []
        for _ in range(repeat + 3):  # the first ones warm up
            begun = time.perf_counter()
            sender.send(whole.from_module(model))
            seconds.append(time.perf_counter() - begun)
        ended.set()
    return seconds[3:]
