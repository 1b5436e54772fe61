"""A parameter server that makes one step for many trainers: a round of calls.

The server has the model and the optimizer. Each trainer computes gradients on pictures of its own,
sends them and waits for the next model. When all have sent theirs, `step` runs once, and its one
answer, the new model, goes to all. There is no lock, counter or callback: `Round` counts the
members. It waits `--timeout` seconds for a killed trainer, whose replacement process takes part as
soon as it has started. With both sides on a GPU, gradients and model travel from device to device.

    python -m examples.parameter_server --trainers 3 --iterations 60
    python -m examples.parameter_server --device cuda:0 --server-device cuda:0
    torchrun --nproc-per-node 4 -m examples.parameter_server
"""

import argparse
import asyncio
import os

import torch
from torch import Tensor, nn
from torchvision.models import get_model

import aiorpc_torch as aiorpc

CLASSES = 10

Tensors = dict[str, Tensor]
ROUND = aiorpc.Round(
    lambda ps: ps.trainers, quorum=1, timeout=lambda ps: ps.timeout, member=lambda name, _: name
)


def pictures(options: argparse.Namespace, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw pictures [N, 3, side, side], the patterns of classes with noise, and their labels."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=chance)
    noise = torch.randn(count, 3, options.side, options.side, generator=chance)
    return nn.functional.interpolate(patterns[labels], size=options.side) + noise, labels


class ParameterServer:
    """A parameter server, which holds the model and its optimizer."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = get_model(options.model, num_classes=CLASSES).to(options.server_device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.9, fused=True)
        self.losses, self.iterations, self.via = list[float](), options.iterations, options.via
        self.trainers, self.timeout = options.trainers, options.timeout

    def __reduce__(self) -> tuple[type, tuple[()]]:  # torch looks for tensors in it, with maps
        return object, ()

    def state(self) -> tuple[int, Tensors]:
        """Return the number of steps and the model, which is not copied if it is there already."""
        return len(self.losses), {n: x.to(self.via) for n, x in self.model.state_dict().items()}

    @aiorpc.batched(ROUND)
    @torch.no_grad()
    def step(self, names: list[str], learned: list[Tensors]) -> tuple[int, Tensors]:
        """Make one step for a round of trainers; all get the new model."""
        if len(self.losses) < self.iterations:  # else a late trainer gets the model alone
            for name, parameter in self.model.named_parameters():
                parameter.grad = mean(learned, name).to(parameter.device)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(mean(learned, name))
            self.optimizer.step()
            self.losses.append(loss := mean(learned, "loss").item())
            print(f"step {len(self.losses)}: loss {loss:.3f} of", *sorted(names), flush=True)
        return self.state()


def mean(learned: list[Tensors], name: str) -> Tensor:
    """Return the mean of the trainers' tensors of that name, in float32."""
    return torch.stack([each[name] for each in learned]).float().mean(0)


def learn(model: nn.Module, images: Tensor, labels: Tensor, device: str, via: str) -> Tensors:
    """Return the loss, the gradients and the buffers by name, on the device `via` to travel."""
    loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = zip(names, torch.autograd.grad(loss, parameters), strict=True)
    learned = {"loss": loss.detach(), **dict(gradients), **dict(model.named_buffers())}
    return {name: each.to(via) for name, each in learned.items()}


async def train(me: aiorpc.types.Worker, options: argparse.Namespace) -> None:
    """Train from the current model to the last step."""
    ps = aiorpc.remote(await aiorpc.lookup("ps", on="ps"))
    model = get_model(options.model, num_classes=CLASSES).to(options.device)
    steps, state = await ps.state()
    print(f"{me.name}, process {os.getpid()}, begins at step {steps}", flush=True)
    while steps < options.iterations:
        model.load_state_dict(state, assign=options.device == "cpu")
        batch = pictures(options, options.batch, seed=1000 * steps + me.rank)
        learned = await asyncio.to_thread(learn, model, *batch, options.device, options.via)
        try:
            steps, state = await ps.step(me.name, learned)
        except aiorpc.RoundTimeout:  # this one came too late
            steps, state = await ps.state()


@torch.inference_mode()
def accuracy(model: nn.Module, options: argparse.Namespace) -> float:
    """Return the part of held-out pictures that the model classifies correctly."""
    images, labels = pictures(options, count=200, seed=-1)
    right = model.eval()(images.to(options.server_device)).argmax(1).cpu() == labels
    return float(right.float().mean())


async def main(me: aiorpc.types.Worker, options: argparse.Namespace) -> None:
    """Serve on rank 0 until the last step; train on the others."""
    if me.rank:
        return await train(me, options)
    aiorpc.register("ps", ps := ParameterServer(options))
    await me.serve()  # until every trainer has made its last step, or is lost
    print(f"loss, first step: {ps.losses[0]:.3f}, last of {len(ps.losses)}: {ps.losses[-1]:.3f}")
    right = await asyncio.to_thread(accuracy, ps.model, options)
    print(f"accuracy on held-out pictures: {right:.1%}")


async def join(name: str, options: argparse.Namespace) -> None:
    """Run `main` in the one worker of this process."""
    async with aiorpc.worker(name, device_maps=options.maps) as me:
        await main(me, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trainers", type=int, default=int(os.environ.get("WORLD_SIZE", 4)) - 1)
    add("--model", default="resnet50", help="any of torchvision's classifiers")
    add("--side", type=int, default=64, help="height and width of a picture in pixels")
    add("--batch", type=int, default=20, help="pictures of a trainer in a step")
    add("--iterations", type=int, default=60, help="steps of the model")
    add("--timeout", type=float, default=10.0, help="seconds until the present trainers suffice")
    add("--restart", type=int, default=3, help="restarts of trainers, at most")
    add("--device", default="cpu", help="device of the trainers")
    add("--server-device", default="cpu", help="device of the model and the optimizer")
    add("--quick", action="store_true", help="six steps of a small model, as a check")
    options = parser.parse_args()
    if options.quick:
        options.model, options.iterations, options.batch = "resnet18", 6, 4
    options.via = "cpu" if "cpu" in (options.device, options.server_device) else options.device
    options.maps = None if options.via == "cpu" else "auto"
    names = ["ps", *(f"trainer{rank + 1}" for rank in range(options.trainers))]
    if "RANK" in os.environ:  # of torchrun, or of a terminal for each worker
        asyncio.run(join(names[int(os.environ["RANK"])], options))
    else:
        more = {"max_restarts": options.restart, "device_maps": options.maps}
        aiorpc.run_local(main, names, args=(options,), on_failure="continue", **more)
