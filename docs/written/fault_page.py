"""`docs/faults.md`: which logical faults there are, which public bugs they represent, and where a fault can be made.

    python -m docs.written.fault_page > docs/faults.md

Written from `faults.toml` and `bugs.toml` of the reference's scenarios, from what `tests/exposing.py` recorded of the
faults, and from the public methods of the reference, as its source has them. A test compares the
committed page with what this module writes.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from shardproof.faults.catalogue import CATALOGUE, FOLDER, Fault, mechanisms
from shardproof.faults.confusion_table import Row, confusion
from shardproof.issues.upstream_links import address_of
from shardproof.tables import Table, load_toml

HEAD = """\
<!-- Written by `python -m docs.written.fault_page` from faults.toml and bugs.toml: change those. -->
# Faults

Which mistakes do we know that we would notice? Every *logical fault* is a mistake that a library has made, planted in
the reference, our own sharded optimizer. `shardproof faults` plants each one in a scenario that exposes it, and fails
if one goes unnoticed; [Adding a fault](adding-a-fault.md) adds one. Faults from outside of a library, such as a lost
message or a bit that flips on disk, are made in real ranks and are listed by `shardproof list`.
"""

BUGS = """\
## Public bugs

{represented} of the {all} public bugs that the project collected are represented. A fault stands for several bugs where
what goes wrong with the state is the same; then the reports differ in how a library came to it. {left} are left out,
for the reason that is given.

Of the {faults} faults, {refused} have the mechanism `refused`: there the planted function raises the error that the
library raised, and *noticed* means that the run ended with it. They show that such an error is seen, attributed and
reported, and nothing about how well wrong state is recognised. {only_refused} of the {represented} bugs are represented
by such a fault alone.
"""

KINDS = """\
## What is wrong

A fault's mechanism is written down before any rule of the diagnosis is made for it. An explanation is right if it is
one of those that say the same. Where the run ends, no value is there to be explained.
"""

CONFUSION = """\
## What is said of them

Of each mechanism: in how many scenarios such a fault is planted, in how many the first explanation is a right one, and
what the first explanations are, with those that are not right after a `!`. Of {faults} faults that can be explained,
{top1} are in all of their scenarios by the first explanation, and {top3} by one of the first three. `shardproof faults`
prints the table of what it has just planted.
"""

WIDE = """\
Rules were made by looking at these scenarios. So each fault is also planted in {each} scenarios of the reference's
nightly walk in which it shows, drawn at random (`python -m tests.exposing --wide {each}`): of {scenarios}, the first
explanation is right in {top1} ({share1:.1f} %), one of the first three in {top3} ({share3:.1f} %).
"""

UNSEEN = """\
What is missed there is looked at when rules are made, too. In as many scenarios of another draw, whose misses nobody
has looked at, the first explanation is right in {top1} of {scenarios} ({share1:.1f} %), one of the first three in
{top3} ({share3:.1f} %).
"""

LEFT = """\
### What stays unexplained

Some of what is missed cannot be told from what ranks hold, and no rule pretends to:

* The planted mistake ends the run before any value differs, with an error that names no parameter, as *cannot reshape
  array of size 8 into shape (4,4)*. Where a text names a parameter beside the size of another one, or two sizes that no
  parameter has both, that is said.
* A load that looks for a parameter in a buffer that does not have it, and leaves its masters as they were
  (`buffers-of-the-first-kind`), has made of them what a load makes that never asked for them: it is called stale.
* A single element deviates, or several that are equal: any other place may have the same bits.
* Rows that are counted over the whole catalogue of parameters, by a fault of ours and by no library, reach into the
  tensors before (`floor-chunks` under tensor parallelism).
"""

REAL = """\
## Defects of real libraries

