"""The devices and maps that torch's agent is made with. The agent is torch's; no tensor is sent."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from aiorpc_torch._torch import agent as agent_module
from aiorpc_torch._torch.agent import Agent, PeerInfo, process_worker_id
from aiorpc_torch._torch.devices import NamedDeviceMaps

ZERO, ONE = torch.device("cuda:0"), torch.device("cuda:1")

Maps = dict[str, NamedDeviceMaps]

MAPS: Maps = {"a": {"a": {"cuda:0": "cuda:0"}}, "b": {"a": {"cuda:1": "cuda:0"}}, "c": {}}


class Recorded:
    """What was done to CUDA and to torch's agent, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def init(self) -> None:
        self.log.append(("init",))

    def new_agent(self, *args: Any) -> Any:
        *_, options, reverse, devices = args
        self.log.append(("agent", reverse, devices, options.device_maps))
        return _Agent(self, rpc.TensorPipeAgent(*args))


class _Agent:
    """torch's agent, with a record of its changes."""

    def __init__(self, recorded: Recorded, agent: Any) -> None:
        self._recorded = recorded
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def _update_group_membership(self, info: Any, devices: Any, maps: Any, is_join: bool) -> None:
        self._recorded.log.append(("join" if is_join else "leave", info.name, devices, maps))
        self._agent._update_group_membership(info, devices, maps, is_join)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(torch.cuda, "init", found.init)
    monkeypatch.setattr(agent_module, "TensorPipeAgent", found.new_agent)
    unwrapped = agent_module.init_rpc_states
    monkeypatch.setattr(agent_module, "init_rpc_states", lambda each: unwrapped(each._agent))
    return found


@pytest.fixture
def started(recorded: Recorded) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def start(maps: Maps, **options: Any) -> Agent:
        number = process_worker_id() or 0
        options = {"threads": 2, "transports": None, "first_world": number == 0, **options}
        agents.append(Agent("a", number, device_maps=maps, **options))
        return agents[-1]

    yield start
    for each in agents:
        each.stop()


def peer(number: int, maps: NamedDeviceMaps) -> PeerInfo:
    return PeerInfo("b", 1, number, "tcp://127.0.0.1:9", maps)


def test_the_agent_knows_every_device_before_a_message_can_arrive(
    recorded: Recorded, started: Callable[..., Agent]
) -> None:
    """CUDA is initialized first. The maps of the worker's calls to itself are among them."""
    agent = started(MAPS)
    own = {"a": {ZERO: ZERO}}
    reverse = {**own, "b": {ZERO: ONE}}
    assert recorded.log == [("init",), ("agent", reverse, [ZERO], own)]
    assert agent.routes.used == [ZERO]


def test_without_maps_cuda_is_not_touched(
    recorded: Recorded, started: Callable[..., Agent]
) -> None:
    started({"a": {}, "b": {}}).add_peer(peer(77, {}))
    assert recorded.log == [("agent", {}, [], {}), ("join", "b", [], {})]


def test_a_replacement_process_may_have_other_maps(
    recorded: Recorded, started: Callable[..., Agent]
) -> None:
    """Those of the old process are forgotten, and the worker's own are kept."""
    agent = started(MAPS)
    agent.add_peer(peer(77, MAPS["b"]))
    del recorded.log[:]
    past = agent.replace_peer(peer(78, {"a": {"cuda:0": "cuda:1"}}))
    own = {"a": {ZERO: ZERO}}
    assert recorded.log == [
        ("leave", "b", [ZERO], own),
        ("join", past, [ZERO], own),
        ("init",),
        ("join", "b", [ZERO, ONE], {**own, "b": {ONE: ZERO}}),
    ]
    assert agent.routes.answers["b"] == {ONE: ZERO}


def test_channels(recorded: Recorded, started: Callable[..., Agent]) -> None:
    """torch knows their names."""
    with pytest.raises(RuntimeError, match="Unknown channel: nope"):
        started({"a": {}}, channels=["nope"])
    started({"a": {}}, channels=["basic"])
    assert recorded.log[-1][0] == "agent"
