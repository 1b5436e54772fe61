"""The run of examples/week.py on Ray: the same model, environments, hyperparameters and roles.

Its strongest form. Each role is an async actor on a node of its own host, restarted without limit,
and calls to it are made again. The learner's next process takes the newest state that an actor
holds, else the keeper's file. Each has a watchdog, of faulthandler as ours is. Each node starts
some workers that import torch in advance: once all have had an actor, a new one imports it. (Ray
gives workers that have run a task to no actor.) Each node and the driver are in a loop of a shell,
so all of them come again if the head dies, whose state only a Redis beside it would keep.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import IO, Any, TypeVar

import torch

from aiorpc_torch.training import Recovered
from examples import impala, week
from examples._learning import CartPole

from ._chaos_world import PLACES, WATCHDOG, OnHosts, World
from ._hosts import Host, hosts

T = TypeVar("T")

os.environ["RAY_AUTH_MODE"] = "disabled"  # else each host needs a copy of a token
ray: Any = import_module("ray")

PORT = 6379
WORKERS = 3  # of a node, which have imported torch before they get an actor
RECOVERY = 1.0  # seconds for actors to tell what they hold
OPTIONS = {
    "RAY_preload_python_modules": "benchmarks._chaos_ray",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # 60, with which nodes outlive their head
    "RAY_worker_niceness": "0",  # 15, with which they get little on a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
}


async def again(call: Callable[[], Awaitable[T]]) -> T:
    """Call an actor until it answers: Ray makes most of the attempts."""
    while True:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it is not there yet
            return await call()
        await asyncio.sleep(week.PAUSE)


def actor(role: str) -> Any:
    """Return the handle of a role's actor."""
    return ray.get_actor(role)


# ── the roles ───────────────────────────────────────────────────────────────────────────────────


class Role:
    """An actor. What it does begins with `live`, which Ray calls again in its next process."""

    def __init__(self, role: str, folder: str, words: Sequence[str]) -> None:
        self.role, self.folder = role, Path(folder)
        self.given = week.parse(role, "--place", "", *words)
        self.version, self.state = -1, dict[str, Any]()
        self.task: asyncio.Task[None] | None = None
        threading.Thread(target=self.hang, daemon=True).start()
        self.tell(role=role, pid=os.getpid())

    def hang(self) -> None:
        """Keep the GIL for ever once a file says so."""
        while not (self.folder / f"hang.{self.role}.{os.getpid()}").exists():
            time.sleep(0.05)
        ctypes.PyDLL(None).pause()

    def tell(self, **values: object) -> None:
        with (self.folder / f"{self.role}.lines").open("a") as lines:
            lines.write(f"{json.dumps(values)}\n")

    async def live(self) -> None:
        """Do what this role does, for ever."""
        if self.task is None:
            self.renew_watchdog()
            self.task = asyncio.create_task(self.run())
        await self.task

    def renew_watchdog(self) -> None:
        """End this process if its event loop stands still, as ours does."""
        faulthandler.dump_traceback_later(WATCHDOG, exit=True)
        asyncio.get_running_loop().call_later(WATCHDOG / 4, self.renew_watchdog)

    async def newest(self) -> tuple[int, dict[str, Any]]:
        """Return the version that is held, and its state."""
        return self.version, self.state

    async def run(self) -> None:
        """Hold the newest version, and save it now and then."""
        due = time.monotonic()
        async for _ in self.versions():
            if self.role == "keeper" and time.monotonic() >= due:
                due = time.monotonic() + week.SAVE
                found = Recovered(self.version, self.state)
                await asyncio.to_thread(week.save, found, self.given.checkpoint)

    async def versions(self) -> AsyncIterator[Any]:
        """Yield the learner's state each time that there is a newer version."""
        while True:
            ask = lambda: actor("learner").after.remote(self.version)  # noqa: E731
            self.version, self.state = await again(ask)
            self.tell(holds=self.version)
            yield self.state
            await asyncio.sleep(week.POLL)