The same rules explain the regressions, which real ranks of real libraries run; nothing in them knows which defect it
is. Of {recorded} regressions that are recorded, {compared} end with values that differ. {explained} of these have an
explanation, and the first one names the mechanism in {right}. In the {consequence} of the table it is true and names a
consequence. The other {ended} end with an error, a hang or a race: there the library's own error is shown, and values
are explained where some differ before it.
"""

FAULTS = """\
## All faults

*Shows when* are the conditions under which the mistake can be seen at all: with the values of the axes that are given,
or patterns of them, and a program that does what is named. Where it says *scenarios*, they were chosen by hand.
"""

SEAMS = """\
## Where a fault can be made

The reference is cut into methods, each a *seam*: `override(ranks.saver, "export", mine)` replaces one in the ranks of
one build. Arrays have these letters for their shapes: R replicas and S shard ranks of the mesh, n elements of a flat
buffer with its padding, m elements of it that each rank owns. A seam between backward and the optimizer's step is
`trainer.finish_gradients`: what was reduced lies in `shards.reduced`, (R, S, m), and becomes `shards.main_grad`.
"""

GOLDEN = FOLDER.parent.parent / "tests" / "golden"  # type: ignore[attr-defined]
RECORD, DRAWN = "faults.toml", "faults_wide.toml"
"""What `tests/exposing.py` recorded of every fault."""

HOLDERS = (("session", "state", "Session"), ("trainer", "trainer", "Trainer"), ("saver", "checkpoint", "Saver"),
           ("loader", "restore", "Loader"), ("observer", "observe", "Observer"))  # fmt: skip
"""Attributes of `Ranks`, and the module and class of the reference that each is of."""


def main() -> None:
    """Print the page."""
    print(render(), end="")


def render() -> str:
    """The page."""
    return "\n".join([HEAD, *_bugs(), *_kinds(), *_said(), *_real(), *_faults(), *_seams()])


def left_out() -> dict[str, str]:
    """The public bugs that no fault represents → the reason."""
    return {bug: _bug_file().table("left_out").text(bug) for bug in _bug_file().table("left_out").content}


def collected() -> dict[str, str]:
    """Every public bug that was collected → the class of its mistake, and whether it is silent."""
    return {bug: _bug_file().table("bugs").text(bug) for bug in _bug_file().table("bugs").content}


def represented() -> dict[str, list[Fault]]:
    """Public bug → the faults that are its mistake."""
    found: dict[str, list[Fault]] = {}
    for fault in CATALOGUE.values():
        for bug in fault.bug_ids:
            found.setdefault(bug, []).append(fault)
    return found


def _bug_file() -> Table:
    return Table(load_toml((FOLDER / "bugs.toml").read_text("utf-8"), "bugs.toml"), "bugs.toml")


def _bugs() -> Iterator[str]:
    known, by_bug, reasons = collected(), represented(), left_out()
    refused = [fault for fault in CATALOGUE.values() if not mechanisms()[fault.mechanism]]
    yield BUGS.format(
        represented=len(known.keys() & by_bug.keys()), all=len(known), left=len(reasons), faults=len(CATALOGUE),
        refused=len(refused), only_refused=sum(all(f in refused for f in by_bug.get(bug, [None])) for bug in known),
    )  # fmt: skip
    rows = []
    for bug, kind in known.items():
        address = address_of(bug)
        faults = ", ".join(f"`{fault.id}`" for fault in by_bug.get(bug, ()))
        rows.append((f"[{bug}]({address})" if address else bug, kind, faults or f"*left out:* {reasons.get(bug, '')}"))
    yield from _table(("bug", "class", "fault"), rows)


def _kinds() -> Iterator[str]:
    yield KINDS
    count = {name: sum(f.mechanism == name for f in CATALOGUE.values()) for name in mechanisms()}
    rows = [
        (f"`{name}`", str(count[name]), ", ".join(f"`{rule}`" for rule in said_by) or "the run ends")
        for name, said_by in mechanisms().items()
    ]
    yield from _table(("mechanism", "faults", "said by"), rows)


def _said() -> Iterator[str]:
    """What explanations say of the faults, as the last search recorded it."""
    record, wide = (tomllib.loads((GOLDEN / name).read_text("utf-8")) for name in (RECORD, DRAWN))
    explained = [record[name] for name, fault in CATALOGUE.items() if mechanisms()[fault.mechanism]]
    right = {top: sum(entry[top] for entry in explained) for top in ("top1", "top3")}
    yield CONFUSION.format(faults=len(explained), **right)
    first = ((CATALOGUE[name].mechanism, said) for name, entry in record.items() for said in entry["said"])
    yield from _confusion(confusion(first))
    yield WIDE.format(each=wide["each"], **_shares(wide["wide"]))
    yield from _confusion([Row(name, said) for name, said in wide["wide"]["said"].items()])
    if "unseen" in wide:
        yield UNSEEN.format(**_shares(wide["unseen"]))
    yield LEFT


def _shares(drawn: Mapping[str, Any]) -> dict[str, float]:
    """A draw's counts, and in how much of it the first explanation, or one of the first three, is right, in %."""
    counts = {key: drawn[key] for key in ("scenarios", "top1", "top3")}
    return {**counts, **{f"share{n}": 100 * drawn[f"top{n}"] / drawn["scenarios"] for n in (1, 3)}}


