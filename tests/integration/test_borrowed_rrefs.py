"""RRefs of objects of a third worker: what sender and receiver hold, and who may die."""

from pathlib import Path

import pytest

from tests.support.scripts import program, run

PROGRAM = """
    from tests.support import borrowers

    if __name__ == "__main__":
        asyncio.run(getattr(borrowers, sys.argv[1])(*sys.argv[2:]))
        print("done")
"""


def play(tmp_path: Path, *scene: str) -> None:
    """Play a scene of `borrowers`, in a first world: there, torch counts references."""
    done = run(program(tmp_path, PROGRAM), *scene)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


@pytest.mark.promise("worlds.rrefs")
def test_an_object_lives_as_long_as_what_was_borrowed(tmp_path: Path) -> None:
    play(tmp_path, "lives_as_long_as_what_was_borrowed")


@pytest.mark.slow
def test_what_is_not_sent_is_not_kept(tmp_path: Path) -> None:
    play(tmp_path, "is_not_sent")


@pytest.mark.slow
def test_an_rref_that_goes_from_hand_to_hand(tmp_path: Path) -> None:
    play(tmp_path, "goes_from_hand_to_hand")


@pytest.mark.slow
@pytest.mark.promise("lost.borrowed")
def test_the_lender_dies(tmp_path: Path) -> None:
    """The object lives: its owner keeps what the lender had."""
    play(tmp_path, "outlives_the_lender")


@pytest.mark.slow
@pytest.mark.promise("lost.borrowed")
@pytest.mark.parametrize("name", ["owner", "lender"])
def test_the_death_of_one_aborts_no_other(tmp_path: Path, name: str) -> None:
    """Each while an RRef travels. With a fork of torch's, the receiver is aborted 10 s later."""
    play(tmp_path, "dies", name)
