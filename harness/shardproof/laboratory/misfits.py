"""Misfits: places where our reader or driver does not fit a library version that has not been tested before.

A nightly of a framework runs on last night's commit. There a checkpoint may have a form that our reader has never
seen, or a function an argument that our driver does not give. None of that is a defect of the library, and each of it
strikes hundreds of scenarios at once. So it is `unknown`, with a reason in one line that names the one thing that
changed and is the same for every scenario that meets it.

A *head* is a library that is no declared release: a working tree, a commit, or a release that `releases.toml` does not
have. That table says what was walked. On a release in it our reader is known to fit, and a file that is not there is
the library's failure; on a head it may be that the state now lies elsewhere.

*Verifies*: that a difference is believed on a head only where our reader knew what it read. Where something else
differs too, live or written, that stays a failure, and only what the reader did not know is taken out of it.
*Does not verify*: what a library refuses because our driver asks for it in an old way. If the library's own code
raises, it is a crash. `shardproof port` shows those, side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardproof.diff import Difference
from shardproof.observe.record import WRITTEN
from shardproof.observe.settings import UNKNOWN
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.readers.stored import TorchStored
from shardproof.versions import is_version, split_cures

_LABEL = re.compile(r"[+.](git|path)\.")


def on_head(info: System, version: str) -> bool:
    """Whether a library that ran is no declared release.

    Args:
        version: as a result names it: `0.16.1+cured`, `0.19.0+git.5be9626`.
    """
    release, _ = split_cures(version)
    if not info.under_test:
        return False
    if is_tree(release):
        return True
    public = release.partition("+")[0]
    return is_version(public) and not package_of(info).declares(public)


def is_tree(version: str) -> bool:
    """Whether a version, as a result names it, is a working tree or a commit and no release."""
    return bool(_LABEL.search(version))


def reads_as_torch(info: System) -> bool:
    """Whether a system is a plugin's that has no reader of its own: what torch's reader does not know in its
    checkpoints, nobody here has ever seen."""
    return not info.home.startswith("shardproof.") and type(info.stored) is TorchStored


def without_reader_misfits(
    unfamiliar: Sequence[str], differences: Iterable[Difference]
) -> tuple[str, tuple[Difference, ...]]:
    """What our reader did not know, as one line, and the differences without it; an empty line where it knew
    everything.

    Args:
        unfamiliar: what readers said of checkpoints whose form they do not know.
    """
    differences = tuple(differences)
    kept = tuple(d for d in differences if not _unread(d, unfamiliar))
    if unfamiliar:
        return f"our reader does not know this form of checkpoint: {_without_folder(unfamiliar[0])}", kept
    unknown = sorted({_without_numbers(d.key.fqn) for d in differences if d not in kept})
    return (f"the checkpoint holds `{unknown[0]}`, which our reader does not know" if unknown else ""), kept


def _unread(difference: Difference, unfamiliar: Sequence[str]) -> bool:
    if difference.kind == "unreadable":
        return difference.detail in unfamiliar
    return difference.kind == "extra" and difference.key.where == WRITTEN and difference.key.role == UNKNOWN


def _without_folder(text: str) -> str:
    """A reader's first line without the folder of the scenario that ran, which differs from one to the next."""
    return re.sub(r"/\S*?/(?=checkpoint\d)", "", text.split("\n", 1)[0])


def _without_numbers(key: str) -> str:
    return re.sub(r"\d+", "N", key)
