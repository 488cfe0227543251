"""Putting the generated pages of the documentation where they belong.

A writer gives its pages as a mapping, from the path below `docs/` to the text: `findings.md`, `findings/deepspeed.md`.
The first is the index; the others lie in the folder of its name, which holds nothing else. So a page that is not
written any more, of a system that is gone, can be told from one that somebody wrote by hand, and goes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1]

Pages = Mapping[str, str]


def differing(pages: Pages, docs: Path = DOCS) -> list[str]:
    """The paths where what lies below `docs/` is not what a writer gives: changed, absent, or not given any more."""
    kept = {path.relative_to(docs).as_posix(): path.read_text("utf-8") for path in _kept(pages, docs)}
    return sorted(path for path in {*pages, *kept} if pages.get(path) != kept.get(path))


def write(pages: Pages, docs: Path = DOCS) -> None:
    """Put the pages in their places, and take away those that are not given any more."""
    for path in differing(pages, docs):
        place = docs / path
        if path in pages:
            place.parent.mkdir(exist_ok=True)
            place.write_text(pages[path], "utf-8")
        else:
            place.unlink()


def _kept(pages: Pages, docs: Path) -> list[Path]:
    folders = sorted({(docs / path).parent for path in pages} - {docs})
    written = [docs / path for path in pages if (docs / path).is_file()]
    return sorted({*written, *(page for folder in folders for page in folder.glob("*.md"))})
