"""AlphaZero's self-play on Connect-4: thousands of tree searches, one batched network.

Players in processes of their own play games against themselves, each game in a coroutine. A search
awaits the network's opinion of each new position: `await remote(evaluator).evaluate(mine, theirs)`.
`evaluate` is `@batched`, so the network runs once for all searches that wait. A game is a remote
call too: the first process calls for games and learns from those that are over.

Then checkpoints play against random moves, and against the first checkpoint with as many
simulations. Each opening is played twice, with the colours exchanged.

    python -m examples.selfplay                     # ten minutes on two cores
    python -m examples.selfplay --device cuda:0     # the network, for play and training
    torchrun --nproc-per-node 3 -m examples.selfplay
"""

import argparse
import asyncio
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import aiorpc_torch as aiorpc

from ._connect4 import START, Position
from ._plot import curves
from ._policy import Learner, Network, Sample, boards
from ._tree import Node, search

DRAWN = 12  # moves at the start of a game that are drawn, by visits; then the most visited follow

Move = Callable[[Position], Awaitable[int]]


class Evaluator:
    """A network that searches ask about positions."""

    def __init__(self, network: Network) -> None:
        self.network = network

    @aiorpc.batched(max_size=512, stack=True)
    def evaluate(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """Return seven probabilities and a value for each position; bitboards come stacked: [B]."""
        return self._answer(mine, theirs)

    async def evaluate_alone(self, mine: int, theirs: int) -> Tensor:
        """Return the same for one position, unbatched, for comparison."""
        return self._answer(torch.tensor([mine]), torch.tensor([theirs]))[0]

    @torch.inference_mode()
    def _answer(self, mine: Tensor, theirs: Tensor) -> Tensor:
        logits, values = self.network(boards(mine, theirs))
        return torch.cat((logits.softmax(1), values.unsqueeze(1)), 1).cpu()


class Player:
    """A process that plays, each game in a coroutine."""

    async def play(
        self, evaluator: aiorpc.RRef[Evaluator], simulations: int, method: str
    ) -> list[Sample]:
        """Play a game of a network against itself."""
        evaluate, node = getattr(aiorpc.remote(evaluator), method), Node(START)
        path: list[tuple[Position, list[float]]] = []
        while node.outcome is None:
            await search(node, evaluate, simulations, noise=True)
            path.append((node.position, node.shares()))
            node = node.child(node.draw() if len(path) <= DRAWN else node.most_visited())
        # The last mover has won, if any, the mover before has lost, and so on.
        results = itertools.cycle((-float(node.outcome), float(node.outcome)))
        return [(*position, shares, next(results)) for position, shares in reversed(path)]

    async def match(
        self,
        one: aiorpc.RRef[Evaluator],
        other: aiorpc.RRef[Evaluator] | None,
        simulations: int,
        starts: Sequence[Position],
    ) -> list[int]:
        """Return a result for each game, two a start: 1 if `one` won, 0 for a draw, else -1."""
        mover = searching(one, simulations)
        opponent = at_random if other is None else searching(other, simulations)
        games = [duel(mover, opponent, start) for start in starts]
        games += [duel(opponent, mover, start) for start in starts]
        results = await asyncio.gather(*games)
        return [*results[: len(starts)], *(-result for result in results[len(starts) :])]


def searching(evaluator: aiorpc.RRef[Evaluator], simulations: int) -> Move:
    """Return a function that finds the best move by a search."""

    async def move(position: Position) -> int:
        root = Node(position)
        await search(root, aiorpc.remote(evaluator).evaluate, simulations)
        return root.moves[root.most_visited()]

    return move


def openings(stones: int = 4) -> list[Position]:
    """Return every position after so many stones."""
    found = {START}
    for _ in range(stones):
        found = {position.play(move) for position in found for move in position.moves()}
    return sorted(found)


async def at_random(position: Position) -> int:
    """Return any move."""
    return random.choice(position.moves())


async def duel(first: Move, second: Move, position: Position) -> int:
    """Return 1 if `first`, who moves first, wins, 0 for a draw, else -1."""
    sign = 1
    while (outcome := position.outcome()) is None:
        position = position.play(await first(position))
        first, second, sign = second, first, -sign
    return sign * outcome


# ── training ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Checkpoint:
    """A network after some seconds of training and some games."""

    seconds: float
    games: int
    network: Network


class Training:
    """A learner, the evaluator with its latest network, and the players that ask it."""

    def __init__(self, players: aiorpc.Group[Player], options: argparse.Namespace) -> None:
        self.players = players
        self.options = options
        self.learner = Learner(options.seed, device=options.device)
        self.evaluator = Evaluator(self.learner.copy())
        self.asked = aiorpc.RRef(self.evaluator)
        self.finished: asyncio.Queue[list[Sample]] = asyncio.Queue(options.lesson)
        self.games = 0
        self.checkpoints = [Checkpoint(0.0, 0, self.evaluator.network)]

    async def train(self) -> None:
        """Play and learn, both all the time, until the last checkpoint is due."""
        async with asyncio.TaskGroup() as coroutines:
            supplies = [
                coroutines.create_task(self._supply(player))
                for player in [*self.players] * self.options.games
            ]
            await self._learn()
            for supply in supplies:
                supply.cancel()  # and with it the remote coroutine that plays

    async def _supply(self, player: aiorpc.RRef[Player]) -> None:
        while True:
            await self.finished.put(await self._play(player))

    async def _play(self, player: aiorpc.RRef[Player], method: str = "evaluate") -> list[Sample]:
        simulations = self.options.simulations
        game: list[Sample] = await aiorpc.remote(player).play(self.asked, simulations, method)
        return game

    async def _learn(self) -> None:
        start, interval = time.monotonic(), self.options.seconds / self.options.checkpoints
        for number in range(1, self.options.checkpoints + 1):
            await self._lesson()
            while time.monotonic() < start + number * interval:
                await self._lesson()
            self._record(time.monotonic() - start)

    async def _lesson(self) -> None:
        games = [await self.finished.get() for _ in range(self.options.lesson)]
        self.evaluator.network = await asyncio.to_thread(self.learner.learn, games)
        self.games += len(games)

    def _record(self, seconds: float) -> None:
        self.checkpoints.append(Checkpoint(seconds, self.games, self.evaluator.network))
        rate, loss = self.games / seconds, self.learner.loss
        line = f"{self.games:6,} games, {rate:.1f} a second, loss {loss:.2f}"
        print(f"{seconds:5.0f} s: {line}", flush=True)

    async def match(
        self, network: Network, other: Network | None, simulations: int
    ) -> tuple[int, int]:
        """Return the games of a match that `network` won, and those that were drawn."""
        one, two = (
            aiorpc.RRef(Evaluator(network)),
            None if other is None else aiorpc.RRef(Evaluator(other)),
        )
        starts = random.sample(openings(), self.options.match // 2)
        shares = [starts[number :: len(self.players)] for number in range(len(self.players))]
        matches = await aiorpc.remote(self.players).match(
            one, two, simulations, aiorpc.each(shares)
        )
        results = [*itertools.chain(*matches)]
        return results.count(1), results.count(0)

    async def speed(self, method: str, games: int) -> float:
        """Return games a second without learning, all of them at once."""
        players = itertools.islice(itertools.cycle(self.players), games)
        start = time.monotonic()
        await asyncio.gather(*(self._play(player, method) for player in players))
        return games / (time.monotonic() - start)


# ── the program ─────────────────────────────────────────────────────────────────────────────────


async def main(options: argparse.Namespace) -> None:
    """Lead as the learner on rank 0; serve on the other workers until it has left."""
    rank = int(os.environ.get("RANK", -1))  # of torchrun, or of a terminal for each worker
    local = aiorpc.local_world(
        [f"player{number}" for number in range(options.players)], name="learner"
    )
    name = f"player{rank - 1}" if rank else "learner"
    async with local if rank < 0 else aiorpc.worker(name) as me:
        await (me.serve(until="learner") if me.rank else lead(me.peers, options))


async def lead(names: Sequence[str], options: argparse.Namespace) -> None:
    """Train, then play the matches of each checkpoint."""
    training = Training(await aiorpc.create(names, Player), options)
    sizes = f"{options.games} games each, {options.simulations} simulations a move"
    print(f"{len(names)} players with {sizes}", flush=True)
    await training.train()
    await report(training, options)
    if games := options.compare:
        batched, alone = [await training.speed(it, games) for it in ("evaluate", "evaluate_alone")]
        ratio = f"batched {batched:.2f}, unbatched {alone:.2f} ({batched / alone:.1f} x)"
        print(f"games a second, {games} at once: {ratio}")
    (evaluated,) = aiorpc.observe.stats().batches.values()
    mean = evaluated.items / evaluated.batches
    print(f"{evaluated.items:,} positions evaluated in batches of {mean:.0f} on average")


async def report(training: Training, options: argparse.Namespace) -> None:
    """Print wins and draws of each checkpoint; draw the learning curve."""
    first, simulations = training.checkpoints[0].network, options.match_simulations
    matches = {
        "network alone against random": (None, 1),
        "against random": (None, simulations),
        "against the first checkpoint": (first, simulations),
    }
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in matches}
    for checkpoint in training.checkpoints:
        print(f"{checkpoint.seconds:5.0f} s:", end="")
        for name, (other, visits) in matches.items():
            won, drawn = await training.match(checkpoint.network, other, visits)
            lines[name].append((checkpoint.seconds / 60, 100 * won / options.match))
            print(f"  {name} {won} won, {drawn} drawn", end="", flush=True)
        print()
    title = f"Connect-4 after self-play, {simulations} simulations a move"
    curves(options.plot, lines, title=title, xlabel="minutes", ylabel="% of games won")
    print(f"learning curve: {options.plot}")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=400.0, help="seconds of training")
    add("--players", type=int, default=2, help="number of processes that play")
    add("--games", type=int, default=500, help="games of a player at once")
    add("--simulations", type=int, default=40, help="visits of a search in training")
    add("--lesson", type=int, default=50, help="new games from which the learner learns at once")
    add("--checkpoints", type=int, default=4, help="number of checkpoints after the first")
    add("--match", type=int, default=100, help="games of a match, two from each opening")
    add("--match-simulations", type=int, default=80, help="visits of a search in matches")
    add("--compare", type=int, default=100, help="games that are timed, batched and not; 0: none")
    add("--device", default="cpu", help="device of the network: cpu, cuda:0, ...")
    add("--seed", type=int, default=0, help="seed of the network's weights")
    add("--plot", type=Path, default=Path("out/selfplay.png"))
    add("--quick", action="store_true", help="a few games, as a check")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.games, options.simulations, options.lesson = 2.0, 16, 8, 16
        options.checkpoints, options.match, options.match_simulations = 1, 10, 8
        options.compare = 8
    least = {"players": 1, "games": 1, "simulations": 1, "lesson": 1, "checkpoints": 1}
    for name, number in {**least, "match": 2, "match_simulations": 1, "compare": 0}.items():
        if (given := getattr(options, name)) < number:
            parser.error(f"--{name.replace('_', '-')} must be at least {number}, got {given}")
    if options.match % 2:
        parser.error(f"--match must be an even number of games, got {options.match}")
    return options


if __name__ == "__main__":
    asyncio.run(main(arguments()))
