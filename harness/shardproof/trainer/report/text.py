"""What `shardproof trainer` prints: the state that was found, the arms of each cell, a sentence for what failed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from shardproof.observe.record import WRITTEN
from shardproof.program import ARMS
from shardproof.result import ArmResult, Result
from shardproof.scenario import Scenario
from shardproof.trainer.arms import ENDS, MEASURED, READS, TRAINS
from shardproof.trainer.cells import MESH_AXIS, values_of
from shardproof.trainer.data.epochs import later_program
from shardproof.trainer.described import Described
from shardproof.trainer.judge.unsteady import compared
from shardproof.trainer.step.measured import GATHERED, REDUCED
from shardproof.trainer.values.wording import SAME_AS_AGREE
from shardproof.verdict import Verdict

SIGNS = {
    Verdict.PASS: "ok", Verdict.UNSUPPORTED: "-", Verdict.MISMATCH: "MISMATCH", Verdict.CRASH: "CRASH",
    Verdict.HANG: "HANG", Verdict.NONDETERMINISTIC: "UNSTEADY", Verdict.UNKNOWN: "?",
}  # fmt: skip
MOST_SHOWN = 20
"""How many kinds of failing cells are told in full, by the plainest cell of each; the report has all cells."""
MOST_OTHERWISE = 8
"""How many lines are told of what a step does in other cells than the first."""
MOST_NAMED = 6
"""How many cells that fail alike are named."""


def render(
    trainer: Described, results: Sequence[Result], place: str = "", again: str = "", tried: Collection[str] = ()
) -> str:
    """The whole text. place, again: the options that a printed command needs after the id, as a `Report` gives them.
    tried: programs that were run besides, and of which there is no result."""
    programs = {*tried, *(result.scenario.program for result in results)}
    results = [_without_tried(result, programs) for result in compared(trainer, results)]
    lines = [*_state(results), *_table(results)]
    bad = [result for result in results if result.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED)]
    kinds: dict[object, list[Result]] = {}
    for result in bad:
        kinds.setdefault(_kind(result), []).append(result)
    shown = sorted(
        (sorted(each, key=_is_not_whole) for each in kinds.values()), key=lambda each: _is_not_whole(each[0])
    )
    for alike in shown[:MOST_SHOWN]:
        lines += ["", *_cell(alike[0]), *_more(alike[1:]), *_commands(alike[0], place, again)]
    if len(kinds) > MOST_SHOWN:
        lines += ["", f"Cells that fail in {len(kinds) - MOST_SHOWN} more ways are in the report."]
    lines += ["", *_not_compared(trainer, results)]
    counts = Counter("known" if result.known_issue else result.verdict.value for result in results)
    lines.append(f"{trainer.system}: {', '.join(f'{n} {verdict}' for verdict, n in counts.most_common())}")
    return "\n".join(lines) + "\n"


def _without_tried(result: Result, programs: Collection[str]) -> Result:
    """A result without hints at a program that was run besides."""
    arms = tuple(
        replace(arm, notes=tuple(note for note in arm.notes if later_program([note]) not in programs))
        for arm in result.arms
    )
    return replace(result, arms=arms)


OTHER_MODELS = ("optimizer", "lr", "learning_rate", "model", "seed", "schedule", "scheduler", "dtype")
"""Axes whose values train other models, by their names."""


def lead_to_alike(trainer: Described, results: Sequence[Result]) -> str:
    """A hint at the axes whose values no arm compares with each other, although they may have to come to the same, and
    do not so far."""
    named = {*OTHER_MODELS, *trainer.alike, *trainer.altered, *_without_effect(trainer, results)}
    axes = [axis for axis, texts in trainer.axes.items() if len(texts) > 1 and axis not in named]
    if not axes:
        return ""
    one = len(axes) == 1
    its, they, name = ("its values", "they", axes[0]) if one else ("the values of each", "those of one", "AXIS")
    return (
        f"{', '.join(axes)}: {its} are not compared with each other; if {they} must come to the same model, say "
        f'`alike = {{"{name}": "rounding"}}` (docs/trainer.md)'
    )


def cell_text(scenario: Scenario) -> str:
    """A cell in words: its values that are not the first."""
    more = f", {scenario.program}" if scenario.program != ARMS else ""
    return (" ".join(scenario.options) or "first value of every axis") + more


def _state(results: Sequence[Result]) -> list[str]:
    """What was found on the trainer, once; as a warning what could not be read; and what was emulated."""
    told = list(dict.fromkeys(line for result in results for line in result.state))
    found = [line.removeprefix("found: ") for line in told if line.startswith("found: ")]
    hidden = [line.removeprefix("hidden: ") for line in told if line.startswith("hidden: ")]
    lines = ["state that was found:", *(f"  {line}" for line in found)] if found else []
    if hidden:
        lines += ["WARNING: state that cannot be read, and is not compared (name it in `state()`):"]
        lines += [f"  {line}" for line in hidden]
    lines += _portrait(results)
    emulated = dict.fromkeys(symbol for result in results for symbol in result.emulated)
    lines += [f"emulated: {', '.join(emulated)}"] if emulated else []
    return [*lines, ""] if lines else []


def _portrait(results: Sequence[Result]) -> list[str]:
    """What a step does, as measured in the first cell that has a portrait, and what is otherwise in others."""
    drawn = [(result, own) for result in results if (own := _measured_in(result))]
    if not drawn:
        return []
    (_, (step, first)), *others = drawn
    otherwise: dict[str, list[str]] = {}
    for result, (at, lines) in others:
        where = cell_text(result.scenario) if at == step else f"{at} of {cell_text(result.scenario)}"
        for line in lines:
            if line not in first and not line.startswith((REDUCED, GATHERED)):
                otherwise.setdefault(line, []).append(where)
    told = [f"  {line}  ({cells[0]}{f' and {len(cells) - 1} more' if len(cells) > 1 else ''})"
            for line, cells in otherwise.items()]  # fmt: skip
    more = [f"  and {len(told) - MOST_OTHERWISE} more lines of other cells"] if len(told) > MOST_OTHERWISE else []
    return [
        f"what {step} does, as measured, for you to compare with what it should do:",
        *(f"  {line}" for line in first),
        *(["  otherwise in other cells:"] if told else []),
        *(f"  {line}" for line in told[:MOST_OTHERWISE]),
        *more,
    ]


def _measured_in(result: Result) -> tuple[str, list[str]] | None:
    """The step that was measured in a cell, and the lines about it; None where none was."""
    begins = f"{MEASURED}: "
    rows = [line.removeprefix(begins).partition(": ") for line in result.state if line.startswith(begins)]
    return (rows[0][0], [text for _, _, text in rows]) if rows else None


def _table(results: Sequence[Result]) -> list[str]:
    """One line a cell, with the verdicts of its arms."""
    lines = []
    for result in results:
        verdict = "known" if result.known_issue else SIGNS[result.verdict]
        arms = Counter(arm.verdict for arm in result.arms)
        told = f"{arms['pass']} of {len(result.arms)} arms pass" if result.arms else result.reason.split("\n", 1)[0]
        told = f"{told}; {result.known_issue}" if result.known_issue else told
        told = f"{told}; {result.reason}" if result.verdict is Verdict.PASS and result.reason else told
        lines.append(f"{verdict:<9} {result.id}  {cell_text(result.scenario)}  ({told}, {result.duration_s:.1f} s)")
    return lines


def _kind(result: Result) -> object:
    """What cells have in common that fail alike: what their arms say but for numbers, which differ with axes."""

    def told(text: str) -> str:
        return re.sub(r"[-+]?\d[\w.+-]*", "#", text)

    if not result.arms:
        return told(result.reason), result.known_issue
    return tuple((told(arm.name), arm.verdict, told(arm.sentence)) for arm in result.arms), result.known_issue


def _is_not_whole(result: Result) -> bool:
    """Whether no arm tells of a whole number as a factor, which a reader recognises sooner than 3.141."""
    return not any(re.search(r"is \d+ times what", arm.sentence) for arm in result.arms)


def _more(alike: Sequence[Result]) -> list[str]:
    """Names the cells that fail in the same way as one whose arms were all printed."""
    if not alike:
        return []
    named = [f"{result.id} ({cell_text(result.scenario)})" for result in alike[:MOST_NAMED]]
    more = [f"and {len(alike) - MOST_NAMED} more"] if len(alike) > MOST_NAMED else []
    return ["    alike, but for numbers:", *(f"      {line}" for line in [*named, *more])]


def _cell(result: Result) -> list[str]:
    known = f", known as {result.known_issue}" if result.known_issue else ""
    lines = [f"{result.id}  {cell_text(result.scenario)}: {result.verdict.value}{known}"]
    if not result.arms:
        return [*lines, *(f"    {line}" for line in result.reason.splitlines()[:6])]
    same = [arm.name for arm in result.arms if arm.sentence == SAME_AS_AGREE]
    first = result.headline_arm
    cause = [first] if first and first.name == WRITTEN else []  # what a load then lacks follows from it
    arms = [*cause, *(arm for arm in result.arms if arm not in cause)]
    lines += [line for arm in arms if arm.name not in same for line in _arm(arm)]
    return [*lines, *([f"    the same in {len(same)} more: {', '.join(same)}"] if same else [])]


def _arm(arm: ArmResult) -> list[str]:
    """The line of an arm; of one that passes, with what it did not compare."""
    line = f"    {SIGNS[Verdict(arm.verdict)]:<9} {arm.name}"
    notes = "; ".join(arm.notes) if arm.verdict == Verdict.PASS.value else ""
    told, *more = arm.paragraphs or (notes,)
    return [f"{line}: {told}" if told else line, *(f"{'':<14}{paragraph}" for paragraph in more)]


def _commands(result: Result, place: str, again: str) -> list[str]:
    """What to type next about a cell."""
    explain = f"shardproof explain {result.id}{place}"
    return [f"    replay: {result.replay}{place}{again}", f"    explain: {explain}"]


def _not_compared(trainer: Described, results: Sequence[Result]) -> list[str]:
    """What no arm could compare, and what the run without a break does that is seldom meant, each once with the number
    of cells."""
    every = [(arm, note) for result in results for arm in result.arms for note in arm.left_out]
    odd = Counter(note for arm, note in every if arm.name == TRAINS)
    left = Counter(f"{arm.name}: {note}" for arm, note in every if arm.name != TRAINS)
    odd.update(
        f"{axis}: all of its values come to the same parameters in every step, bit for bit: right of what concerns "
        f"checkpoints alone, and otherwise {_where_it_ends(axis, results)}"
        for axis in _without_effect(trainer, results)
    )
    return [*_counted("worth a look, and not judged:", odd), *_counted("what was not compared:", left)]


def _where_it_ends(axis: str, results: Sequence[Result]) -> str:
    """What becomes of the value of an axis that has no effect, in the last cell that tells."""
    begins = f"{READS}: {axis}: "
    told = [line.removeprefix(begins) for result in results for line in result.state if line.startswith(begins)]
    unknown = "nothing in a step reads it, or what reads it does not come to anything else"
    return f"look at what its value ends in: {told[-1]}" if told else unknown


def _without_effect(trainer: Described, results: Sequence[Result]) -> Iterator[str]:
    """Axes of which all values come to the same parameters after each step, whatever the other axes are."""
    ends = [({**values_of(trainer, result.scenario)}, result.scenario.program, line) for result in results
            for line in result.state if line.startswith(f"{ENDS}: ")]  # fmt: skip
    for axis in trainer.axes:
        cells: dict[tuple[str, ...], dict[str, str]] = {}
        for values, program, line in ends:
            others = program, *(text for name, text in sorted(values.items()) if name != axis)
            cells.setdefault(others, {})[values.get(axis, "")] = line
        several = [own for own in cells.values() if len(own) > 1]
        if (
            axis != MESH_AXIS
            and axis not in trainer.alike
            and several
            and all(len({*own.values()}) == 1 for own in several)
        ):
            yield axis


def _counted(heading: str, told: Mapping[str, int]) -> list[str]:
    lines = [f"  {note}{f' ({number} cells)' if number > 1 else ''}" for note, number in told.items()]
    return [heading, *lines, ""] if lines else []
