"""Synthetic handwritten digits: a data set in the files of MNIST, where that is missing.

Each digit is a few strokes. For every image they are bent, rotated, scaled, shifted and drawn with
a pen of some width, on noisy paper. The four files have the names and the format of MNIST's (IDX),
as `torchvision.datasets.MNIST` reads them.
"""

import tempfile
from itertools import pairwise
from math import cos, radians, sin
from pathlib import Path

import torch
from torch import Tensor

Point = tuple[float, float]
Stroke = list[Point]

SIZE = 28  # pixels, of a side
KINDS = "images-idx3-ubyte", "labels-idx1-ubyte"
FILES = [f"{part}-{kind}" for part in ("train", "t10k") for kind in KINDS]


def arc(x: float, y: float, width: float, height: float, start: int, end: int) -> Stroke:
    """Return a part of an ellipse, in degrees: 0 is its right end, 90 its lowest point."""
    steps = max(2, abs(end - start) // 36)
    angles = [radians(start + (end - start) * step / steps) for step in range(steps + 1)]
    return [(x + width * cos(angle), y + height * sin(angle)) for angle in angles]


# Coordinates from -1 at the top to 1 at the bottom.
STROKES: list[list[Stroke]] = [
    [arc(0, 0, 0.6, 1, -90, 270)],
    [[(-0.3, -0.6), (0, -1), (0, 1)]],
    [[*arc(0, -0.45, 0.55, 0.55, 190, 400), (-0.6, 1), (0.6, 1)]],
    [arc(0, -0.5, 0.5, 0.5, 200, 450), arc(0, 0.5, 0.6, 0.5, 270, 520)],
    [[(0.1, -1), (-0.6, 0.3), (0.6, 0.3)], [(0.25, -0.6), (0.25, 1)]],
    [[(0.5, -1), (-0.4, -1), (-0.45, -0.1), *arc(0, 0.4, 0.55, 0.6, 235, 500)]],
    [[(0.35, -1), (-0.2, -0.55), (-0.5, 0), *arc(0, 0.45, 0.53, 0.55, 180, 540)]],
    [[(-0.55, -1), (0.55, -1), (-0.15, 1)]],
    [arc(0, -0.5, 0.45, 0.5, 90, 450), arc(0, 0.5, 0.58, 0.5, 270, 630)],
    [[*arc(0, -0.45, 0.5, 0.55, 0, 360), (0.45, 0.3), (0.2, 1)]],
]


def lines(strokes: list[Stroke], count: int) -> Tensor:
    """Return the straight pieces [count, 2 ends, 2] of some strokes; the last is repeated."""
    found = [piece for stroke in strokes for piece in pairwise(stroke)]
    return torch.tensor(found + [found[-1]] * (count - len(found)))


MOST = max(sum(len(stroke) - 1 for stroke in strokes) for strokes in STROKES)
LINES = torch.stack([lines(strokes, MOST) for strokes in STROKES])  # [10, MOST, 2, 2]


def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an image [SIZE, SIZE] uint8 of each of these digits [B], white on black."""
    count = len(labels)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    points = LINES[labels].flatten(1, 2)  # [B, points, 2]
    # A wave bends the plane, so a point that two lines share moves with both and joints hold.
    waves, phases = between(-0.13, 0.13, 1, 2), between(0.0, 6.3, 1, 2)
    points = points + waves * torch.sin(2.5 * points.flip(-1) + phases)
    angle, slant = between(-0.25, 0.25), between(-0.3, 0.3)
    matrix = torch.stack([angle.cos(), slant - angle.sin(), angle.sin(), angle.cos()], -1)
    points = points @ matrix.view(count, 2, 2).mT * between(6.5, 10.5, 1, 2)
    points = points + between(-2.0, 2.0, 1, 2) + (SIZE - 1) / 2
    ink = between(0.7, 1.6, 1) - distance(points.view(count, MOST, 2, 2))
    paper = between(0.0, 0.12, 1) * torch.randn(count, SIZE * SIZE, generator=generator)
    image = (ink + 0.5).clamp(0, 1) * between(0.7, 1.0, 1) + paper
    return (255 * image.clamp(0, 1)).byte().view(count, SIZE, SIZE)


def distance(pieces: Tensor) -> Tensor:
    """Return each pixel's distance [B, SIZE * SIZE] to its image's nearest line [B, n, 2, 2]."""
    axis = torch.arange(float(SIZE))
    y, x = torch.cartesian_prod(axis, axis)[..., None].unbind(1)  # each [SIZE * SIZE, 1]
    (x0, y0), (x1, y1) = (end.unbind(-1) for end in pieces[:, None].unbind(-2))  # [B, 1, n]
    dx, dy = x1 - x0, y1 - y0
    length = (dx * dx + dy * dy).clamp(min=1e-6)
    along = (((x - x0) * dx + (y - y0) * dy) / length).clamp(0, 1)
    return ((x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2).amin(-1).sqrt()


def idx(values: Tensor) -> bytes:
    """Encode a tensor of bytes as an IDX file: its type, its shape in big endian, its values."""
    shape = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.dim()]) + shape + values.numpy().tobytes()


def complete(raw: Path) -> bool:
    """Return True if all four files are in that folder."""
    return all((raw / name).exists() for name in FILES)


def write(root: Path, *, train: int = 6000, test: int = 1000, seed: int = 0) -> Path:
    """Make the data set for `torchvision.datasets.MNIST(root)`; return the folder of its files.

    Each digit is drawn as often as the others. If two processes make the data set in one folder at
    the same time, the second uses the first one's files.

    Raises:
        OSError: if the folder has only a part of a data set.
    """
    raw = root / "MNIST" / "raw"
    raw.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        made = Path(scratch, "raw")
        made.mkdir()
        for part, count in (("train", train), ("t10k", test)):
            labels = (torch.arange(count) % 10)[torch.randperm(count, generator=generator)]
            images = torch.cat([draw(some, generator) for some in torch.split(labels, 25)])
            for kind, values in zip(KINDS, (images, labels.byte()), strict=True):
                (made / f"{part}-{kind}").write_bytes(idx(values))
        (made / "drawn.txt").write_text(f"drawn by examples.digits, seed {seed}\n")
        try:
            made.rename(raw)
        except OSError:  # a folder that is not empty is not replaced
            if not complete(raw):
                raise
    return raw
