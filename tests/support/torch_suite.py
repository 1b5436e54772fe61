"""torch's own tests of RPC in worlds of ours: `init_rpc` enters one, and `shutdown` leaves it.

The tests are in torch's wheel. Each test has processes of its own, one a rank, which are forked
from this one: torch counts RRefs in the first world of a process only.

    python -m tests.support.torch_suite CLASS ... [--only TEST ...] [--at-once N]

It prints one line for each test: the name, "ok", "skipped" or "failed", and the error.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import importlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest import mock

import torch.distributed.rpc as rpc

import aiorpc_torch as aiorpc

_TESTS = "torch.testing._internal.distributed"
MODULES = {
    "RpcTest": "rpc.rpc_test",
    "TensorPipeAgentRpcTest": "rpc.rpc_test",
    "DistAutogradTest": "rpc.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": "rpc.dist_autograd_test",
    "DistOptimizerTest": "rpc.dist_optimizer_test",
    "RemoteModuleTest": "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": "nn.api.remote_module_test",
    "ParameterServerTest": "rpc.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": "rpc.examples.reinforcement_learning_rpc_test",
}
LIMIT = 90.0  # seconds until a test counts as hung
FAILED, SKIPPED = 1, 2

_shutdown = rpc.shutdown


class World:
    """The world of this process, on an event loop in a thread."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._leave = asyncio.Event()
        self._entered = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="world", daemon=True)
        self._thread.start()
        self._entered.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        self._task = self._loop.create_task(self._live())
        try:
            self._loop.run_until_complete(self._task)
        except BaseException as exc:
            self._failure = exc
        finally:
            self._entered.set()

    async def _live(self) -> None:
        async with aiorpc.worker(**self._arguments):
            self._entered.set()
            await self._leave.wait()

    def leave(self, graceful: bool) -> None:
        """Leave the world, without waiting for peers if not `graceful`; return when it is left."""
        self._loop.call_soon_threadsafe(self._leave.set if graceful else self._task.cancel)
        self._thread.join()
        if self._failure is not None and graceful:
            raise self._failure


_worlds: list[World] = []


def enter_world(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Take the place of `init_rpc`."""
    if not world_size:
        raise NotImplementedError("workers cannot join a world later")
    options = rpc_backend_options or rpc.TensorPipeRpcBackendOptions()
    _worlds.append(
        World(
            name=name,
            rank=rank,
            world_size=world_size,
            init_method=f"{options.init_method}-{len(_worlds)}",
            threads=options.num_worker_threads,
            stop_timeout=20.0,
        )
    )
    rpc._set_rpc_timeout(options.rpc_timeout)


def leave_world(graceful: bool = True, timeout: float = 0) -> None:
    """Take the place of `shutdown`, except in the library."""
    if threading.current_thread().name.startswith("aiorpc-"):
        _shutdown(graceful, timeout)
    elif not rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        raise RuntimeError(
            "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
        )
    else:
        _worlds[-1].leave(graceful)


def load(name: str) -> type[Any]:
    """Return a class of tests that runs with torch's agent."""
    common = importlib.import_module("torch.testing._internal.common_distributed")
    fixture = importlib.import_module(f"{_TESTS}.rpc.tensorpipe_rpc_agent_test_fixture")
    tests = getattr(importlib.import_module(f"{_TESTS}.{MODULES[name]}"), name)
    bases = (tests, fixture.TensorPipeRpcAgentTestFixture, common.MultiProcessTestCase)
    loaded = globals()[name] = type(name, bases, {"__module__": __name__})  # so it can be pickled
    return loaded


# ── one test ────────────────────────────────────────────────────────────────────────────────────


def run_rank(tests: type[Any], name: str, rank: int, folder: str) -> NoReturn:
    """Run one rank of a test in this process, to its end."""
    code = 0
    output = os.open(f"{folder}/output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for each in (sys.stdout, sys.stderr):  # of C++ too, which says there why it aborts
        os.dup2(output, each.fileno())
    faulthandler.enable()
    try:
        case = tests(name)
        case.rank, case.file_name = rank, f"{folder}/rendezvous"
        with mock.patch.object(rpc, "init_rpc", enter_world):
            with mock.patch.object(rpc, "shutdown", leave_world):
                getattr(case, name)()
    except (unittest.SkipTest, SystemExit):  # torch's decorators exit with a code for each reason
        code = SKIPPED
    except BaseException as exc:
        lines = str(exc).splitlines() or [""]
        with contextlib.suppress(FileExistsError), open(f"{folder}/error", "x") as file:
            file.write(f"{type(exc).__name__}: {lines[0][:200]}")  # the first rank's
        code = FAILED
    os._exit(code)


@dataclass
class Running:
    """The processes of one test."""

    name: str
    folder: str
    pids: set[int]
    began: float = field(default_factory=time.monotonic)
    codes: list[int] = field(default_factory=list)

    def poll(self) -> bool:
        """Collect the processes that have ended; return whether all have."""
        if time.monotonic() - self.began > LIMIT:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
        for pid in [*self.pids]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.pids.discard(pid)
                self.codes.append(os.waitstatus_to_exitcode(status))
        return not self.pids

    def outcome(self) -> tuple[str, str]:
        """Return "ok", "skipped" or "failed", and the error."""
        if not any(self.codes):
            return "ok", ""
        if set(self.codes) == {SKIPPED}:
            return "skipped", ""
        try:
            with open(f"{self.folder}/error") as file:
                return "failed", file.read()
        except FileNotFoundError:
            return "failed", f"exit codes {self.codes}\n{self._output()}"

    def _output(self) -> str:
        """Return the end of what each rank has written."""
        outputs = sorted(pathlib.Path(self.folder).glob("output-*"))
        return "\n".join(f"{each.name}: {each.read_text()[-5000:]}" for each in outputs)


def start(tests: type[Any], name: str) -> Running:
    """Start one process for each rank."""
    folder = tempfile.mkdtemp(prefix="torch-suite-")
    pids = set()
    for rank in range(tests(name).world_size):
        if not (pid := os.fork()):
            run_rank(tests, name, rank, folder)
        pids.add(pid)
    return Running(name, folder, pids)


def run(classes: Iterable[str], only: Iterable[str], at_once: int) -> None:
    """Run the tests of these classes, and print the outcomes."""
    waiting = [
        (tests, name)
        for tests in map(load, classes)
        for name in unittest.TestLoader().getTestCaseNames(tests)
        if not only or name in only
    ]
    running: list[Running] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(start(*waiting.pop()))
        for each in [each for each in running if each.poll()]:
            running.remove(each)
            print(json.dumps((each.name, *each.outcome())), flush=True)
            shutil.rmtree(each.folder)
        time.sleep(0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="torch's own tests in worlds of ours.")
    parser.add_argument("classes", nargs="+", choices=[*MODULES], metavar="CLASS")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEST")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="tests at once")
    given = parser.parse_args()
    run(given.classes, given.only, given.at_once)
