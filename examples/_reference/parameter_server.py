"""The batch-updating parameter server on plain torch RPC: a lock, a count and a future.

After the pattern of "Implementing Batch RPC Processing Using Asynchronous Executions", at its
strongest: gradients are added under the lock and answers sent outside it, the first gradient is
kept and not copied, what arrives becomes the trainer's model, and running statistics are averaged.

    python -m examples._reference.parameter_server --trainers 3 --iterations 60
"""

import argparse
import os
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.futures import Future
from torch.multiprocessing.spawn import spawn
from torchvision.models import get_model

from ..parameter_server import CLASSES, Tensors, accuracy, learn, pictures

PS = "ps"


class BatchUpdateParameterServer:
    """Holds the model. Its methods run in threads of RPC's, several at once."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = get_model(options.model, num_classes=CLASSES)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.9, fused=True)
        self.sums: Tensors = {}
        self.losses: list[float] = []
        self.lock = threading.Lock()
        self.trainers = self.missing = options.trainers
        self.answer: Future[Tensors] = Future()

    def get_model(self) -> Tensors:
        state: Tensors = self.model.state_dict()
        return state

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def update_and_fetch_model(
        ps: "rpc.RRef[BatchUpdateParameterServer]", learned: Tensors
    ) -> "Future[Tensors]":
        self = ps.local_value()
        answer: Future[Tensors]
        with self.lock:
            for name, tensor in learned.items():
                self.sums[name] = self.sums[name].add_(tensor) if name in self.sums else tensor
            answer = self.answer
            self.missing -= 1
            if is_last := self.missing == 0:
                self.losses.append(self.advance())
                state = self.model.state_dict()
                self.missing = self.trainers
                self.answer = Future()
        if is_last:
            answer.set_result(state)
        return answer

    @torch.no_grad()
    def advance(self) -> float:
        """Make a step with the means of the trainers' results; return the mean loss."""
        means = {name: total / self.trainers for name, total in self.sums.items()}
        self.sums = {}
        for name, parameter in self.model.named_parameters():
            parameter.grad = means[name]
        for name, buffer in self.model.named_buffers():
            buffer.copy_(means[name])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(means["loss"])


def run_trainer(ps: Any, rank: int, options: argparse.Namespace) -> None:
    """What the server asks of each trainer."""
    model = get_model(options.model, num_classes=CLASSES)
    state = ps.rpc_sync(timeout=0).get_model()
    for step in range(options.iterations):
        model.load_state_dict(state, assign=True)
        images, labels = pictures(options, options.batch, seed=1000 * step + rank)
        learned = learn(model, images, labels, "cpu", "cpu")
        state = rpc.rpc_sync(
            PS,
            BatchUpdateParameterServer.update_and_fetch_model,
            args=(ps, learned),
            timeout=0,
        )


def run(
    rank: int, options: argparse.Namespace, where: str, transports: list[str] | None = None
) -> None:
    """Be the worker of that rank."""
    backend = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{where}", _transports=transports)
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    name = f"trainer{rank}" if rank else PS
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=rank, world_size=options.trainers + 1, rpc_backend_options=backend
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
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=60)
    parser.set_defaults(server_device="cpu")
    return parser.parse_args(given)


if __name__ == "__main__":
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        spawn(  # type: ignore[no-untyped-call]
            run, (options, f"{folder}/store"), nprocs=options.trainers + 1
        )
