"""Device maps of the programs, and objects in which torch can look for tensors."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._jit_internal import _extract_tensors

# RuntimeError: it was built for another torch.
pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))

import aiorpc_torch
from examples import _mnist as mnist_module, mnist, parameter_server, pipeline, rnn
from examples._textures import Shape
from tests.examples.test_parameter_server import options

PROGRAMS = {
    "parameter_server": ["--server-device", "DEVICE"],
    "mnist": [],
    "pipeline": [],
    "rnn": [],
}


class EnteredError(Exception):
    pass


@pytest.mark.parametrize("rank", [None, "1"])
@pytest.mark.parametrize(("device", "maps"), [("cpu", None), ("cuda:0", "auto")])
@pytest.mark.parametrize("program", PROGRAMS)
def test_maps(
    program: str,
    device: str,
    maps: str | None,
    rank: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """--device asks for them, also where each worker is started by itself."""
    entered: list[Any] = []

    def enter(*_: Any, device_maps: Any, **__: Any) -> None:
        entered.append(device_maps)
        raise EnteredError

    for name in ("local_world", "run_local", "worker"):
        monkeypatch.setattr(aiorpc_torch, name, enter)
    if rank is not None:
        monkeypatch.setattr(aiorpc_torch, "local_world", lambda *_, **__: None)
        monkeypatch.setenv("RANK", rank)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mnist_module, "prepare", lambda root: "none")
    words = [word.replace("DEVICE", device) for word in PROGRAMS[program]]
    monkeypatch.setattr(sys, "argv", [program, "--device", device, *words])
    monkeypatch.delitem(sys.modules, f"examples.{program}")  # it runs anew
    with pytest.raises(EnteredError):
        runpy.run_module(f"examples.{program}", run_name="__main__", alter_sys=False)
    assert entered == [maps]


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda: parameter_server.ParameterServer(options()), 0),
        (lambda: mnist.ParameterServer(0, seed=0), 8),
        (lambda: pipeline.Stage(Shape(), 0, 1), 86),
        (lambda: rnn.Words(30, 12, "cpu"), 3),
    ],
    ids=["parameter_server", "mnist", "pipeline", "rnn"],
)
def test_torch_can_search_the_objects(make: Callable[[], object], tensors: int) -> None:
    """With device maps it pickles what an RRef is made of, to find tensors on devices."""
    assert len(_extract_tensors(make())) == tensors
