"""TorchRL's inference server in a thread of its clients' process, for `benchmarks.batchers`.

With a slot for each client, and asked as in `_batchers_torchrl`: so it is the fastest.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from ._batchers_torchrl import asked
from ._batchers_work import Figures
from ._torchrl_ways import served

served_by: Any = import_module("torchrl.modules.inference_server")


def figures(clients: Sequence[int], seconds: float) -> dict[int, Figures]:
    torch.set_num_threads(1)
    return {each: _figures(each, seconds) for each in clients}


def _figures(clients: int, seconds: float) -> Figures:
    transport = served_by.SlotTransport(clients)
    server = served_by.InferenceServer(
        served(), transport, max_batch_size=clients, collect_stats=False
    )
    with server:
        return asked([transport.client() for _ in range(clients)], seconds)
