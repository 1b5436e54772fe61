"""torch RPC alone, without this library, between two processes that use one device.

If this fails, the machine or torch is the cause. CUDA IPC may be forbidden in a container: then
AIORPC_TORCH_CHANNELS=cuda_basic,basic lets the other tests run, and `python -m tests.gpu` sets it.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

from tests.support.cuda_actors import GPU, HERE, REHEARSED, needs_device

pytestmark = GPU

NAMES = ["caller", "callee"]
IPC = ["cuda_ipc", "basic"]
OVER_CPU = ["cuda_basic", "basic"]
SECONDS = 150.0 if REHEARSED else 20.0  # for an answer, and for the end of both processes
FOUND = [(str(HERE), [2.0] * 4)] * 3

_has_ipc: list[str] = []
"""The error of `test_cuda_ipc`, "" for none."""


def test_over_the_cpu(tmp_path: Path) -> None:
    assert echoes(None if REHEARSED else OVER_CPU, tmp_path) == FOUND


@needs_device
def test_cuda_ipc(tmp_path: Path) -> None:
    """Without this channel no tensor on a device can travel, so it is used if that is possible."""
    found = echoes(IPC, tmp_path)
    _has_ipc.append("" if found == FOUND else f"no CUDA IPC between processes here: {found}")
    if _has_ipc[0]:
        pytest.skip(_has_ipc[0])


@needs_device
def test_the_channels_of_the_others(tmp_path: Path) -> None:
    """Those of the environment, else what TensorPipe chooses."""
    chosen, (no_ipc, *_) = chosen_channels(), [*_has_ipc, ""]
    found = echoes(chosen, tmp_path)
    if found != FOUND and chosen is None and no_ipc:
        pytest.skip(f"{no_ipc}; AIORPC_TORCH_CHANNELS=cuda_basic,basic is needed")
    assert found == FOUND


def chosen_channels() -> list[str] | None:
    """Return the channels of the environment, None if it has none."""
    names = os.environ.get("AIORPC_TORCH_CHANNELS", "").split(",")
    return [name for name in names if name] or None


def echoes(channels: list[str] | None, folder: Path) -> Any:
    """Return what three echoes of a tensor on the device found, or the error of a process."""
    context = multiprocessing.get_context("spawn")
    report, theirs = context.Pipe(duplex=False)
    store = f"file://{folder}/store"
    processes = [
        context.Process(target=live, args=(rank, store, channels, theirs)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        return _outcome(report, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        report.close()


def _outcome(report: Any, processes: Sequence[Any]) -> Any:
    wait([report, *(process.sentinel for process in processes)], SECONDS)
    found = report.recv() if report.poll() else "no answer"
    end = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, end - time.monotonic()) if found == FOUND else 0.0)
    codes = [process.exitcode for process in processes]
    return found if codes == [0, 0] else f"{found}; exit codes {codes}"


def live(rank: int, store: str, channels: list[str] | None, report: Any) -> None:
    if not REHEARSED:
        torch.cuda.init()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=store,
        rpc_timeout=SECONDS,
        device_maps={} if REHEARSED else {name: {0: 0} for name in NAMES},
        _transports=["uv"],
        _channels=channels,
    )
    try:
        rpc.init_rpc(NAMES[rank], rank=rank, world_size=2, rpc_backend_options=options)
        if rank == 0:
            report.send([ask() for _ in range(3)])
        rpc.shutdown()
    except Exception as exc:
        report.send(f"{NAMES[rank]}: {exc}"[:400])
        raise


def ask() -> tuple[str, list[float]]:
    found = rpc.rpc_sync("callee", echo, args=(torch.ones(4, device=HERE),))
    return str(found.device), found.tolist()


def echo(tensor: Tensor) -> Tensor:
    return tensor + 1
