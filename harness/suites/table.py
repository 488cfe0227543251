"""The table of upstream's suites in docs/emulation.md, from the committed lists: `python -m harness.suites.table`."""

from __future__ import annotations

from harness.suites.declared import upstreams
from harness.suites.verdicts import FAILED, PASSED, SKIPPED, Kept


def render() -> str:
    """The table, in Markdown, and below it why tests fail."""
    rows = ["| suite | tag | ranks | collected | passed | failed | skipped |", "|---|---|---|---|---|---|---|"]
    reasons: list[str] = []
    for upstream in upstreams():
        for suite in upstream.suites:
            for ranks in suite.ranks:
                file, name = upstream.kept(suite, ranks), f"{upstream.system}/{suite.name}"
                kept = Kept.read(file.read_text("utf-8"), f"{name} at {ranks} ranks")
                counts = [kept.count(outcome) for outcome in (PASSED, FAILED, SKIPPED)]
                numbers = " | ".join(map(str, (ranks, sum(counts), *counts)))
                rows.append(f"| `{name}` | {upstream.tag} | {numbers} |")
                found = kept.by_reason(FAILED).items()
                reasons += [f"- `{name}`, {ranks}: {number} × {why}" for why, number in found]
    return "\n".join([*rows, "", "Failures, by reason:", "", *reasons, ""])


if __name__ == "__main__":
    print(render(), end="")
