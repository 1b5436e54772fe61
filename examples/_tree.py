"""Tree search with a network, as in AlphaZero: one coroutine searches one tree.

`search` is an ordinary loop. It awaits the network's opinion of each new position, so thousands of
searches run at once in one thread.
"""

import math
import random
from collections.abc import Awaitable, Callable

from torch import Tensor

from ._connect4 import WIDTH, Position

EXPLORE = 1.5  # weight of the network's probabilities against the values found
NOISE = 0.25  # share of noise in the probabilities of a root, if any

Evaluate = Callable[[int, int], Awaitable[Tensor]]
"""From the stones of the mover and of the other to seven probabilities and the mover's value."""


class Node:
    """A position with statistics of the moves from it; values are those of its player to move."""

    __slots__ = ("children", "moves", "outcome", "position", "priors", "values", "visits")

    def __init__(self, position: Position) -> None:
        self.position = position
        self.outcome = position.outcome()
        self.moves: list[int] = []  # none before the network has seen it
        self.priors: list[float] = []
        self.visits: list[int] = []
        self.values: list[float] = []
        self.children: list[Node | None] = []

    async def expand(self, evaluate: Evaluate) -> float:
        """Ask the network about the moves from here; return its value of the position."""
        found: list[float] = (await evaluate(*self.position)).tolist()
        *chances, value = found
        self.moves = self.position.moves()
        legal = [chances[move] for move in self.moves]
        total = sum(legal)
        self.priors = [chance / total for chance in legal]
        self.visits = [0] * len(legal)
        self.values = [0.0] * len(legal)
        self.children = [None] * len(legal)
        return value

    def disturb(self) -> None:
        """Mix noise into the probabilities: gamma of shape 1, so Dirichlet of alpha 1."""
        noise = [random.expovariate(1.0) for _ in self.moves]
        share = NOISE / sum(noise)
        self.priors = [(1 - NOISE) * p + share * n for p, n in zip(self.priors, noise, strict=True)]

    def choose(self) -> int:
        """Return the number of the move with the highest upper bound."""
        weight = EXPLORE * math.sqrt(1 + sum(self.visits))
        statistics = zip(self.values, self.priors, self.visits, strict=True)
        bounds = [value + weight * prior / (1 + visits) for value, prior, visits in statistics]
        return bounds.index(max(bounds))

    def child(self, number: int) -> "Node":
        """Return the node after move `number`."""
        if (child := self.children[number]) is None:
            child = self.children[number] = Node(self.position.play(self.moves[number]))
        return child

    def learn(self, number: int, value: float) -> None:
        """Count a visit of move `number`, which had this value."""
        self.visits[number] += 1
        self.values[number] += (value - self.values[number]) / self.visits[number]

    def shares(self) -> list[float]:
        """Return the share of the visits of each column."""
        total = sum(self.visits)
        shares = dict(zip(self.moves, self.visits, strict=True))
        return [shares.get(column, 0) / total for column in range(WIDTH)]

    def draw(self) -> int:
        """Return the number of a move, drawn by visits."""
        return random.choices(range(len(self.moves)), self.visits)[0]

    def most_visited(self) -> int:
        """Return the number of the move with most visits."""
        return self.visits.index(max(self.visits))


async def search(root: Node, evaluate: Evaluate, visits: int, *, noise: bool = False) -> None:
    """Visit the moves from `root` until they have `visits` visits together."""
    if not root.moves:
        await root.expand(evaluate)
    if noise:
        root.disturb()
    for _ in range(visits - sum(root.visits)):
        await visit(root, evaluate)


async def visit(root: Node, evaluate: Evaluate) -> None:
    """Go down the tree to a new position or an end of the game, and take its value back up."""
    node, path = root, []
    while node.moves:
        path.append((node, number := node.choose()))
        node = node.child(number)
    value = await node.expand(evaluate) if node.outcome is None else float(node.outcome)
    for parent, number in reversed(path):
        value = -value
        parent.learn(number, value)
