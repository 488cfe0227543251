"""`docs/resilience.md` and the pages below `docs/resilience/`: what crashes and damage made of each stack.

    python -m docs.written.resilience_table

The index says what is tried, what the outcomes mean, how each stack did in one row, and what was found. Each system
has a page with the full table of every stack of its own; stacks of no system, such as a bare `torch.save`, share one.
Faults beside the disk (a flipped bit, a lost message, a killed rank) are compared across systems on another page.

The rows stand in the data of the system that they are of (`docs.written.resilience_rows`).
docs/resilience-findings.toml is written by hand: `[[finding]]` with `title`, `text`, `script` and `public`, `[[known]]`
with `text` and `public`, `[[in_flight]]` with what was held where, and `[[large]]` for runs that are too large for a
page. A test compares the committed pages with what this module writes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.resilience.planned_trials import family_of
from shardproof.resilience.scorecard import WRONG, Document, total
from shardproof.resilience.trial import OUTCOMES

from docs.written.pages import write
from docs.written.resilience_rows import home_of_stacks, stack_rows, struck_rows

FINDINGS = Path("docs/resilience-findings.toml")

HEAD = """\
<!-- Written by `python -m docs.written.resilience_table` from docs/resilience-findings.toml and the systems' data. -->
# Resilience of checkpoints

What is left of a checkpoint when the machine dies while it is saved, when the disk fails under it, or when its files
are damaged afterwards? One command tries it, on any stack that saves and loads (`shardproof list` shows them):

```console
$ shardproof resilience torch-save
$ shardproof resilience dcp-files reference --trials 1000 --out reports/resilience
$ shardproof resilience dcp-files --trial killed@4
```

It needs strace (`apt-get install strace`) and no root. A stack saves an old state; then it saves a new one while strace
records every write, rename and sync. From the record follows every folder that a crash may leave, within bounds; the
finished folder is also damaged in many ways. Each of these folders is loaded in a process of its own, with a deadline
and bounded memory, and what the library gives is compared bit by bit with the states that were saved. Saves and loads
are also *struck*: one of their system calls goes wrong while they run.

