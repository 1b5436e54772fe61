"""The pipeline in plain torch RPC: threads that block, and a lock in each stage.

What `examples/pipeline.py` is compared with: the same model, data and optimizer. The master makes
every microbatch pass every stage by itself. A stage fetches its input where it lies, in a thread
that waits for it, and threads take the lock in whichever order they get it: so batch statistics
and dropout depend on chance as soon as there are two microbatches.

    python -m examples._reference.pipeline --stages 2 --micro 4
"""

import argparse
import os
import tempfile
import threading
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd, rpc
from torch.distributed.autograd import backward  # type: ignore[attr-defined]
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from .._textures import Shape, Textures, batches, cut, held_out, microbatches


class Stage:
    """Some layers of the model."""

    def __init__(self, shape: Shape, stage: int, stages: int) -> None:
        self.layers = cut(shape, stage, stages)
        self.lock = threading.Lock()

    def forward(self, x: Any) -> Tensor:
        """What these layers make of a microbatch behind an RRef."""
        here = x.to_here()
        with self.lock:
            y: Tensor = self.layers(here)
        return y

    def train(self, mode: bool) -> None:
        self.layers.train(mode)

    def parameter_rrefs(self) -> list[Any]:
        return [RRef(parameter) for parameter in self.layers.parameters()]


class Pipeline:
    """All stages, driven by this process."""

    def __init__(self, workers: list[str], shape: Shape, lr: float) -> None:
        self.stages: list[Any] = [
            rpc.remote(worker, Stage, args=(shape, number, len(workers)))
            for number, worker in enumerate(workers)
        ]
        parameters = [each for stage in self.stages for each in stage.rpc_sync().parameter_rrefs()]
        self.optimizer: Any = DistributedOptimizer(  # type: ignore[no-untyped-call]
            torch.optim.SGD, parameters, lr=lr, momentum=0.9
        )

    def step(self, batch: Textures, micro: int) -> float:
        """One step on a batch in that many microbatches; its loss."""
        with autograd.context() as number:
            loss = functional.cross_entropy(self._forward(batch, micro), batch.labels)
            backward(number, [loss])
            self.optimizer.step(number)
        return loss.item()

    def accuracy(self, batch: Textures) -> float:
        """The part of these that the model gets right."""
        for stage in self.stages:
            stage.rpc_sync().train(False)
        correct = self._forward(batch, 8).argmax(1) == batch.labels
        for stage in self.stages:
            stage.rpc_sync().train(True)
        return float(correct.float().mean())

    def _forward(self, batch: Textures, micro: int) -> Tensor:
        flying = []
        for images, _ in microbatches(batch, micro):
            x: Any = RRef(images)
            for stage in self.stages[:-1]:
                x = stage.remote().forward(x)
            flying.append(self.stages[-1].rpc_async().forward(x))
        return torch.cat(torch.futures.wait_all(flying))


def join(rank: int, names: list[str], where: str) -> None:
    """Be the worker of that rank, until `rpc.shutdown`."""
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo")
    warnings.filterwarnings("ignore", message="`TorchScript` support")
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=where)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        names[rank], rank=rank, world_size=len(names), rpc_backend_options=options
    )


def serve(number: int, names: list[str], where: str) -> None:
    """A stage's process."""
    join(number + 1, names, where)
    rpc.shutdown()


def main(options: argparse.Namespace) -> None:
    workers = [f"stage{number}" for number in range(options.stages)]
    names = ["master", *workers]
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/meeting"
        children = spawn(  # type: ignore[no-untyped-call]
            serve, args=(names, where), nprocs=len(workers), join=False
        )
        join(0, names, where)
        pipeline = Pipeline(workers, Shape(seed=options.seed), 0.1)
        start = time.perf_counter()
        for number, batch in enumerate(batches(options.steps, 64, options.seed), 1):
            loss = pipeline.step(batch, options.micro)
            if number % max(1, options.steps // 10) == 0:
                print(f"step {number:4}: loss {loss:.3f}", flush=True)
        each = (time.perf_counter() - start) / options.steps
        accuracy = pipeline.accuracy(held_out(1024, options.seed))
        print(f"{each * 1e3:.1f} ms a step; held-out accuracy: {accuracy:.1%}")
        del pipeline
        rpc.shutdown()
        children.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
