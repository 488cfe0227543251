"""What `shardproof trainer --command` found, as a page: each arm, and what differs in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardproof.compare.text import WORDS
from shardproof.report.html import render
from shardproof.trainer.command.checkpoints import Compared
from shardproof.trainer.command.text import diff_of, shown

MOST = 100
"""How many differences of an arm the page shows."""


def page_of(document: Mapping[str, Any], differing: Mapping[str, Compared]) -> str:
    """The page as text.

    Args:
        document: as results.json has it. differing: arm → what differs in the two checkpoints that it compared.
    """
    failed = [arm["name"] for arm in document["arms"] if arm["verdict"] not in ("pass", "unsupported", "unknown")]
    passed = sum(arm["verdict"] == "pass" for arm in document["arms"])
    headline = f"{passed} of {len(document['arms'])} arms pass" + (
        f", and {', '.join(failed)} failed" if failed else ""
    )
    return render(
        "command.html",
        document=document,
        headline=headline,
        differing=differing,
        diff_of=diff_of,
        shown=shown,
        words=WORDS,
        most=MOST,
    )
