"""The documentation has the rules of peers as they are."""

from tests.support.peer_table import PAGE, page


def test_the_page_has_the_table() -> None:
    """`python -m tests.support.peer_table` writes it."""
    assert PAGE.read_text() == page()
