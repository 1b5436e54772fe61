"""Objects of all kinds that can stand behind an RRef, made on the worker that is asked."""

import asyncio
import collections
import enum
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Pair(NamedTuple):
    inputs: Any
    targets: Any


class Row(list[Any]):
    """A list of its own class."""


class Table(dict[str, Any]):
    """A dict of its own class."""


class Name(str):
    __slots__ = ()


def script(obj: Any) -> Any:
    """Compile it by TorchScript, of which torch warns: it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(obj)


def trace(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, torch.ones(1, 2))


@script
class Scripted:
    """A class that TorchScript has compiled: torch would infer the type of its instances."""

    def __init__(self, number: int) -> None:
        self.number = number


class Agent:
    def __init__(self) -> None:
        self.steps = 0


@script
def increase(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def add(x: Any, y: Any) -> Any:
    return x + y


def closure() -> Callable[[int], int]:
    total = 0

    def count(amount: int) -> int:
        nonlocal total
        total += amount
        return total

    return count


MAKERS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"steps": 0},
    "empty dict": dict,
    "dict of tensors": lambda: {"w": torch.ones(2), "b": torch.zeros(2)},
    "OrderedDict": lambda: collections.OrderedDict(a=1, b=2),
    "defaultdict": lambda: collections.defaultdict(list, a=[1]),
    "Counter": lambda: collections.Counter("aab"),
    "dict subclass": lambda: Table(a=1),
    "numbers": lambda: [1, 2],
    "floats": lambda: [1.0, 2.0],
    "strings": lambda: ["a", "b"],
    "tensors": lambda: [torch.ones(2), torch.zeros(2)],
    "replay": lambda: [{"state": torch.ones(2)}, {"state": torch.zeros(2)}],
    "empty list": list,
    "list subclass": lambda: Row([1, 2]),
    "deque": lambda: collections.deque([1, 2]),
    "tuple": lambda: (1, "a"),
    "tuple of tensors": lambda: (torch.ones(2), torch.zeros(2)),
    "named tuple": lambda: Pair(torch.ones(2), torch.zeros(2)),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset({1, 2}),
    "str": lambda: "text",
    "str subclass": lambda: Name("text"),
    "bytes": lambda: b"\xff\x00",
    "bytearray": lambda: bytearray(b"\xff\x00"),
    "int": lambda: 7,
    "large int": lambda: 2**100,
    "bool": lambda: True,
    "None": lambda: None,
    "float": lambda: 0.5,
    "complex": lambda: 1j,
    "Enum": lambda: Colour.RED,
    "IntEnum": lambda: Level.HIGH,
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cpu", 0),
    "layout": lambda: torch.strided,
    "memory format": lambda: torch.channels_last,
    "Size": lambda: torch.Size([2, 3]),
    "Generator": lambda: torch.Generator().manual_seed(1),
    "array": lambda: np.arange(3.0),
    "float64": lambda: np.float64(0.5),
    "int64": lambda: np.int64(7),
    "str_": lambda: np.str_("text"),
    "bytes_": lambda: np.bytes_(b"text"),
    "bool_": lambda: np.bool_(True),
    "NumPy dtype": lambda: np.dtype("float32"),
    "tensor": lambda: torch.ones(2),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "module": lambda: nn.Linear(2, 2),
    "script module": lambda: script(nn.Linear(2, 2)),
    "traced module": lambda: trace(nn.Linear(2, 2)),
    "script function": lambda: increase,
    "instance of a script class": lambda: Scripted(3),
    "Python module": lambda: asyncio,
    "class": lambda: Agent,
    "builtin class": lambda: dict,
    "function": lambda: add,
    "builtin function": lambda: len,
    "lambda": lambda: lambda x: x,
    "closure": closure,
    "bound method": lambda: Agent().__init__,  # type: ignore[misc]
    "object": Agent,
    "exception": lambda: ValueError("kept"),
    "NotImplemented": lambda: NotImplemented,
    "Ellipsis": lambda: ...,
}

_made: dict[str, list[Any]] = collections.defaultdict(list)  # by name: what this process has made


def make(name: str) -> Any:
    made = MAKERS[name]()
    _made[name].append(made)
    return made


async def amake(name: str) -> Any:
    return make(name)


def is_made(found: Any, name: str) -> bool:
    """Return whether it is a very object that this process has made."""
    return any(found is each for each in _made[name])


class Shop:
    """An object whose methods make others."""

    def make(self, name: str) -> Any:
        return make(name)

    async def amake(self, name: str) -> Any:
        return make(name)


def register_made(name: str) -> None:
    from aiorpc_torch import register

    register(name, make(name))