class Learner(Role):
    """The learner, which publishes its state."""

    async def after(self, seen: int) -> tuple[int, dict[str, Any]]:
        """Wait for a version that is newer; return it."""
        while self.version <= seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self.version, self.state

    async def recover(self) -> tuple[int, dict[str, Any]]:
        """Return the newest version that an actor holds, or the keeper has saved."""
        asked = list[asyncio.Future[Any]]()
        for role in PLACES.keys() - {"learner", "replay"}:
            with contextlib.suppress(ValueError):  # it is not there yet
                asked.append(asyncio.ensure_future(actor(role).newest.remote()))
        if asked:
            await asyncio.wait(asked, timeout=RECOVERY)
        held = [each.result() for each in asked if each.done() and not each.exception()]
        found = max(held, key=lambda each: each[0], default=Recovered(-1, {}))
        saved = week.saved(self.given.checkpoint)
        return found if found[0] >= 0 or saved is None else saved

    async def run(self) -> None:
        torch.manual_seed(self.given.seed)
        learner = week.Learner(self.given.steps // (week.BATCH * impala.STEPS))
        version, state = await self.recover()
        if state:
            learner.load(state)
        self.version, self.state = max(version, 0), learner.state()
        self.tell(recovered=self.version, steps=learner.steps)
        scores = deque[float](maxlen=week.RECENT)
        while True:
            reader = f"{os.getpid()}"
            ask = lambda: actor("replay").sample.remote(week.BATCH, reader)  # noqa: B023, E731
            rollouts = await again(ask)
            await asyncio.to_thread(learner.learn, rollouts)
            learner.steps += sum(len(each.rewards) for each in rollouts)
            self.version, self.state = self.version + 1, clone(learner.state())
            scores.extend(itertools.chain.from_iterable(each.scores for each in rollouts))
            reward = round(mean(scores), 1) if scores else None
            self.tell(version=self.version, steps=learner.steps, reward=reward)


def clone(tree: Any) -> Any:
    """Copy a tree, whose tensors the next update changes."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, tree)


class Replay(Role):
    """Rollouts on their way; each is sampled once."""

    def __init__(self, role: str, folder: str, words: Sequence[str]) -> None:
        super().__init__(role, folder, words)
        self.queue = impala.Queue()
        self.changed = asyncio.Condition()
        self.reader = ""

    async def insert(self, rollout: impala.Rollout) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.queue) < 2 * week.BATCH)
            self.queue.append(rollout)
            self.changed.notify_all()

    async def sample(self, size: int, reader: str) -> Sequence[impala.Rollout]:
        """Return the oldest rollouts; none to a process that another one has replaced."""
        async with self.changed:
            self.reader = reader
            self.changed.notify_all()
            await self.changed.wait_for(lambda: len(self.queue) >= size or self.reader != reader)
            found = self.queue.sample(size) if self.reader == reader else []
            self.changed.notify_all()
        return found

    async def run(self) -> None:
        async for _ in self.versions():
            self.tell(queued=len(self.queue))


class Player(impala.Player):
    """A copy of the network, and the version that is in."""

    def __init__(self) -> None:
        self.network = impala.Network()
        self.policy: Any = SimpleNamespace(version=-1)


class Actor(Role):
    """Environments that play, each in a coroutine."""

    async def run(self) -> None:
        player, sent = Player(), 0

        def insert(rollout: impala.Rollout) -> Awaitable[object]:
            inserting: Awaitable[object] = actor("replay").insert.remote(rollout)
            return inserting

        async def play(game: impala.Game) -> None:
            nonlocal sent
            while True:
                rollout = await game.play(player)
                await again(partial(insert, rollout))
                sent += len(rollout.rewards)
                self.tell(sent=sent)
                await asyncio.sleep(self.given.rest)

        playing = list[asyncio.Task[None]]()
        seeds = torch.randint(1 << 30, (week.ENVIRONMENTS,)).tolist()
        async for state in self.versions():
            player.network.load_state_dict(state["network"])
            player.policy.version = self.version
            playing = playing or [asyncio.create_task(play(impala.Game(each))) for each in seeds]
            for each in playing:
                if each.done():
                    each.result()


class Evaluator(Role):
    """Whole episodes, again and again."""

    async def run(self) -> None:
        network = impala.Network()
        games = [CartPole(seed) for seed in range(week.EPISODES)]
        async for state in self.versions():
            network.load_state_dict(state["network"])
            score = mean(await asyncio.to_thread(week.play_greedily, games, network))
            self.tell(evaluated=self.version, score=score)
            await asyncio.sleep(self.given.pause)


KINDS = {"learner": Learner, "replay": Replay, "evaluator": Evaluator, "keeper": Role}


# ── the driver ──────────────────────────────────────────────────────────────────────────────────


async def live(handle: Any) -> None:
    """Let an actor live, again whenever that fails."""
    while True:
        await again(handle.live.remote)


async def drive(address: str, folder: str, words: Sequence[str]) -> None:
    """Start the actors."""
    ray.init(address=address, namespace="week", log_to_driver=False)
    async with asyncio.TaskGroup() as group:
        for role, host in PLACES.items():
            kind = ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)(
                KINDS.get(role, Actor)
            )
            found = kind.options(name=role, resources={f"host{host}": 1})
            group.create_task(live(found.remote(role, folder, words)))


# ── the run ─────────────────────────────────────────────────────────────────────────────────────


class OnRay(OnHosts):
    """The actors on nodes of Ray, one on each host; the head is on the keeper's."""

    faults = "kill", "freeze", "cut", "hang"  # an async actor does not hear of SIGTERM
    deaths = "kill", "hang", "head"
    last = "kill", "head"
    patience = 180.0

    def __init__(self, machines: list[Host], folder: Path, *words: str) -> None:
        self._folder = folder
        self._address = f"{machines[0].address}:{PORT}"
        os.environ |= OPTIONS
        for old in (*folder.glob("*.lines"), *folder.glob("hang.*")):
            old.unlink()
        for number, host in enumerate(machines):
            for path in ("/tmp/ray", "/dev/shm"):  # their own, as machines have
                Path(path).mkdir(exist_ok=True)
                host.run("mount", "-t", "tmpfs", "tmpfs", path)
            self._start(host, f"node{number}", "ray.scripts.scripts", *self._node(number, host))
        driver = "benchmarks._chaos_ray", self._address, str(folder), *words
        self._start(machines[0], "driver", *driver)
        super().__init__(machines, folder, *words)

    def _node(self, number: int, host: Host) -> list[str]:
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        join = head if number == 0 else [f"--address={self._address}"]
        words = [f"--node-ip-address={host.address}", f"--num-cpus={WORKERS}", "--num-gpus=0"]
        words += ["--object-store-memory=100000000", "--block"]
        return ["start", *join, *words, f'--resources={{"host{number}": 9}}']

    def _start(self, host: Host, name: str, *words: str) -> None:
        errors = (self._folder / f"{name}.log").open("w")
        host.loop(*words, stdout=errors, stderr=errors)

    def _loop(self, role: str, words: Sequence[str], errors: IO[str]) -> "subprocess.Popen[str]":
        lines = self._folder / f"{role}.lines"
        lines.touch()
        command = ["tail", "--lines=+1", "--follow", str(lines)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    def dump(self) -> None:
        """Write nothing: Ray has the signals of its processes."""

    def hang(self, role: str) -> None:
        """Let an actor hang while it has the GIL: Ray has the main thread, and so all signals."""
        (self._folder / f"hang.{role}.{self._pid(role)}").touch()

    def head(self, role: str) -> None:
        """Kill the head's own process: all roles are lost with it."""
        if role == "keeper":
            self._run(role, "pkill", "-KILL", "-x", "gcs_server")


@contextlib.contextmanager
def world(folder: Path, *words: str) -> Iterator[World]:
    """Start the program on four hosts; at the end all of its processes are killed."""
    with hosts(4) as machines:
        yield OnRay(machines, folder, *words)


if __name__ == "__main__":
    from benchmarks import _chaos_ray  # under the name that the workers import

    asyncio.run(_chaos_ray.drive(sys.argv[1], sys.argv[2], sys.argv[3:]))
