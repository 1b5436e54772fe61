"""Self-play on Connect-4: its rules, its search, its learner, and the program as a user runs it."""

import asyncio
import random
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import psutil
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiorpc_torch import RRef, remote
from aiorpc_torch.types import Worker
from examples._connect4 import HEIGHT, START, WIDTH, Position, has_four
from examples._policy import Learner, Network, Sample, boards
from examples._tree import Node, search
from examples.selfplay import Evaluator, Player, arguments, at_random, duel, openings
from tests.support.example_programs import (
    all_ended,
    command,
    run,
    started,
    until,
    workers_of,
)

# ── the rules, against a board of lists ─────────────────────────────────────────────────────────

tries = st.lists(st.integers(0, WIDTH - 1), max_size=60)  # columns; a full one is passed over


class Board:
    """A slow Connect-4: columns of players, and every line of four looked at."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = [[] for _ in range(WIDTH)]
        self.player = 0

    def moves(self) -> list[int]:
        return [number for number, column in enumerate(self.columns) if len(column) < HEIGHT]

    def play(self, column: int) -> None:
        self.columns[column].append(self.player)
        self.player = 1 - self.player

    def at(self, x: int, y: int) -> int | None:
        inside = 0 <= x < WIDTH and 0 <= y < len(self.columns[x])
        return self.columns[x][y] if inside else None

    def winner(self) -> int | None:
        for x in range(WIDTH):
            for y in range(HEIGHT):
                for dx, dy in ((1, 0), (0, 1), (1, 1), (1, -1)):
                    line = {self.at(x + n * dx, y + n * dy) for n in range(4)}
                    if len(line) == 1 and (found := line.pop()) is not None:
                        return found
        return None

    def outcome(self) -> int | None:
        if (winner := self.winner()) is not None:
            return 1 if winner == self.player else -1
        return None if self.moves() else 0

    def planes(self) -> list[list[list[float]]]:
        """Return the squares of the mover, then those of the other, the lowest row first."""
        players = (self.player, 1 - self.player)
        return [
            [[float(self.at(x, y) == player) for x in range(WIDTH)] for y in range(HEIGHT)]
            for player in players
        ]


def played(columns: list[int]) -> tuple[Position, Board]:
    """A position by both, after the columns that can be played until the game is over."""
    position, board = START, Board()
    for column in columns:
        if board.outcome() is None and column in board.moves():
            position = position.play(column)
            board.play(column)
    return position, board


@given(tries)
def test_rules_are_those_of_a_plain_board(columns: list[int]) -> None:
    """Moves, results and squares, after any game."""
    position, board = played(columns)
    assert position.moves() == board.moves()
    assert position.outcome() == board.outcome()
    found = boards(torch.tensor([position.mine]), torch.tensor([position.theirs]))
    assert found[0].tolist() == board.planes()


@given(st.randoms(use_true_random=False))
def test_whole_games_end_alike(chance: random.Random) -> None:
    """Games of legal moves only, to their ends: wins, and now and then a draw."""
    position, board = START, Board()
    while (outcome := board.outcome()) is None:
        assert position.outcome() is None
        column = chance.choice(board.moves())
        position = position.play(column)
        board.play(column)
    assert position.outcome() == outcome


@given(st.integers(0, WIDTH - 1), st.integers(0, HEIGHT - 1), st.sampled_from([1, 6, 7, 8]))
def test_no_line_continues_in_the_next_column(x: int, y: int, step: int) -> None:
    """Of four squares at equal distances, those are a line that a plain board takes for one."""
    squares = [7 * x + y + number * step for number in range(4)]
    dx, dy = {1: (0, 1), 6: (1, -1), 7: (1, 0), 8: (1, 1)}[step]
    inside = x + 3 * dx < WIDTH and 0 <= y + 3 * dy < HEIGHT
    on_board = [square for square in squares if square < 49 and square % 7 < HEIGHT]
    assert has_four(sum(1 << square for square in on_board)) == inside


def test_a_full_board_without_a_line_is_a_draw() -> None:
    columns = [0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0]
    columns += [each + 2 for each in columns] + [each + 4 for each in columns] + [6] * 6
    position, board = played(columns)
    assert board.moves() == position.moves() == []
    assert position.outcome() == board.outcome() == 0


# ── the search ──────────────────────────────────────────────────────────────────────────────────


async def even(mine: int, theirs: int) -> Tensor:
    """A network that knows nothing."""
    return torch.tensor([1 / WIDTH] * WIDTH + [0.0])


def threat(winners: str) -> tuple[Position, int]:
    """A position in which three stones stand in column 3, and its mover: theirs or one's own."""
    columns = {"mover": [3, 0, 3, 0, 3, 1], "other": [3, 0, 3, 0, 3]}[winners]
    return played(columns)[0], 3


