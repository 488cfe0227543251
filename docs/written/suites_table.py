"""The table of upstream's suites in docs/emulation.md, from the committed lists: `python -m
docs.written.suites_table`."""

from __future__ import annotations

from shardproof.suites.declared import Upstream, upstreams
from shardproof.suites.verdicts import FAILED, PASSED, SKIPPED, CommittedVerdicts, distinct_passing


def render() -> str:
    """The table, in Markdown, and below it how many distinct tests pass and why others fail."""
    rows = ["| suite | tag | ranks | collected | passed | failed | skipped |", "|---|---|---|---|---|---|---|"]
    reasons: list[str] = []
    totals: list[str] = []
    for upstream in upstreams():
        distinct = 0
        for suite in upstream.suites:
            lists: list[CommittedVerdicts] = []
            for ranks in suite.ranks:
                file, name = upstream.verdicts_file(suite, ranks), f"{upstream.system}/{suite.name}"
                kept = CommittedVerdicts.read(file.read_text("utf-8"), f"{name} at {ranks} ranks")
                lists.append(kept)
                counts = [kept.count(outcome) for outcome in (PASSED, FAILED, SKIPPED)]
                numbers = " | ".join(map(str, (ranks, sum(counts), *counts)))
                rows.append(f"| `{name}` | {upstream.tag} | {numbers} |")
                found = kept.by_reason(FAILED).items()
                reasons += [f"- `{name}`, {ranks}: {number} × {why}" for why, number in found]
            distinct += distinct_passing(lists)
        totals.append(_total(upstream, distinct))
    counted_once = ["", "Tests that pass, each counted once for all numbers of ranks:", "", *totals]
    return "\n".join([*rows, *counted_once, "", "Failures, by reason:", "", *reasons, ""])


def _total(upstream: Upstream, distinct: int) -> str:
    reached = "reached" if distinct >= upstream.aim else f"missed by {upstream.aim - distinct}"
    return f"- `{upstream.system}`: {distinct}; the aim of {upstream.aim} is {reached}"


if __name__ == "__main__":
    print(render(), end="")
