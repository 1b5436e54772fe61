"""The model of the pipeline in one process, for `benchmarks.pipeline` and the tests."""

import torch
from torch.nn import functional

from examples._textures import Shape, Textures, cut, microbatches


class Uncut:
    """The model in one process, trained as the pipeline trains it, for comparison."""

    def __init__(self, shape: Shape, lr: float) -> None:
        self.layers = cut(shape)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=lr, momentum=0.9)

    def step(self, batch: Textures, micro: int) -> float:
        """Make a step on a batch in `micro` parts, one after the other; return its loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for images, labels in microbatches(batch, micro):
            loss = functional.cross_entropy(self.layers(images), labels, reduction="sum")
            (loss / len(batch.labels)).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.optimizer.step()
        return total / len(batch.labels)