@pytest.mark.parametrize("winners", ["mover", "other"])
async def test_a_search_wins_in_one_and_prevents_a_loss_in_one(winners: str) -> None:
    """Also with a network that knows nothing: an end of the game has its exact value."""
    position, right = threat(winners)
    root = Node(position)
    await search(root, even, 200)
    assert root.moves[root.most_visited()] == right


async def test_an_end_of_the_game_is_not_evaluated() -> None:
    """The network is asked once about each position that is not over, and about no other."""
    asked: list[Position] = []

    async def evaluate(mine: int, theirs: int) -> Tensor:
        asked.append(Position(mine, theirs))
        return await even(mine, theirs)

    await search(Node(threat("other")[0]), evaluate, 300)
    assert 10 < len(asked) < 300
    assert all(position.outcome() is None for position in asked)


@given(tries, st.integers(1, 60), st.booleans())
def test_visits_are_those_asked_for(columns: list[int], visits: int, noise: bool) -> None:
    """Of legal moves only; priors stay probabilities; what is kept of a tree counts."""
    position, board = played(columns)
    if board.outcome() is not None:
        return
    root = Node(position)
    asyncio.run(search(root, even, visits, noise=noise))
    assert root.moves == board.moves()
    assert sum(root.visits) == visits
    assert sum(root.priors) == pytest.approx(1.0)
    assert sum(root.shares()) == pytest.approx(1.0)
    assert all(-1.0 <= value <= 1.0 for value in root.values)
    child = root.child(root.most_visited())
    if child.outcome is None:
        asyncio.run(search(child, even, visits + 5))
        assert sum(child.visits) == visits + 5


async def test_a_search_follows_the_network() -> None:
    """One visit is the likeliest legal move; a position that the network dreads is avoided."""

    async def left(mine: int, theirs: int) -> Tensor:
        chances = [0.4, 0.3, 0.1, 0.05, 0.05, 0.05, 0.05]
        return torch.tensor([*chances, 0.9 if theirs == 1 else 0.0])  # 1: the lowest, on the left

    once, often = Node(START), Node(START)
    await search(once, left, 1)
    await search(often, left, 100)
    assert once.most_visited() == 0
    assert often.most_visited() == 1


# ── the network and the learner ─────────────────────────────────────────────────────────────────


def sample(columns: list[int], best: int, result: float) -> Sample:
    position, _ = played(columns)
    return (*position, [float(column == best) for column in range(WIDTH)], result)


def test_it_learns_moves_and_results_and_their_mirror_images() -> None:
    """The likeliest move and the sign of the value are those of the games, on both sides."""
    game = [sample([3, 0, 3, 0, 3, 1], 3, 1.0), sample([0, 3, 0, 3, 0], 1, -1.0)]
    learner = Learner(0, batch=8, reuse=200)
    network = learner.learn([game])
    mirrored = [sample([3, 6, 3, 6, 3, 5], 3, 1.0), sample([6, 3, 6, 3, 6], 5, -1.0)]
    for mine, theirs, shares, result in [*game, *mirrored]:
        logits, value = network(boards(torch.tensor([mine]), torch.tensor([theirs])))
        assert logits.argmax() == shares.index(1.0)
        assert value.item() * result > 0.5


def test_a_copy_does_not_learn() -> None:
    learner = Learner(0)
    before, game = learner.copy(), [sample([], 3, 1.0)]
    later = learner.learn([game])
    pairs = zip(before.parameters(), later.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)
    assert all(
        torch.equal(one, other)
        for one, other in zip(before.parameters(), Learner(0).network.parameters(), strict=True)
    )


# ── games ───────────────────────────────────────────────────────────────────────────────────────


async def test_batched_and_alone_the_network_says_the_same(world: Worker) -> None:
    """The batch is one run of the network; each caller gets its own position's row."""
    torch.manual_seed(0)
    evaluator = Evaluator(Network())
    asked = remote(RRef(evaluator))
    positions = openings(2)
    together = await asyncio.gather(*(asked.evaluate(*position) for position in positions))
    alone = [await asked.evaluate_alone(*position) for position in positions]
    torch.testing.assert_close(together, alone)
    assert torch.stack(alone).std(0).min() > 1e-4  # the rows can be told from each other
    assert torch.stack(alone)[:, :WIDTH].sum(1).tolist() == pytest.approx([1.0] * len(alone))


