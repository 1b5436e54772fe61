"""The rules of Connect-4 on bitboards.

A set of squares is an int. Each column has seven bits, the lowest square first; the seventh bit is
always 0, so that no line of four continues in the next column.
"""

from typing import NamedTuple

WIDTH, HEIGHT = 7, 6
BITS = HEIGHT + 1  # of a column
BOTTOMS = [1 << BITS * column for column in range(WIDTH)]
COLUMNS = [bottom * ((1 << HEIGHT) - 1) for bottom in BOTTOMS]
BOARD = sum(COLUMNS)
DIRECTIONS = (1, BITS - 1, BITS, BITS + 1)  # up, down and right, right, up and right


class Position(NamedTuple):
    """The stones of the player to move, and those of the other."""

    mine: int
    theirs: int

    def moves(self) -> list[int]:
        """Return the columns that are not full."""
        free = BOARD & ~(self.mine | self.theirs)
        return [column for column in range(WIDTH) if free & COLUMNS[column]]

    def play(self, column: int) -> "Position":
        """Return the position after a stone into `column`, seen by the other player."""
        # The sum carries into the lowest free square.
        stone = (self.mine | self.theirs) + BOTTOMS[column] & COLUMNS[column]
        return Position(self.theirs, self.mine | stone)

    def outcome(self) -> int | None:
        """Return -1 if the player to move has lost, 0 for a draw, None while the game goes on."""
        if has_four(self.theirs):
            return -1
        return 0 if self.mine | self.theirs == BOARD else None


START = Position(0, 0)


def has_four(stones: int) -> bool:
    """Return True if four stones are in a line."""
    for step in DIRECTIONS:
        pairs = stones & stones >> step
        if pairs & pairs >> 2 * step:
            return True
    return False
