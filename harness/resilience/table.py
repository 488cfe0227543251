"""`docs/resilience.md`: what crashes and damage made of each stack, written from docs/resilience.toml and the findings.

    python -m harness.resilience.table > docs/resilience.md

docs/resilience.toml holds the `[[stack]]` tables that `shardproof resilience --out DIR` wrote as DIR/resilience.toml.
docs/resilience-findings.toml is written by hand: `[[finding]]` with `title`, `text`, `script` and `public`, `[[known]]`
with `text` and `public`, and `[[large]]` for runs that are too large for a page. A test compares the committed page
with what this module writes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.resilience.scorecard import WRONG, Document, total
from harness.resilience.states import KINDS as CRASHES
from harness.resilience.trial import OUTCOMES

DATA, FINDINGS = Path("docs/resilience.toml"), Path("docs/resilience-findings.toml")

HEAD = """\
<!-- Written by `python -m harness.resilience.table` from docs/resilience.toml and -findings.toml: change those. -->
# Resilience of checkpoints

What is left of a checkpoint when the machine dies while it is saved, or when its files are damaged afterwards? One
command tries it, on any stack that saves and loads (`shardproof list` shows them):

```console
$ shardproof resilience torch-save
$ shardproof resilience dcp-files reference --trials 1000 --out reports/resilience
$ shardproof resilience dcp-files --trial killed@4
```

It needs strace (`apt-get install strace`) and no root. A stack saves an old state; then it saves a new one while strace
records every write, rename and sync. From the record follows every folder that a crash may leave, within bounds; the
finished folder is also damaged in many ways. Each of these folders is loaded in a process of its own, with a deadline
and bounded memory, and what the library gives is compared bit by bit with the states that were saved.

## Outcomes

| outcome | means |
|---|---|
| old, new | exactly a state before the save, or exactly the one that was being saved |
| other | exactly the state of another run, whose files replaced all that was there |
| error | the library raised; after a crash this means that the old state is lost, too |
| **silent** | the load succeeded with something that was never saved: a mixture, or damaged values |
| hang, crash | the load did not end before the deadline, or its process died |

## Crashes and their bounds

A crash comes between two events of the record. What a sync had put on disk is there; of the rest anything may be, as
fsync(2) promises no more: a name without its bytes, bytes without their name, a later write without an earlier one.

* `killed`: the process dies, the machine lives. Every prefix of the record.
* `torn`: as before, and of the write that was going on its first block of 4096 bytes, half, or all but its last block.
* `lost`: the power fails. Of what was not synced nothing is left, or all but the bytes of one file, of all files, or
  one folder's names; or the bytes are zeros.
* `reordered`: the power fails. Of what was not synced all but one or two changes are left, or one or two alone, with
  what they need; one write may be there in part. Pairs are taken right before each sync and at the end, of the latest
  45 changes. CrashMonkey (OSDI 2018) bounds its states in the same way, by barriers and by how many requests change
  places.

These are the weakest rules, not those of one file system: ext4 in its usual mode is luckier. `killed` and `torn` need
no power cut. Damage goes round its kinds: bits flipped in the first 512 bytes of a file (`flip-head`), the last 512
(`flip-tail`) or between (`flip-payload`); files truncated, extended, zeroed in part, swapped, duplicated, missing, or
taken from the step before or from another run.

Not tried yet: several ranks, errors of the disk during a save (ENOSPC, EIO), processes killed during a load.
"""


def render(document: Document, findings: Mapping[str, Any]) -> str:
    """The page."""
    lines = [HEAD, "## Stacks", "", *_summary(document), ""]
    for stack in document["stack"]:
        lines += [*_section(stack), ""]
    lines += ["## Larger runs", "", *(f"* {one['text']}" for one in findings.get("large", ())), ""]
    lines += ["## Findings", "", *_findings(findings)]
    return "\n".join(lines) + "\n"


def _summary(document: Document) -> Iterator[str]:
    yield "Crash: of the crash states that were tried, how many gave a whole state, an error, or were silent."
    yield ""
    yield "| stack | events, syncs | crash: whole | error | silent | damage: whole | error | silent | hang or crash |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for stack in document["stack"]:
        cells = [
            str(total(stack, outcomes, crash))
            for crash in (True, False)
            for outcomes in (("old", "new", "other"), ("error",), ("silent",))
        ]
        cells.append(str(total(stack, ("hang", "crash"))))
        yield f"| [{stack['name']}](#{stack['name']}) | {stack['events']}, {stack['syncs']} | {' | '.join(cells)} |"


def _section(stack: Document) -> Iterator[str]:
    yield f"### {stack['name']}"
    yield ""
    yield f"{stack['doc']}. {stack['crash_states']} crash states, {stack['trials']} trials."
    yield f"A cell has the count and one trial, which `shardproof resilience {stack['name']} --trial ID` makes again."
    yield ""
    shown = [outcome for outcome in OUTCOMES if total(stack, (outcome,))]
    yield f"| kind | {' | '.join(f'**{o}**' if o in WRONG else o for o in shown)} |"
    yield "|---|" + "---|" * len(shown)
    for kind, cells in stack["kind"].items():
        texts = [f"{cells[o]['count']} `{cells[o]['trial']}`" if o in cells else "–" for o in shown]
        yield f"| {kind}{'' if kind in CRASHES else ' (damage)'} | {' | '.join(texts)} |"


def _findings(findings: Mapping[str, Any]) -> Iterator[str]:
    for one in findings.get("finding", ()):
        yield from (f"### {one['title']}", "", one["text"].strip(), "")
        yield f"Script: [`{one['script']}`](resilience-scripts/{one['script']}). {one['public']}"
        yield ""
    yield "### Known to the public"
    yield ""
    yield from (f"* {one['text']} {one['public']}" for one in findings.get("known", ()))


if __name__ == "__main__":
    loaded = [tomllib.loads(path.read_text("utf-8")) for path in (DATA, FINDINGS)]
    sys.stdout.write(render(*loaded))