The table of [stacks](#stacks) below has one row a stack; its name leads to the page with all that was tried on it. What
goes wrong beside the disk, in memory, in a message or in another rank, has a page too:
[Memory, messages and ranks](resilience/beside-the-disk.md).

`--jobs` says how many trials are made side by side; what they come to does not depend on it. With `--out`, a run that
was interrupted or killed goes on where it was when the same command is given again.

## A training script as it is

A run is killed while it writes a checkpoint, and the scheduler starts the same command again. Does it go on?
`--command` tries it with your own script, unmodified. Its places are those of
[`shardproof trainer`](trainer.md#no-line-at-all):

```console
$ shardproof resilience --command 'python train.py --out {folder} --max-steps {until}'
```

A run stops early, at the first number of `--steps`. The same command resumes there until the second number, under
strace. Each folder that a kill may leave on the way is made from the record: between two files, inside of a write, and
without what no sync had put on disk. The command is then run in that folder, and its last checkpoint compared with that
of the run that nothing killed:

| outcome | means |
|---|---|
| resumed | the last checkpoint is the one that it should be |
| **anew** | it is that of a run from the beginning: all steps before the kill are lost, and the exit status is 0 |
| **error** | the command fails: somebody has to repair the folder by hand before the run can go on |
| **silent** | the command ends well, with another checkpoint |
| **hang**, **crash** | it does not end before its deadline, or a signal ends it |
| unsteady | two tries in the same folder did not come to the same |

A script that keeps its last checkpoints alone removes an old one in a later save than the first after the resume. Give
it more steps, as in `--steps 2,6`: where nothing was removed in the record, the result says so.

An outcome in bold makes the exit status of `shardproof resilience` 1. A symbolic link, such as `LATEST -> step_2`, is
kept as a link in every folder, and nothing is read or written through one that leads out of the folder.

A trial is a whole run of the command, so that `--trials` has 40 of them unless you give another number. Folders between
two files come first; of `killed`, `torn` and `lost` ([below](#crashes-and-their-bounds)) the seed draws as many as are
left. `--trial killed@7` makes one of them again, and says where the folder lies that the command found. Ranks write in
the order of the record, and no other order is tried.

## Outcomes

| outcome | means |
|---|---|
| old, new | exactly a state before the save, or exactly the one that was being saved |
| other | exactly the state of another run, whose files replaced all that was there |
| error | the library raised; after a crash this means that the old state is lost, too |
| **silent** | the load succeeded with something that was never saved: a mixture, or damaged values |
| **lied** | the save was struck, raised nothing, and the folder does not give the new state; or a sync failed unsaid |
| hang, crash | the load, or the struck save, did not end before the deadline, or its process died |
| missed | the call that should have failed did not come in time, or more than one failed; the trial says nothing |

Of a save that was struck and raised, the outcome is what the folder gives afterwards: after an error, is the old state
still there?

## Crashes and their bounds

A crash comes between two events of the record. What a sync had put on disk is there; of the rest anything may be, as
fsync(2) promises no more: a name without its bytes, bytes without their name, a later write without an earlier one.

* `killed`: the process dies, the machine lives. Every prefix of the record.
* `apart`: of several ranks, all die at once, each of them elsewhere in the same stage of the save. Bounded: one rank is
  anywhere, and each other one has done all of the stage or nothing of it.
* `torn`: as `killed`, and of the write that was going on its first block of 4096 bytes, half, or all but its last
  block.
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

## Strikes

* `ENOSPC`, `EIO`, `EACCES`: one call of the save is not made and gives this error. Each recorded call gets, once, each
  error that it can give: a write no EACCES, a sync EIO and ENOSPC.
* `short`: a file cannot grow beyond the middle of a write (RLIMIT_FSIZE), so that the kernel takes the first half and
  refuses what comes after. Only where no earlier file of the save is larger.
* `slow`: one call takes 0.2 s longer.
* `killed-rank`, `stopped-rank`: of several ranks, one is killed right before a call (SIGKILL), or stopped right after
  it (SIGSTOP). The others go on as far as they can; those that still wait after 20 s are killed, and what is left is
  loaded.
* `load-EIO`, `load-EACCES`, `load-slow`: the same for the calls of a load that open, read or look. What a library maps
  into memory is read without a call, and cannot be struck. A file that several ranks read is bad for all of them.
* `load-killed-rank`, `load-stopped-rank`, `load-EIO-rank`: one rank alone is killed, stopped or given EIO at a call of
  its load. The outcome is what the folder gives when it is loaded once more, as after a restart, unless the struck load
  itself gave something else than the new state.

Each is made by strace (`-e inject`) or the kernel, with no library of ours below the stack, and strace's record must
show that exactly one call was struck.

The events of several ranks are put in an order that does not depend on chance: by stage of the save, between two
collectives, and by rank within a stage; those of threads and processes that write side by side one after the other.
The calls of a load go rank by rank. So a number means the same event in every run, and `--trial` shows the events of
the save with their ranks. Stacks that end in `-at-N` load with another number of ranks than saved.

Not tried: errors that come back later and elsewhere (a close on NFS), short writes that go on afterwards, short reads,
SIGBUS in a mapped file.
"""

OF_SYSTEMS = """\
The stack of a system is one rank of it: a small model after three steps, with its masters and moments, saved and
loaded as the system's scenarios do it. Each step has a folder, and a file beside them names the newest. The library
writes that file itself, or the training script around it does, after the save.

`+cured` behind a stack's name: the same on the system's library with cures ([Cures](cures.md)), those of the system and
those of what stacks have shown (`scenarios/<system>/resilience/cures/`). A row stands in the data of its system."""


STACKS_PAGE = """\
<!-- Written by `python -m docs.written.resilience_table` from {source}: change that by measuring again. -->
# Resilience of {title}

What is left of these checkpoints after a crash, a failing disk or damaged files? Each section is one stack, which is a
way to save and to load. How it is tried, and what each kind and each outcome means, is told in
[Resilience of checkpoints](../resilience.md).
"""

STRUCK_RANKS = """\
<!-- Written by `python -m docs.written.resilience_table` from the systems' data. -->
# Memory, messages and ranks

What is there to notice when something fails beside the disk? One command plants each of these faults in a small
scenario of a system on real ranks (two steps, a save and a load on two ranks, unless the system's `conformance.toml`
names another one for the fault), and compares every value with the reference:

```console
$ shardproof faults --strike SYSTEM
$ shardproof faults --strike SYSTEM --every
$ shardproof faults --strike SYSTEM --fault boundary.collective-drop@3
```

The faults are of three families:

* *Memory*: one bit of what rank 0 keeps flips after its first step. [Below](#memory-at-each-moment) it flips at other
  moments too.
* *Ranks*: `kill-rank`, `stuck-rank` (SIGSTOP) and `error-rank` kill, stop or raise in rank 0's first step, or with `@N`
  before each operation, one rank after the other. `kill-at-file`, `stuck-at-file` and `error-at-file` do so where a
  rank opens, renames, lists or removes a file of its saves and loads, or torch writes or reads the bytes of a tensor in
  one; 1 is rank 0's first such point, 2 rank 1's first.
* *Collectives*: one that rank 0 makes in its first step is struck below the library: the first, or with `@N` behind the
  fault's id the N-th. It is half a second late, raises, or gives this rank something that was not sent. `drop` is never
  made on rank 0, which goes on with its buffer as it was while the others wait; `lost` is made on no rank. `reorder`
  lets two that are under way at once end in the other order, on every rank alike.

With `--every` each fault that has a number strikes every such event, one after the other. Sends, receives and barriers
are not struck, nor what C++ code calls.

A cell says what came of it:

* *error*: an error ended the run, so that whoever trains hears of it. It says whose it was: *the library* raised, a
  *rank was lost*, or what arrived is *the fault's own* error, which nobody swallowed. A cell that names
  nobody was recorded before that was told.
* *mismatch*: nothing raised, and values are wrong. The cell says where that is seen first; *saved* says that the
  checkpoint which is saved next holds it, so that a restart brings it back.
* *pass*: as it must be, nothing differs.
* *no effect*: the fault found nothing to strike: every fault leaves a note when it does. It says whether what it
  strikes did not come, or came with nothing in it: a sum of one element has no two parts to change places. *unseen*:
  it struck, and nothing differs that must.
* *hang*: no end before the deadline of 20 s. Nobody is told: torch's own timeout comes after half an hour."""

MOMENTS = """\
## Memory, at each moment

When is a flipped bit seen, by which comparison, and does a checkpoint carry it on? `memory-param@N`, `memory-moment@N`
and `memory-step@N` flip a bit before or after each operation of the program, one after the other; `memory-gradient@N`
when the optimizer is about to read its gradients for the N-th time. A cell says at which operation what was seen first;
*saved*, that a checkpoint which was written later holds it. `unseen` is a bit that was written over before anybody
looked: by a build, by a load, or by a step that writes parameters anew from masters. A dash: nothing of that kind was
kept then. A system's optimizer may keep masters, and then those are its parameters. One of the optimizer's steps may be
that of a load, which makes state to load into.
"""


IN_FLIGHT = """\
## Training that goes on while a save is in flight

An asynchronous save returns before its files are complete. Does it have its own copy of everything by then, or does
it still read the tensors that the next step changes? Which one it is shows only if the save is slow at the right
moment, so that moment is forced. `async-late@K` counts what the save reads after it has returned (torch's operations
on tensors, and the bytes that go into files, in every thread and forked process that it has started), holds it at the
K-th read until the next step is over, and compares what was written with what there was when the save was called.
Reads have the same numbers on all ranks: at a collective of the save, all take over the highest count. A save that
waits in a collective for one that is held is held as well. With `--every`, K goes from 1 until nothing is written
after the K-th read any more, so that each point between two reads of each rank is forced once. A tensor of the next
step is a mismatch, which names the step of each tensor.

`async-live@K` is the same over a copy that was never made: torch's stager hands on the live tensors. What would be
a forked process, with the memory of when it was forked, is a thread, and a system whose library copies to the CPU by
itself says how that is left out (`without_copies`). It must be a mismatch, as long as a tensor is left to be written;
this is how we know that the first one could see anything.

Not verified: a tensor that is read while the step writes it, half old and half new; two steps during one save; a
process that is spawned and not forked; reads by C++ code that no operation of torch comes before; copies on streams
of a real GPU.
"""


def _struck(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = [one for one in found if "@" not in one["id"]]
    systems = list(dict.fromkeys(one["system"] for one in found))
    at = {(one["id"], one["system"]): one for one in found}
    releases = {one["system"]: one["version"] for one in found}
    yield f"| fault | {' | '.join(f'{system} {releases[system]}' for system in systems)} |"
    yield "|---|" + "---|" * len(systems)
    for fault in dict.fromkeys(one["id"] for one in found):
        cells = [_struck_cell(at.get((fault, system))) for system in systems]
        yield f"| `{fault.removeprefix('boundary.')}` | {' | '.join(cells)} |"


def _moments(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table for each kind of what a rank keeps: what came of a bit that flipped at each moment."""
    told = [one for one in found if one.get("moment")]
    systems = list(dict.fromkeys(one["system"] for one in told))
    for kind in dict.fromkeys(one["id"].partition("@")[0] for one in told):
        at = {(one["moment"], one["system"]): one for one in told if one["id"].partition("@")[0] == kind}
        yield f"`{kind.removeprefix('boundary.')}`:"
        yield ""
        yield f"| moment | {' | '.join(systems)} |"
        yield "|---|" + "---|" * len(systems)
        for moment in sorted(dict.fromkeys(moment for moment, _ in at), key=_place):
            yield f"| {moment} | {' | '.join(_moment_cell(at.get((moment, system))) for system in systems)} |"
        yield ""


def _place(moment: str) -> tuple[int, int, str]:
    """By operation, and before it first."""
    when, number, *_ = (*moment.split(), "0") if moment.split()[1].isdecimal() else ("", moment.rpartition(" ")[2])
    return int(number), when == "after", moment


def _moment_cell(one: Mapping[str, Any] | None) -> str:
    if one is None or one["outcome"] == "no effect":
        return "–"
    if one["outcome"] == "unseen":
        return "unseen"
    seen = one["seen"].replace(" bits", "").replace("_", "\\_")
    return f"{seen}{', saved' if one['carried'] else ''}"


def _struck_cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "–"
    seen = f": {one['seen'].partition(' ')[2]}" if one["outcome"] == "mismatch" else ""
    carried = ", saved" if one["carried"] else ""
    raised = f" ({_RAISED[one['raised']]})" if one["raised"] else ""
    return f"{one['outcome']}{raised}{seen}{carried}"


_RAISED = {"library": "library", "fault": "the fault's own", "rank lost": "rank lost"}


def render(document: Document, findings: Mapping[str, Any], struck: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The pages, by their paths below `docs/`."""
    homes = {stack["name"]: home_of_stacks(stack["name"]) for stack in document["stack"]}
    pages = {"resilience.md": _index(document, homes, findings)}
    for home in dict.fromkeys(homes.values()):
        stacks = [stack for stack in document["stack"] if homes[stack["name"]] == home]
        pages[f"resilience/{_page(home)}.md"] = _stacks_page(home, stacks)
    return pages | {"resilience/beside-the-disk.md": _beside_the_disk(findings, struck)}


def _page(home: str) -> str:
    return home or "no-system"


def _index(document: Document, homes: Mapping[str, str], findings: Mapping[str, Any]) -> str:
    lines = [HEAD, "## Stacks", "", OF_SYSTEMS, "", *_summary(document, homes), ""]
    lines += ["## Larger runs", "", *(f"* {one['text']}" for one in findings.get("large", ())), ""]
    lines += ["## Findings", "", *_findings(findings)]
    return "\n".join(lines) + "\n"


def _stacks_page(home: str, stacks: Sequence[Document]) -> str:
    source = f"scenarios/{home}/resilience/stacks.toml" if home else "docs/resilience.toml"
    lines = [STACKS_PAGE.format(source=source, title=home or "stacks of no system")]
    for stack in stacks:
        lines += [*_section(stack), ""]
    return "\n".join(lines).rstrip() + "\n"


def _beside_the_disk(findings: Mapping[str, Any], struck: Sequence[Mapping[str, Any]]) -> str:
    lines = [STRUCK_RANKS.replace("SYSTEM", struck[0]["system"]), "", *_struck(struck), ""]
    lines += [MOMENTS, *_moments(struck), IN_FLIGHT]
    return "\n".join([*lines, *(f"* {one['text']}" for one in findings.get("in_flight", ()))]) + "\n"


_WHOLE = ("old", "new", "other")
_COLUMNS = {"crash": ("silent",), "damage": ("silent",), "disk": ("silent", "lied"), "ranks": ("silent", "lied")}


def _summary(document: Document, homes: Mapping[str, str]) -> Iterator[str]:
    yield "How many trials gave a whole state / an error / something silent (of disk and ranks: silent or lied)."
    yield ""
    yield "| stack | events, syncs | crash | damage | disk | ranks | hang or crash |"
    yield "|---|---|---|---|---|---|---|"
    for stack in document["stack"]:
        cells = [
            " / ".join(str(total(stack, outcomes, family)) for outcomes in (_WHOLE, ("error",), bad))
            if total(stack, OUTCOMES, family)
            else "–"
            for family, bad in _COLUMNS.items()
        ]
        cells.append(str(total(stack, ("hang", "crash"))))
        anchor = stack["name"].replace("+", "")  # as headings have it
        link = f"resilience/{_page(homes[stack['name']])}.md#{anchor}"
        yield f"| [{stack['name']}]({link}) | {stack['events']}, {stack['syncs']} | {' | '.join(cells)} |"


def _section(stack: Document) -> Iterator[str]:
    yield f"## {stack['name']}"
    yield ""
    there = f"{stack['crash_states']} crash states, {stack['strikes']} strikes"
    yield f"{stack['doc']}. {there}; {stack['trials']} trials."
    yield f"A cell has the count and one trial, which `shardproof resilience {stack['name']} --trial ID` makes again."
    yield ""
    shown = [outcome for outcome in OUTCOMES if total(stack, (outcome,))]
    yield f"| kind | {' | '.join(f'**{o}**' if o in WRONG else o for o in shown)} |"
    yield "|---|" + "---|" * len(shown)
    for kind, cells in stack["kind"].items():
        texts = [f"{cells[o]['count']} `{cells[o]['trial']}`" if o in cells else "–" for o in shown]
        yield f"| {kind} ({family_of(kind)}) | {' | '.join(texts)} |"


def _findings(findings: Mapping[str, Any]) -> Iterator[str]:
    for one in findings.get("finding", ()):
        yield from (f"### {one['title']}", "", one["text"].strip(), "")
        yield f"Script: [`{one['script']}`](resilience-scripts/{one['script']}). {one['public']}"
        yield ""
    yield "### Known to the public"
    yield ""
    yield from (f"* {one['text']} {one['public']}" for one in findings.get("known", ()))


if __name__ == "__main__":
    write(render(stack_rows(), tomllib.loads(FINDINGS.read_text("utf-8")), struck_rows()))
