"""How many mistakes that a tool makes in our own code do our tests notice? mutmut's answer, as a record and a table.

    pip install 'shardproof[mutation]'
    mutmut run --max-children 1 shardproof.layout.x_inside__mutmut_1
                                                      makes all mutants, in the copy `mutants/`, and runs one
    python -m tests.mutant_runs 'shardproof.layout.*'    runs those of a module that no test has killed yet
    python -m tests.survivors mutants 2026-11-23      takes what it found into tests/golden/mutation.toml
    python -m tests.survivors                         writes the table of docs/mutation.md from that

A mutant is one small change: `<` to `<=`, `strict=True` to `strict=False`, a number one higher. A test that fails
*kills* it. The score is raw: a mutant that no test can kill, because it does the same, counts as a survivor, and the
record says why (`why`, by hand). Of each mutant only the tests run that call the changed function, in a fork of one
process that has imported everything. It mutates no function that has a decorator, so that properties and cached
functions are not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "golden" / "mutation.toml"
PAGE = ROOT / "docs" / "mutation.md"
SURVIVED, NO_TEST, TIMED_OUT = 0, 33, (24, 36, 152, 255, -24)
"""Exit statuses that mutmut records: every test passed; no test calls the function; it took too long, which on a busy
machine says nothing. Others are kills."""

MARKS = ("<!-- python -m tests.survivors -->\n", "<!-- end -->\n")
"""What stands before and behind the table in the page; the prose around it is written by hand."""


def taken(folder: Path) -> dict[str, dict[str, Any]]:
    """Module → `mutants`, `killed` and the names of the survivors, of the modules that were run whole."""
    found: dict[str, dict[str, Any]] = {}
    for meta in sorted(folder.rglob("*.py.meta")):
        statuses: dict[str, int | None] = json.loads(meta.read_text("utf-8"))["exit_code_by_key"]
        if not statuses or {None, *TIMED_OUT} & {*statuses.values()}:
            continue  # not run whole
        module = str(meta.relative_to(folder)).removesuffix(".meta")
        left = [name for name, status in statuses.items() if status in (SURVIVED, NO_TEST)]
        found[module] = {"mutants": len(statuses), "killed": len(statuses) - len(left), "survivors": left}
    return found


def change(name: str, folder: Path) -> str:
    """A mutant's changed lines, as mutmut shows them."""
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("mutmut")), "show", name],
        cwd=folder.parent, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = (line for line in shown.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---"))
    return "\n".join(line[0] + " " + line[1:].strip() for line in lines)


def record(folder: Path, day: str) -> None:
    """Take what a run left behind into the record; what was said of a survivor's change stays."""
    import tomli_w

    document = tomllib.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    for module, figures in taken(folder).items():
        known = {entry["change"]: entry.get("why", "") for entry in document.get(module, {}).get("survivor", ())}
        changes = sorted(change(name, folder) for name in figures["survivors"])
        survivors = [{"change": text, "why": known.get(text, "")} for text in changes]
        document[module] = {
            "day": day, "mutants": figures["mutants"], "killed": figures["killed"], "survivor": survivors,
        }  # fmt: skip
    RECORD.write_text(tomli_w.dumps(document, multiline_strings=True), "utf-8")


def render() -> str:
    """The table of scores, in Markdown."""
    return "".join(f"{line}\n" for line in _lines(tomllib.loads(RECORD.read_text("utf-8"))))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield "| module | day | mutants | killed | score | survivors without a reason |"
    yield "|---|---|---|---|---|---|"
    for module, found in document.items():
        open_ = sum(not entry["why"] for entry in found["survivor"])
        score = 100 * found["killed"] / found["mutants"]
        yield f"| `{module}` | {found['day']} | {found['mutants']} | {found['killed']} | {score:.1f} % | {open_} |"


def main(words: list[str]) -> None:
    """Take a run into the record, or write the table of the page."""
    if words[:1] == ["--help"]:
        print(__doc__)
    elif words:
        record(Path(words[0]), words[1])
    else:
        before, opening, rest = PAGE.read_text("utf-8").partition(MARKS[0])
        closing = rest.partition(MARKS[1])[1:]
        PAGE.write_text("".join((before, opening, render(), *closing)), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
