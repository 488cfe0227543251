"""Writes the resilience scorecard as an HTML page and as files in a folder."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from shardproof.report.html import render as render_html
from shardproof.report.publish import publish
from shardproof.resilience.planned_trials import family_of
from shardproof.resilience.scorecard import Document, render, replay_of, total, wrong_of
from shardproof.resilience.trial import OUTCOMES

PAGE, TEXT, DATA = "resilience.html", "resilience.txt", "resilience.toml"


def write_files(document: Document, folder: Path) -> Path:
    """Write scorecard, data and page below a folder; the path of the page.

    Raises:
        UsageError: a file there is not ours. StoreFull: the disk is full.
    """
    publish(folder / TEXT, f"# Written by shardproof resilience\n\n{render(document)}")
    publish(folder / DATA, f"# Written by shardproof resilience\n\n{tomli_w.dumps(document)}")
    return publish(folder / PAGE, page_of(document))


def page_of(document: Document) -> str:
    """The page as text."""
    trials = sum(stack["trials"] for stack in document["stack"])
    wrong = sum(total(stack, wrong_of(stack)) for stack in document["stack"])
    of_commands = all("outcomes" in stack for stack in document["stack"])
    sentence = f"{wrong} of {trials} crashes, faults and damages of checkpoints went unnoticed" if wrong else (
        f"None of {trials} crashes, faults and damages of checkpoints went unnoticed"
    )  # fmt: skip
    if of_commands:
        broken = trials - sum(total(stack, ("resumed",)) for stack in document["stack"])
        sentence = f"After {broken or 'none'} of {trials} kills the run did not come to the end that it should have"
    return render_html(
        "resilience.html",
        document=document,
        sentence=sentence,
        of_commands=of_commands,
        outcomes=OUTCOMES,
        wrong_of=wrong_of,
        family_of=family_of,
        total=total,
        replay_of=replay_of,
    )