def _real() -> Iterator[str]:
    """What explanations say of the regressions, as their last run recorded it."""
    record = json.loads((GOLDEN / "verdicts" / "regressions.json").read_text("utf-8"))
    told = tomllib.loads((GOLDEN / "told.toml").read_text("utf-8"))["consequence"]
    explanations = [facts[5] for facts in record.values() if facts[1] == "mismatch"]
    explained = sum(bool(mechanisms_of) for mechanisms_of in explanations)
    yield REAL.format(
        recorded=len(record), compared=len(explanations), explained="All" if all(explanations) else explained,
        right=explained - len(told), consequence=len(told), ended=len(record) - len(explanations),
    )  # fmt: skip
    yield from _table(("regression", "what its first explanation says"), [(f"`{n}`", text) for n, text in told.items()])


def _confusion(rows: Sequence[Row]) -> Iterator[str]:
    cells = [(f"`{row.mechanism}`", str(row.planted), str(row.right), row.explanations_text) for row in rows]
    yield from _table(("what is wrong", "scenarios", "right", "first explanations"), cells)


def _faults() -> Iterator[str]:
    yield FAULTS
    rows = [(f"`{f.id}`", f.doc, f"`{f.mechanism}`", _conditions(f)) for f in CATALOGUE.values()]
    yield from _table(("fault", "what goes wrong", "mechanism", "shows when"), rows)


def _conditions(fault: Fault) -> str:
    if fault.shows is None:
        return f"{len(fault.scenario_axes)} scenario{'s' * (len(fault.scenario_axes) > 1)}"
    told = (f"{axis} {' or '.join(f'`{value}`' for value in values)}" for axis, values in fault.shows.items())
    return ", ".join(told) or "always"


def _seams() -> Iterator[str]:
    yield SEAMS
    rows = []
    for attribute, module, name in HOLDERS:
        source = (files("shardproof.reference") / f"{module}.py").read_text("utf-8")
        (own,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
        for seam in own.body:
            if isinstance(seam, ast.FunctionDef) and not seam.name.startswith("_"):
                first = (ast.get_docstring(seam) or "").split("\n\n")[0].replace("\n", " ")
                rows.append((f"`{attribute}.{seam.name}`", f"`{_signature(seam)}`", first))
    yield from _table(("seam", "takes and gives", "what it does"), rows)


def _signature(seam: ast.FunctionDef) -> str:
    taken = ast.unparse(ast.arguments([], seam.args.args[1:], seam.args.vararg, seam.args.kwonlyargs, [], None, []))
    return f"({taken}) → {ast.unparse(seam.returns) if seam.returns else 'None'}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


if __name__ == "__main__":
    main()
