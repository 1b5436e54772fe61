"""Hooks of mkdocs: a page is CHANGELOG.md; guides come before the API in a search."""

from pathlib import Path
from typing import Any

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page; links in CHANGELOG.md start at the root of the repository."""
    if page.file.src_uri.startswith("reference/"):
        page.meta["search"] = {"boost": 0.3}
    if page.file.src_uri != "changelog.md":
        return markdown
    return CHANGELOG.read_text().replace("](docs/", "](")
