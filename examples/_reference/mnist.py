"""MNIST through a parameter server, with one trainer, in plain torch RPC.

The blocking form in its best shape: one round trip a forward, no check of gradients, evaluation
without dropout. A second trainer would end it: torch's step changes, in place, parameters that the
other's graph has saved.

    python -m examples._reference.mnist
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.distributed.autograd import backward  # type: ignore[attr-defined]
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef
from torch.nn import functional

from examples._mnist import Images, Net, load, prepare, shuffled

MINUTES = 600.0  # seconds of torch's timeout for each call


class ParameterServer:
    """The network, for one trainer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()

    def forward(self, images: Tensor, training: bool) -> Tensor:
        self.net.train(training)
        with torch.set_grad_enabled(training):
            return self.net(images)  # type: ignore[no-any-return]

    def parameters(self) -> list[RRef[nn.Parameter]]:
        return [RRef(each) for each in self.net.parameters()]


def forward(ps: RRef[ParameterServer], images: Tensor, training: bool) -> Tensor:
    return ps.local_value().forward(images, training)  # type: ignore[no-any-return]


def parameters(ps: RRef[ParameterServer]) -> list[RRef[nn.Parameter]]:
    return ps.local_value().parameters()  # type: ignore[no-any-return]


def train(options: argparse.Namespace) -> None:
    images, test = load(options.data, train=True), load(options.data, train=False)
    images = images.part(slice(options.images))
    ps = rpc.remote("ps", ParameterServer, args=(options.seed,))
    opt = DistributedOptimizer(  # type: ignore[no-untyped-call]
        torch.optim.SGD, rpc.rpc_sync("ps", parameters, args=(ps,)), lr=options.lr
    )
    count, start = 0, time.monotonic()
    for epoch in range(options.epochs):
        order = shuffled(len(images.labels), options.seed, epoch)
        for pixels, labels in images.batches(options.batch_size, order):
            with autograd.context() as context:
                found = rpc.rpc_sync("ps", forward, args=(ps, pixels, True))
                backward(context, [functional.nll_loss(found, labels)])
                opt.step(context)  # type: ignore[no-untyped-call]
            count += 1
    seconds = time.monotonic() - start
    print(f"{count:,} iterations in {seconds:.1f} s: {count / seconds:.1f} iterations/s")
    print(f"accuracy: {evaluate(ps, test):.4f} of {len(test.labels):,} test images", flush=True)


def evaluate(ps: RRef[ParameterServer], test: Images) -> float:
    right = 0
    for pixels, labels in test.batches(250):
        found = rpc.rpc_sync("ps", forward, args=(ps, pixels, False))
        right += int((found.argmax(1) == labels).sum())
    return right / len(test.labels)


def work(rank: int, options: argparse.Namespace, where: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    backend = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{where}", rpc_timeout=MINUTES)
    name = "trainer" if rank else "ps"
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=rank, world_size=2, rpc_backend_options=backend
    )
    if rank:
        train(options)
    rpc.shutdown()


def main(options: argparse.Namespace) -> None:
    print(f"data: {prepare(options.data)}", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        args = options, f"{folder}/store"
        workers = [spawn.Process(target=work, args=(rank, *args)) for rank in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker has failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("out/digits"))
    parser.add_argument("--images", type=int)
    main(parser.parse_args())
