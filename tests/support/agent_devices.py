"""What torch's agent is told of devices: printed, for `tests/unit/torch/test_agent.py`.

The agent is torch's. It needs a process of its own: torch keeps the devices of a process's first
agent for its RRefs, and there may be no such device. No tensor is sent.
"""

from typing import Any

import torch
from torch.distributed import rpc

from aiorpc_torch._torch import agent as agent_module
from aiorpc_torch._torch.agent import Agent, PeerInfo, process_worker_id
from aiorpc_torch._torch.devices import NamedDeviceMaps

Maps = dict[str, NamedDeviceMaps]

MAPS: Maps = {"a": {"a": {"cuda:0": "cuda:0"}}, "b": {"a": {"cuda:1": "cuda:0"}}, "c": {}}

log: list[tuple[Any, ...]] = []


def init() -> None:
    log.append(("init",))


def new_agent(*args: Any) -> Any:
    *_, options, reverse, devices = args
    log.append(("agent", plain(reverse), plain(devices), plain(options.device_maps)))
    return NotedAgent(rpc.TensorPipeAgent(*args))


class NotedAgent:
    """torch's agent, with a note of each change."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)

    def _update_group_membership(self, info: Any, devices: Any, maps: Any, is_join: bool) -> None:
        log.append(
            ("join" if is_join else "leave", info.name, info.id, plain(devices), plain(maps))
        )
        self.agent._update_group_membership(info, devices, maps, is_join)


def plain(value: Any) -> Any:
    """The value with devices as text."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    return [*map(plain, value)] if isinstance(value, list) else str(value)


def start(maps: Maps) -> Agent:
    number = process_worker_id() or 0
    first = process_worker_id() is None
    return Agent("a", number, threads=2, transports=None, device_maps=maps, first_world=first)


def peer(number: int, maps: NamedDeviceMaps) -> PeerInfo:
    return PeerInfo("b", 1, number, "tcp://127.0.0.1:9", maps)


def with_maps() -> Agent:
    return start(MAPS)


def without_maps() -> Agent:
    agent = start({"a": {}, "b": {}})
    agent.add_peer(peer(77, {}))
    return agent


def replaced() -> Agent:
    agent = start(MAPS)
    agent.add_peer(peer(77, MAPS["b"]))
    log.clear()
    agent.free_name(peer(77, MAPS["b"]))
    agent.add_peer(peer(78, {"a": {"cuda:0": "cuda:1"}}))
    log.append(("routes", plain(agent.routes.answers["b"])))
    return agent


def main() -> None:
    torch.cuda.init = init
    set_agent = agent_module.init_rpc_states
    vars(agent_module)["TensorPipeAgent"] = new_agent
    vars(agent_module)["init_rpc_states"] = lambda noted: set_agent(noted.agent)
    found = {}
    for scenario in (with_maps, without_maps, replaced):
        log.clear()
        agent = scenario()
        found[scenario.__name__] = log[:]
        agent.stop()
        agent.release()
    print(found)


if __name__ == "__main__":
    main()
