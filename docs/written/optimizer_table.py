"""`docs/optimizers.md`: which optimizers answered what, written from docs/optimizers.toml.

    python -m docs.written.optimizer_table > docs/optimizers.md

The file holds one `[[optimizer]]` for each that was asked (`survey`), and one `[[finding]]` for each defect that an
answer led to: `title`, `text`, `script` (a file of docs/optimizer-scripts, which imports nothing of ours) and `public`,
which says whether somebody told of it, and what was searched when. A test compares the committed page with what this
module writes.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.optimizers.answers import QUESTIONS

DATA = Path("docs/optimizers.toml")
HEAD = """\
<!-- Written by `python -m docs.written.optimizer_table` from docs/optimizers.toml: change that. -->
# Optimizers

Does this optimizer still do what it does when `fully_shard` has cut its parameters up, and after a checkpoint? One
command asks any subclass of `torch.optim.Optimizer`, named as an import statement would name it, on real ranks:

```console
$ shardproof optimizer torch.optim.AdamW
$ shardproof optimizer torch.optim.SGD --arg momentum=0.9
$ shardproof optimizer lion_pytorch.Lion --json lion.json
```

An optimizer from PyPI has to be importable where shardproof runs: `pip install lion-pytorch` into the same environment,
or name another with `--python`. `--arg` gives the constructor an argument; its value is a Python literal, or a name of
torch such as `torch.bfloat16`. `--out DIR` keeps the logs of ranks that failed.

Nothing is assumed of the optimizer's formula, unlike in [Adding an optimizer](adding-an-optimizer.md), where a
reference computes AdamW or SGD a second time. Here the optimizer is compared with itself: the same class steps whole
tensors, on the same exact gradients ([Numerics](numerics.md)) that reach the ranks through FSDP2. So a *yes* says that
sharding changes nothing. It does not say that the optimizer is a good one, or the one that its paper describes.

Behind every question lies a cell of the shipped trainer
[optimizers.py](../scenarios/trainers/optimizers.py), and one arm of it answers ([Trainers](trainer.md)). A *no* can be
looked at by itself there, with all other arms, a report and a replay. That of Rprop is torch 2.13.0's, as the whole
table is; with torch 2.15.0 the same command passes:

```console
$ shardproof trainer scenarios/trainers/optimizers.py --set optimizer=torch.optim.Rprop --set way=sharded --strength 1
```

## The questions
"""

ANSWERS = """\
*Round* is a no whose differences are as small as another order of addition makes them: at most a thousandth of what the
steps changed, or four units in the last place. A norm or a matrix product over a
sharded tensor is added up in another order, so that an optimizer that looks at whole tensors and treats a sharded one
correctly rounds, and its answer to *position* is no by design. Where the first answer is a no of either kind,
*reshard*, *groups* and *tensor lr* do not count it again: they ask what a checkpoint restores, and what becomes of
whole tensors.

*Refuses* is the optimizer's own word that it does not do this. A dash is nothing to compare: no state, and empty never
equals anything. A dot cannot be asked: the optimizer failed before it came to the question, or needs a closure or
sparse gradients.

