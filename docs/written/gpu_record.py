"""The record of a run on a GPU for docs/gpu.md, as Markdown: verdicts, and where the CPU had said something else.

    python -m docs.written.gpu_record CPU.json CUDA.json >> docs/gpu.md

Both files are what `shardproof run gpu --device … --json FILE` writes. Computes no verdict.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.errors import UsageError

Json = Mapping[str, Any]

LONGEST = 140
"""Letters of what a run showed in one cell of the table."""


def render_record(on_cpu: Json, on_gpu: Json) -> str:
    """A section for docs/gpu.md.

    Args:
        on_cpu, on_gpu: documents of `--json`, of the same scenarios but for their device.
    """
    run, results = on_gpu["run"], on_gpu["results"]
    ran = [r for r in results if r["scenario"].get("device") == "cuda" and r["verdict"] != "unsupported"]
    before = {_but_device(r): r for r in on_cpu["results"]}
    pairs = [(before[_but_device(r)], r) for r in ran if _but_device(r) in before]
    other = [pair for pair in pairs if _what(pair[0]) != _what(pair[1])]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    counts = Counter((r["system"], r["verdict"]) for r in ran)
    lines = [
        f"### {run['started_at'][:10]}: {'; '.join(run['devices']) or 'no GPU'}",
        "",
        f"`{' '.join(run['command'])}`; {versions}.",
        "",
        *_table(("system", "verdict", "scenarios"), [(*key, n) for key, n in sorted(counts.items())]),
        "",
        f"{len(pairs)} of them ran on the CPU too; {len(pairs) - len(other)} have the same verdict and evidence.",
        "",
    ]
    if other:
        alike: dict[tuple[str, str], list[Json]] = {}
        for cpu, after in other:
            alike.setdefault((_what(cpu), _what(after)), []).append(after)
        rows = [(len(those), _varied(those, ran), *key) for key, those in alike.items()]
        lines += [*_table(("scenarios", "what they share", "on the CPU", "on the GPU"), rows), ""]
    alone = {r["known_issue"] for r in ran if r["known_issue"] and not r["emulated"]}  # of several one may hide others
    if confirmed := sorted(issue for issue in alone if "+" not in issue):
        lines += [f"Known issues seen with nothing emulated (`confirmed_on_gpu`): {', '.join(confirmed)}.", ""]
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """Print the record of two files.

    Raises:
        UsageError: not two readable files of `--json`.
    """
    form = "python -m docs.written.gpu_record cpu.json cuda.json"
    if len(words) != 2:
        raise UsageError.of("files", list(words), "two, of the CPU and of the GPU", form)
    documents = []
    for word in words:
        try:
            documents.append(json.loads(Path(word).read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise UsageError.of("file", word, f"what `shardproof run --json` writes ({error})", form) from None
    print(render_record(*documents))


def _but_device(result: Json) -> str:
    """The scenario in words, whatever its device."""
    axes = {axis: text for axis, text in result["scenario"].items() if axis != "device"}
    shown = ("system", "mesh", "dtype", "offload", "optimizer", "checkpoint", "model", "program", "options", "load")
    first = [f"{axis}={axes.pop(axis)}" for axis in shown if axes.get(axis)]
    return " ".join([*first, *(f"{axis}={text}" for axis, text in axes.items() if text not in ("", "0", "1", "same"))])


def _varied(those: Sequence[Json], ran: Sequence[Json]) -> str:
    """The axes that some scenarios have in common, of those axes that differ between all that ran on their system."""
    near = [other["scenario"] for other in ran if other["system"] == those[0]["system"]]
    shared = {axis: text for axis, text in those[0]["scenario"].items() if len({each[axis] for each in near}) > 1}
    for result in those:
        shared = {axis: text for axis, text in shared.items() if result["scenario"][axis] == text}
    return " ".join([those[0]["system"], *(f"{axis}={text}" for axis, text in shared.items() if text)])


def _what(result: Json) -> str:
    said = " ".join((str(result["signature"]).partition(" ")[2] or str(result["verdict"])).split())
    printable = "".join(letter for letter in said if letter.isprintable())
    return printable if len(printable) <= LONGEST else f"{printable[:LONGEST]}…"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = ((str(cell).replace("|", "\\|") for cell in row) for row in rows)
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in cells)]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as mistake:
        sys.exit(f"shardproof: {mistake}")
