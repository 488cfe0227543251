"""Write docs/glossary.md: every word that is ours, with the sentence that defines it on the page that owns it.

    python docs/site/glossary.py > docs/glossary.md

A word is defined once, where a reader meets it, in italics. `docs/site/words.toml` says on which page that is; the
sentence is taken from there, so that the glossary cannot say anything else. A word whose sentence leans on its
surroundings has a `means` there, which is then its definition.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1]

_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,4} (.*)$", re.MULTILINE)
_END = re.compile(r"(?<=[.:?])\**\s+(?=[A-Z*`(])|\n\n|\n(?=\d+\. |\* |\||#)")

HEAD = """<!-- Written by `python docs/site/glossary.py` from the pages and docs/site/words.toml: change those. -->
# Glossary

What do the words mean that are shardproof's own? Each is defined on one page, where the work that it names is
described; here stands the sentence, with a link to it. Words of the field (mesh, shard, bucket, master parameter, ZeRO)
are used as torch and Megatron-LM use them.
"""


class MissingWordError(Exception):
    """A page does not define a word that it is said to own."""


@dataclass(frozen=True)
class Entry:
    """word: as it is listed. page: without `.md`. heading: the section that defines it. sentence: Markdown."""

    word: str
    page: str
    heading: str
    sentence: str

    @property
    def line(self) -> str:
        return f"* **{self.word}**: {self.sentence} ([{self.heading}]({self.page}.md{self._anchor}))\n"

    @property
    def _anchor(self) -> str:
        """As a forge and MyST name a heading."""
        return "#" + re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")


def entries() -> Iterator[Entry]:
    """Every word, in the order of the alphabet."""
    words = tomllib.loads((DOCS / "site/words.toml").read_text("utf-8"))["word"]
    for word, given in sorted(words.items(), key=lambda item: item[0].lower()):
        yield entry_of(word, given["page"], given.get("as", word), given.get("means", ""))


def entry_of(word: str, page: str, written: str, means: str) -> Entry:
    """The entry of a word.

    Args:
        written: how the page has it between its asterisks.
        means: the definition, where the page's sentence does not stand alone.

    Raises:
        MissingWordError: the page has no such word in italics.
    """
    text = _FENCE.sub("", (DOCS / f"{page}.md").read_text("utf-8"))
    found = re.search(rf"(?<!\*)\*{re.escape(written)}s?\*(?!\*)", text, re.IGNORECASE)
    if found is None:
        raise MissingWordError(f"docs/{page}.md: *{written}* is not defined there; words.toml names it")
    heading = [match[1] for match in _HEADING.finditer(text, 0, found.start())][-1]
    return Entry(word, page, heading.replace("*", ""), means or _sentence(text, found.start()))


def _sentence(text: str, at: int) -> str:
    """The sentence around a place of a text, on one line; of a table's row what stands beside the word."""
    line = text[text.rfind("\n", 0, at) + 1 : text.find("\n", at)]
    if line.startswith("|"):
        told = line.split(" | ", 1)[1].removesuffix("|").strip()
        return told[0].upper() + told[1:] + "." * (not told.endswith("."))
    ends = [match.span() for match in _END.finditer(text)]
    begin = max((stop for _, stop in ends if stop <= at), default=0)
    end = min((start for start, _ in ends if start > at), default=len(text))
    while text[end - 1] == ":" and (more := [start for start, _ in ends if start > end]):
        end = more[0]
    return " ".join(re.sub(r"^\s*(?:\* |\d+\. )", "", text[begin:end]).split())


def page() -> str:
    """The text of docs/glossary.md."""
    return HEAD + "\n" + "".join(entry.line for entry in entries())


if __name__ == "__main__":
    print(page(), end="")
