"""The how-to guides, followed as a reader would: files, commands, output."""

from pathlib import Path

import pytest

from tests.support import guides

GUIDES = [
    guides.read(path)
    for path in (guides.DOCS / "migrate.md", *sorted((guides.DOCS / "guides").glob("*.md")))
]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("page", [each for each in GUIDES if each.steps], ids=str)
def test_the_guide_prints_what_it_shows(page: guides.Page, tmp_path: Path) -> None:
    """Processes write their lines in any order."""
    if any(command.startswith("CELLS") for command, _ in page.steps):
        pytest.importorskip("cloudpickle")
    for name, text in page.files.items():
        (tmp_path / name).write_text(text)
    for command, shown in page.steps:
        done = guides.run(command, tmp_path)
        assert done.returncode == 0, done.stderr
        assert guides.has_printed(done.stdout, shown.splitlines()), (command, done.stdout)
