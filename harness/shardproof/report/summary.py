"""The job summary in Markdown that GitHub shows under a workflow run: verdict table and causes, at most 1 MiB."""

from __future__ import annotations

import re

from shardproof.report.heads_text import describe_heads
from shardproof.report.model import Cluster, Report
from shardproof.verdict import SEVERITY, Verdict
from shardproof.wording.lines import headline

LIMIT_BYTES = 1_000_000


def render_summary(report: Report) -> str:
    """The run as Markdown; clusters that do not fit are counted in the last line."""
    head = [f"### shardproof run {report.run.id}", "", *_table(report), "", f"{report.in_words}.", *_by_cause(report)]
    text = "\n".join([*head, "", *_heads(report)])
    clusters = report.clusters()
    for shown, cluster in enumerate(clusters):
        block = _cluster(cluster, report)
        if len((text + block).encode()) > LIMIT_BYTES - 200:
            return text + f"\n… and {len(clusters) - shown} more causes, see the report.\n"
        text += block
    if report.missing:
        text += f"\n**{len(report.missing)} planned scenarios have no verdict.**\n"
    return text


def _table(report: Report) -> list[str]:
    shown = [v for v in SEVERITY if report.counts[v] or v is Verdict.PASS]
    head = ["system", "version", *(v.value for v in shown), "total"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in report.table():
        cells = [row.system, row.version, *(str(row.counts.get(v, 0)) for v in shown), str(row.total)]
        lines.append(f"| {' | '.join(map(escaped, cells))} |")
    return lines


def _by_cause(report: Report) -> list[str]:
    return [f"By cause: {report.by_cause}."] if report.by_cause else []


def _heads(report: Report) -> list[str]:
    """What is said of each head, as a list below its name."""
    blocks = []
    for told in describe_heads(report):
        blocks += [f"**{escaped(told.name)}** is {told.kind}:", "", *(f"* {escaped(line)}" for line in told.lines), ""]
    return blocks


def _cluster(cluster: Cluster, report: Report) -> str:
    simplest = cluster.simplest
    known = f" on {escaped(cluster.releases)}" if cluster.releases else ""
    known += f", {escaped(simplest.standing)}" if simplest.standing else ""
    known += ", emulated only" if report.emulated_only(simplest) else ""
    changes = "".join(f", {n} {change.shown}" for change, n in report.changes_of(cluster).items() if n)
    replay = f"{simplest.replay}{report.place}{report.again}"
    return (
        f"\n**{escaped(cluster.signature)}** ({len(cluster.members)} scenarios{known}{changes})  \n"
        f"{escaped(headline(simplest))}  \n`{replay}`: {escaped(str(simplest.scenario))}\n"
    )


def escaped(text: str) -> str:
    """Text from outside as inert Markdown on one line."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_{}\[\]#|~@])", r"\\\1", flat)
