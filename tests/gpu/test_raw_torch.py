"""torch RPC alone, without this library, between two processes that use one device.

If this fails, the machine or torch is the cause: CUDA IPC may be forbidden in a container.
AIORPC_TEST_CHANNELS=cuda_basic,basic then lets the other tests run.
"""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

from tests.support.cuda_actors import CHANNELS, GPU, HERE

pytestmark = GPU

NAMES = ["caller", "callee"]


def echo(tensor: Tensor) -> Tensor:
    return tensor + 1


def live(rank: int, where: str, channels: list[str] | None, report: Any) -> None:
    torch.cuda.init()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=where,
        rpc_timeout=30,
        device_maps={name: {0: 0} for name in NAMES},
        _transports=["uv"],
        _channels=channels,
    )
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        found = [rpc.rpc_sync("callee", echo, args=(torch.ones(4, device=HERE),)) for _ in range(3)]
        report.send([(str(each.device), each.tolist()) for each in found])
    rpc.shutdown()


@pytest.mark.parametrize("channels", [CHANNELS, ["cuda_basic", "basic"]])
def test_an_echo(channels: list[str] | None, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    report, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(target=live, args=(rank, f"file://{tmp_path}/store", channels, theirs))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        assert report.poll(60), "no answer: see above for what the processes say"
        assert report.recv() == [("cuda:0", [2.0] * 4)] * 3
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
        report.close()
