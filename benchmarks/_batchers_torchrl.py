"""TorchRL's inference server in a process of its own, for `benchmarks.batchers`.

In its strongest form here: slots in shared memory. One thread sends the requests of all clients
before it waits for the first answer: that is faster than a thread for each.
"""

from collections.abc import Sequence
from importlib import import_module
from time import perf_counter
from typing import Any

import torch

from ._batchers_work import WARM_UP, Figures, Times
from ._torchrl_ways import serving

TensorDict: Any = import_module("tensordict").TensorDict


def figures(clients: Sequence[int], seconds: float) -> dict[int, Figures]:
    torch.set_num_threads(1)
    found = {}
    for number in clients:
        with serving(number) as handles:
            found[number] = asked(handles, seconds)
    return found


@torch.inference_mode()
def asked(handles: Sequence[Any], seconds: float) -> Figures:
    """Ask by each of the handles, over and over."""
    _asked(handles, WARM_UP * seconds)
    return _asked(handles, seconds)


def _asked(handles: Sequence[Any], seconds: float) -> Figures:
    states = torch.rand(len(handles), 4)
    times = Times()
    while perf_counter() < times.begun + seconds:
        sent = []
        for handle, state in zip(handles, states, strict=True):
            start = perf_counter()
            sent.append((start, handle.submit(TensorDict({"observation": state}))))
        for start, future in sent:
            int(future.result()["action"])
            times.add(start)
    return times.figures()