async def test_results_in_a_game_alternate(world: Worker) -> None:
    """The last mover has won, and results change sign from move to move, or all are draws."""
    player, evaluator = Player(), RRef(Evaluator(Network()))
    games = await asyncio.gather(*(player.play(evaluator, 4, "evaluate") for _ in range(8)))
    for game in games:
        last = Position(*game[0][:2])
        assert any(last.play(move).outcome() is not None for move in last.moves())
        assert Position(*game[-1][:2]) == START
        results = [result for *_, result in game]
        assert results == [results[0] * (-1) ** number for number in range(len(game))]
        assert results[0] in (0.0, 1.0)


async def three(position: Position) -> int:
    """The column in the middle while it has room."""
    return 3 if 3 in position.moves() else position.moves()[0]


async def zero(position: Position) -> int:
    """The first column while it has room."""
    return position.moves()[0]


async def test_duels_count_for_the_first_mover() -> None:
    """Whoever wins, and a game that is over already has lost for its mover."""
    assert await duel(three, zero, START) == 1
    assert await duel(zero, three, played([5, 3, 5, 3, 6, 3])[0]) == -1
    assert await duel(at_random, at_random, played([3, 0, 3, 0, 3, 0, 3])[0]) == -1


async def test_a_match_changes_the_colours(world: Worker) -> None:
    """Against itself without chance, what one side wins with an opening the other one loses."""
    evaluator, player = RRef(Evaluator(Network())), Player()
    starts = random.sample(openings(), 6)
    results = await player.match(evaluator, evaluator, 8, starts)
    assert [-result for result in results[:6]] == results[6:]
    assert set(results) <= {-1, 0, 1}


def test_openings_are_positions_after_that_many_stones() -> None:
    assert openings(0) == [START]
    assert len(openings(2)) == WIDTH**2
    for position in openings(4):
        assert position.mine.bit_count() == position.theirs.bit_count() == 2
        assert position.outcome() is None


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--match", "7", "an even number of games, got 7"),
        ("--games", "0", "--games must be at least 1, got 0"),
        ("--match-simulations", "0", "--match-simulations must be at least 1, got 0"),
        ("--compare", "-1", "--compare must be at least 0, got -1"),
    ],
)
def test_options_are_checked(
    option: str,
    value: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["selfplay", option, value])
    with pytest.raises(SystemExit):
        arguments()
    assert said in capsys.readouterr().err


# ── the program ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of the program and its picture."""
    picture = tmp_path_factory.mktemp("selfplay") / "curve.png"
    return run("selfplay", "--quick", "--plot", str(picture)), picture


@pytest.mark.slow
@pytest.mark.worlds
@pytest.mark.timeout(180)
def test_the_program_says_how_each_checkpoint_plays(quick: tuple[str, Path]) -> None:
    """Games won and drawn of each match, which are not more than were played."""
    said, _ = quick
    lines = re.findall(r"(\d+) won, (\d+) drawn", said)
    assert len(lines) == 6  # two checkpoints, three matches
    assert all(0 <= int(won) + int(drawn) <= 10 for won, drawn in lines)


@pytest.mark.slow
@pytest.mark.worlds
@pytest.mark.timeout(180)
def test_the_program_learns_draws_and_compares(quick: tuple[str, Path]) -> None:
    """Its learner has had games, its picture is there, and both ways to evaluate have a speed."""
    said, picture = quick
    games = re.search(r"(\d+) games, [\d.]+ a second, loss ([\d.]+)", said)
    assert games is not None
    assert int(games[1]) > 0
    assert float(games[2]) > 0.0
    assert picture.read_bytes().startswith(b"\x89PNG")
    speeds = re.search(r"batched ([\d.]+), unbatched ([\d.]+)", said)
    assert speeds is not None
    assert all(float(speed) > 0 for speed in speeds.groups())


@pytest.mark.exhaustive
@pytest.mark.worlds
@pytest.mark.timeout(180)
def test_a_killed_player_ends_the_program() -> None:
    """kill -9 of a child: the world ends, and its name and a bad exit code say why."""
    with started(
        command("selfplay", "--players", "1", "--seconds", "300", python=["-u"])
    ) as learner:
        until(learner, "simulations a move")
        children = psutil.Process(learner.pid).children(recursive=True)
        workers_of(learner)[0].kill()
        _, errors = learner.communicate(timeout=60)
        assert learner.returncode not in (0, None)
        assert "worker 'player" in errors
        all_ended(children)