Every no came twice, in fresh ranks. All of it ran on CPU, two ranks and gloo, with torch's plain kernels
(`ATEN_CPU_CAPABILITY=default`) and without torch.compile: vectorised kernels may round by position where these do not.
`CPUOffloadPolicy` is the real one, but there is no second memory to copy from.
"""

MEANS = {
    "sharded": "After each of four steps on two ranks, every parameter and all comparable state is bit for bit what it "
    "is on whole tensors.",
    "position": "Cutting a tensor into the rows that ranks hold, or reversing the order of its elements, changes no "
    "element's update.",
    "few_rows": "As the first, with a matrix of one row, of which one rank holds nothing.",
    "state_dict": "On whole tensors, `state_dict` through `torch.save` and `torch.load` restores all state, and the "
    "step after the load is the one that would have been taken without it.",
    "dcp": "The same of sharded parameters: `get_state_dict` and `dcp.save`, then in fresh processes `dcp.load` and "
    "`set_state_dict`.",
    "reshard": "The same, loaded on twice as many ranks.",
    "offload": "Under `CPUOffloadPolicy` the ranks do what they do without it.",
    "bf16": "As the first, with parameters and gradients in bf16.",
    "groups": "Two param groups with settings of their own do what two optimizers do, sharded too, and a checkpoint "
    "keeps them apart.",
    "tensor_lr": "A learning rate that is a tensor does what the number does, follows a schedule, and survives a "
    "checkpoint.",
}
"""Question → what a yes to it means."""

SHORT = {
    "sharded": "sharded", "position": "position", "few_rows": "few rows", "state_dict": "state_dict", "dcp": "DCP",
    "reshard": "reshard", "offload": "offload", "bf16": "bf16", "groups": "groups", "tensor_lr": "tensor lr",
}  # fmt: skip
"""Question → the head of its column."""

CELLS = {
    "yes": "yes", "no": "**no**", "no (rounding)": "round", "refuses": "refuses", "nothing to compare": "–",
    "cannot be asked": "·", "unknown": "?",
}  # fmt: skip
MOST_OF_A_WHY = 420


def render(document: Mapping[str, Any]) -> str:
    """The page."""
    every: list[dict[str, Any]] = [entry for entry in document["optimizer"] if "date" in entry]
    own = [entry for entry in every if _is_torch(entry)]
    others = [entry for entry in every if not _is_torch(entry)]
    days = sorted({entry["date"] for entry in every})
    when = days[0] if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    lines = [HEAD, *_questions(), "", ANSWERS, "## The answers", "", *_counted(every, when), ""]
    lines += ["### torch.optim", "", *_table(own), ""]
    lines += ["### From PyPI", "", *_table(others), ""]
    lines += ["## Findings", "", *_findings(document.get("finding", ())), ""]
    lines += ["## Why not", "", *_reasons([*own, *others])]
    return "\n".join(lines) + "\n"


def _questions() -> Iterator[str]:
    yield "| question | yes means |"
    yield "|---|---|"
    yield from (f"| {SHORT[question]} | {means} |" for question, means in MEANS.items())


def _is_torch(entry: Mapping[str, Any]) -> bool:
    return str(entry["path"]).startswith("torch.optim.")


def _counted(entries: Sequence[Mapping[str, Any]], when: str) -> Iterator[str]:
    asked = [entry for entry in entries if any(said != "cannot be asked" for said in entry.get("answers", {}).values())]
    yes = sum(set(entry["answers"].values()) <= {"yes", "nothing to compare", "refuses"} for entry in asked)
    kinds = Counter(entry["answers"]["sharded"] for entry in asked)
    torch = ", ".join(sorted({entry["torch"] for entry in entries if "torch" in entry}))
    yield f"{len(entries)} optimizers were tried {when} with torch {torch}, and {len(asked)} of them could be asked."
    yield f"{yes} of these have no *no* at all. To the first question {kinds['yes']} say yes,"
    yield f"{kinds['no (rounding)']} round, and {kinds['no'] + kinds['refuses']} say no or refuse."


def _table(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"| optimizer | {' | '.join(SHORT.values())} |"
    yield "|---|" + "---|" * len(SHORT)
    for entry in entries:
        said = entry.get("answers", {})
        cells = [CELLS[said[question]] if said else "·" for question in QUESTIONS]
        yield f"| {_name(entry)} | {' | '.join(cells)} |"


def _name(entry: Mapping[str, Any]) -> str:
    given = "".join(f" {name}={value}" for name, value in entry.get("arguments", {}).items())
    release = "" if _is_torch(entry) or "version" not in entry else f" ({entry['distribution']} {entry['version']})"
    return f"`{entry['path']}{given}`{release}"


def _reasons(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For each optimizer the evidence of each different reason; the questions that share one stand together."""
    yield "The evidence for every answer that is not yes, as the command prints it; docs/optimizers.toml has all of it."
    yield ""
    for entry in entries:
        reasons: dict[str, list[str]] = {}
        for question, why in entry.get("why", {}).items():
            reasons.setdefault(why, []).append(SHORT[question])
        if not reasons and not {"failed", "note"} & entry.keys():
            continue
        yield f"* {_name(entry)}"
        if "note" in entry:
            yield f"  * {entry['note']}"
        if "failed" in entry:
            yield f"  * all: {_shown(entry['failed'])}"
        for why, questions in reasons.items():
            yield f"  * {', '.join(questions) if len(questions) < len(QUESTIONS) else 'all'}: {_shown(why)}"


def _shown(text: str) -> str:
    """A sentence of the ranks, in which marks that Markdown would read stand for themselves."""
    text = text if len(text) <= MOST_OF_A_WHY else f"{text[:MOST_OF_A_WHY]}…"
    return "".join(f"\\{c}" if c in "\\`*_<>[]|#~$" else c for c in text)


def _findings(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not entries:
        yield "None yet."
        return
    yield "What a no led to, where it is a defect and no design: how a user comes to meet it, a script that imports"
    yield "nothing of shardproof's, and whether it was public on the day of the search."
    for entry in entries:
        yield ""
        yield f"### {entry['title']}"
        yield ""
        yield entry["text"]
        yield ""
        yield f"Script: [`{entry['script']}`](optimizer-scripts/{entry['script']}). {entry['public']}"


if __name__ == "__main__":
    sys.stdout.write(render(tomllib.loads(DATA.read_text("utf-8"))))
