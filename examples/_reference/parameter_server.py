"""The batch-updating parameter server on plain torch RPC: a lock, a count and a future.

After the pattern of "Implementing Batch RPC Processing Using Asynchronous Executions", at its
strongest: gradients are added under the lock and answers sent outside it, the first gradient is
kept and not copied, what arrives becomes the trainer's model, and running statistics are averaged.

    python -m examples._reference.parameter_server --trainers 3 --iterations 60
"""

import argparse
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future
from torch.multiprocessing.spawn import spawn

from .._classifier import (
    Learned,
    Mean,
    accuracy,
    add_training,
    adopt,
    advance,
    batches,
    learn,
    new_model,
    new_optimizer,
)

PS = "ps"

State = dict[str, Tensor]


class BatchUpdateParameterServer:
    """Holds the model. Its methods run in threads of RPC's, several at once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = new_model(options)
        self.optimizer = new_optimizer(self.model, options)
        self.mean = Mean()
        self.losses: list[float] = []
        self.lock = threading.Lock()
        self.trainers = self.missing = options.trainers
        self.answer: Future[State] = Future()

    def get_model(self) -> State:
        return self.model.state_dict()

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def update_and_fetch_model(
        ps: "rpc.RRef[BatchUpdateParameterServer]", samples: int, learned: Learned
    ) -> "Future[State]":
        self = ps.local_value()
        answer: Future[State]
        with self.lock:
            self.mean.add(learned, samples)
            answer = self.answer
            self.missing -= 1
            if is_last := self.missing == 0:
                self.losses.append(advance(self.model, self.optimizer, self.mean.take()))
                state = self.model.state_dict()
                self.missing = self.trainers
                self.answer = Future()
        if is_last:
            answer.set_result(state)
        return answer


def run_trainer(ps: Any, rank: int, options: argparse.Namespace) -> None:
    """What the server asks of each trainer."""
    model = new_model(options).to(options.device)
    data = batches(options, rank - 1, options.trainers)
    state = ps.rpc_sync(timeout=0).get_model()
    for _ in range(options.iterations):
        adopt(model, state, options)
        batch = next(data)
        learned: Learned = {}
        learn(model, batch, options, learned.update)
        state = rpc.rpc_sync(
            PS,
            BatchUpdateParameterServer.update_and_fetch_model,
            args=(ps, len(batch[0]), learned),
            timeout=0,
        )


def run(
    rank: int, port: int, options: argparse.Namespace, transports: list[str] | None = None
) -> None:
    """Be the worker of that rank."""
    where = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=transports
    )
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    name = f"trainer{rank}" if rank else PS
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=rank, world_size=options.trainers + 1, rpc_backend_options=where
    )
    if rank == 0:
        serve(options)
    rpc.shutdown()


def serve(options: argparse.Namespace) -> None:
    ps = BatchUpdateParameterServer(options)
    shared: Any = rpc.RRef(ps)
    torch.futures.wait_all(
        [
            rpc.rpc_async(f"trainer{rank}", run_trainer, args=(shared, rank, options), timeout=0)
            for rank in range(1, options.trainers + 1)
        ]
    )
    print(f"loss, first step: {ps.losses[0]:.3f}, last of {len(ps.losses)}: {ps.losses[-1]:.3f}")
    print(f"accuracy on held-out images: {accuracy(ps.model, options):.1%}", flush=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training(parser)
    parser.add_argument("--trainers", type=int, default=3)
    return parser.parse_args(given)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    options = arguments()
    spawn(  # type: ignore[no-untyped-call]
        run, (free_port(), options), nprocs=options.trainers + 1
    )
