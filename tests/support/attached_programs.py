"""A program in plain torch RPC, as it is, whose processes attach; every second call is awaited.

    python -m tests.support.attached_programs cartpole

Each process calls its own `rpc.init_rpc` and `rpc.shutdown`, and is attached between them.
"""

import contextlib
import importlib
import itertools
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

import aiorpc_torch as aiorpc

Sizes = dict[str, Any]

TEAM: Sizes = {"observers": 2, "device": "cpu", "seed": 5}
OPTIONS: dict[str, Sizes] = {
    "cartpole": {"rounds": 3, "steps": 100, "batched": True, **TEAM},
    "reinforce": {"max_episodes": 10, "evaluate": 2, "quick": True, **TEAM},
    "parameter_server": {"trainers": 2, "model": "resnet18", "side": 32, "batch": 2}
    | {"iterations": 4, "server_device": "cpu"},
    "mnist": {"epochs": 1, "batch_size": 32, "lr": 0.1, "seed": 0, "images": 640},
}
ENTRIES = {"mnist": "work"}
PROCESSES = {"cartpole": 3, "reinforce": 3, "parameter_server": 3, "mnist": 2}
IN_TORCH_CONTEXTS = {"forward"}  # of mnist: such a call is torch's own


def run_attached(rank: int, program: str, where: str, options: Namespace) -> None:
    """Run one process of a program, attached between `init_rpc` and the end of `shutdown`."""
    module = importlib.import_module(f"examples._reference.{program}")
    init_rpc, rpc_sync, shutdown = rpc.init_rpc, rpc.rpc_sync, rpc.shutdown
    attached = contextlib.ExitStack()
    turn, awaited = itertools.count(1), 0
    me: Any = None

    def init_and_attach(*args: Any, **options: Any) -> None:
        nonlocal me
        init_rpc(*args, **options)  # type: ignore[no-untyped-call]
        me = attached.enter_context(aiorpc.in_thread(aiorpc.attach()))

    def shut_down_and_leave() -> None:
        with attached:
            shutdown()

    def call_in_turn(to: Any, function: Callable[..., Any], args: Any = (), **options: Any) -> Any:
        nonlocal awaited
        if next(turn) % 2 and function.__name__ not in IN_TORCH_CONTEXTS:
            awaited += 1
            return me.run(aiorpc.call, to, function, *args)
        return rpc_sync(to, function, args=args, **options)

    rpc.init_rpc, rpc.rpc_sync = init_and_attach, call_in_turn  # type: ignore[assignment]
    rpc.shutdown = shut_down_and_leave  # type: ignore[assignment]
    try:
        getattr(module, ENTRIES.get(program, "run"))(rank, options, where)
    finally:
        print(f"rank {rank} has awaited {awaited} calls", flush=True)


def main(program: str) -> None:
    """Run all processes of a program."""
    with tempfile.TemporaryDirectory() as folder:
        options = Namespace(**OPTIONS[program])
        if program == "mnist":
            from examples._mnist import prepare

            options.data = Path(folder)
            prepare(options.data)
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            run_attached, (program, f"{folder}/store", options), nprocs=PROCESSES[program]
        )


if __name__ == "__main__":
    main(sys.argv[1])
