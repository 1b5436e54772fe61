"""A Ray Serve deployment with `@serve.batch`, for `benchmarks.batchers`.

In its strongest form here: Ray's throughput-optimized settings, asked by a `DeploymentHandle` and
not over HTTP, with arrays, which Ray pickles faster than tensors. A batch waits for nobody: a
lone client would wait for the whole of it.
"""

import asyncio
import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ._batchers_work import Figures, asked
from .batching import actions, new_policy

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
ray: Any = importlib.import_module("ray")
serve: Any = importlib.import_module("ray.serve")


class Agent:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.policy = new_policy()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0)  # type: ignore[untyped-decorator]
    async def act(self, states: list[Any]) -> list[int]:
        return actions(self.policy, torch.from_numpy(np.stack(states)))


def figures(clients: Sequence[int], seconds: float) -> dict[int, Figures]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    try:
        serve.start(proxy_location="Disabled")
        # One replica, as there is one server elsewhere; by default it takes five requests at once.
        deployment = serve.deployment(Agent).options(max_ongoing_requests=1_000)
        handle = serve.run(deployment.bind(), route_prefix=None)
        return asyncio.run(_figures(handle, clients, seconds))
    finally:
        ray.shutdown()  # with Serve, whose own shutdown waits half a minute for its controller


async def _figures(handle: Any, clients: Sequence[int], seconds: float) -> dict[int, Figures]:
    act = handle.options(method_name="act").remote
    states = np.random.default_rng(0).random((max(clients), 4), dtype=np.float32)
    return {each: await asked(act, [*states[:each]], seconds) for each in clients}
