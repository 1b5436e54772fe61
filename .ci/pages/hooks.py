"""A hook of mkdocs: the page of the changelog is CHANGELOG.md."""

from pathlib import Path
from typing import Any

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page; links in CHANGELOG.md start at the root of the repository."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return CHANGELOG.read_text().replace("](docs/", "](")
