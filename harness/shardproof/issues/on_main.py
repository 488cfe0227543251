"""What an entry of `issues.toml` says of upstream's main branch: whether the lines that it blames stand there, as
somebody has read them at one commit.

    on_main = { commit = "d98e8a64dd", date = "2026-08-22", version = "0.20.0", place = "a/b.py:12", stands = true }

* commit: of the main branch, at least seven digits. date: its day. version: what the tree calls itself there.
* place: where the lines stand in it or, where they do not, where they would: a path below the root of the repository.
* stands: whether they stand there word for word.
* says: what a reader must know beside that. It is needed where they do not stand: whether they read otherwise and are
  wrong all the same, whether the commit is older than they are, or whether the defect is repaired.

A run on a commit of the main branch says more, and stands in `releases`. Both are worth having: a run says that the
defect is there, and the place where.

*Verifies*: that the answers are there, and have the right form.
*Does not verify*: that they are true. A reader upstream can, since commit and place are named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date

from packaging.version import InvalidVersion, Version

from shardproof.tables import Table

BRANCHES = ("main", "master")
"""How a line of an entry's `releases` begins the name of a commit of upstream's branch."""

_KEYS = ("commit", "date", "version", "place", "stands")
_FORM = (
    'on_main = { commit = "d98e8a64dd", date = "2026-08-22", version = "0.20.0", place = "a/b.py:12", stands = true }'
)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_PLACE = re.compile(r"[\w./-]+\.\w+:\d+")


@dataclass(frozen=True)
class OnMain:
    """What was read of one commit; see the module's text."""

    commit: str
    date: str
    version: str
    place: str
    stands: bool
    says: str = ""

    def sentence(self, seen: str = "", *, run: bool = False) -> str:
        """What an issue says of it, in whole sentences.

        Args:
            seen: the release on which the failure was seen. A commit that is older than that says so. run: whether a
                run on the main branch is told as well.
        """
        how = "stand unchanged" if self.stands else "read otherwise"
        at = f"`{self.place}` at commit `{self.commit}` of {self.date}, which calls itself {self.version}"
        first = f"On the main branch the lines {how}: {at}{'' if run else ' (read, not run)'}."
        older = f"That commit is older than {seen}." if seen and Version(self.version) < Version(seen) else ""
        return " ".join(filter(None, (first, self.says, older)))


def on_main_of(entry: Table) -> OnMain | None:
    """What an entry says of the main branch; None where it says nothing.

    Raises:
        UsageError: an answer is missing, or has another form.
    """
    if "on_main" not in entry:
        return None
    table = entry.table("on_main").only((*_KEYS, "says"), needed=_KEYS)
    found = OnMain(
        table.text("commit"), table.text("date"), table.text("version"), table.text("place"),
        table.flag("stands", absent=False), " ".join(table.text("says").split()),
    )  # fmt: skip
    if not _COMMIT.fullmatch(found.commit):
        raise table.wrong("commit", found.commit, "seven hexadecimal digits or more", _FORM)
    if not _is_day(found.date):
        raise table.wrong("date", found.date, "a day, ISO 8601", _FORM)
    if not _is_release(found.version):
        raise table.wrong("version", found.version, "what the tree calls itself", _FORM)
    if not _PLACE.fullmatch(found.place):
        raise table.wrong("place", found.place, "a file and a line", _FORM)
    if (found.says or not found.stands) and not found.says.endswith("."):
        raise table.wrong("says", found.says, "whole sentences, at least where the lines do not stand", 'says = "…."')
    return found


def _is_day(text: str) -> bool:
    try:
        return str(date.fromisoformat(text)) == text
    except ValueError:
        return False


def _is_release(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False
