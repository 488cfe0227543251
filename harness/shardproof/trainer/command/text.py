"""What the arms of a command say, in whole plain sentences, and what `shardproof trainer --command` prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.codec import to_plain
from shardproof.compare.differences import EntryDifference
from shardproof.compare.text import WORDS
from shardproof.errors import printable
from shardproof.result import ArmResult
from shardproof.trainer.command.asked import AskedCommand
from shardproof.trainer.command.checkpoints import Checkpoint, Compared, Pointer
from shardproof.trainer.command.process import last_lines, places_in
from shardproof.trainer.command.runs import WRITTEN_BY, Ran
from shardproof.trainer.report.text import SIGNS
from shardproof.verdict import Verdict, merge

UNSEEN = (
    "state that is in no checkpoint, such as random states that nobody saves; whatever every run does in the same "
    "wrong way"
)
"""What no command can show, which every result says."""
ALL_UNSTEADY = "not compared: what there is to compare is not deterministic"
NO_CUT = "not compared: the run that stops early left nothing to resume from"
ANOTHER_CUT = "not compared: the run that stops early is not the beginning of the whole run, and may end elsewhere"
NOT_SEEN = "nobody can say whether the resumed run reads the checkpoint, since it is in a format that nobody can change"
BEGINS_ANEW = (
    "The resumed run does not read the checkpoint: it comes to the same end when every tensor in the checkpoint has "
    "another value. It trains from the beginning again, so that no resume was seen. Does the command need an option to "
    "resume? Put {resume} into it, and give the option with --resume."
)
INEXACT = (
    "compared are names, shapes and counts of steps: on another number of ranks, sums have another order, and ranks "
    "may get other data"
)
_TELLING = ("step", "scheduler", "exp_avg", "momentum", "param")
"""Roles whose first difference says most about what was lost."""
BOTH_TIMES = (Verdict.CRASH.value, Verdict.HANG.value)
"""Verdicts of a run that an arm has only where a second run failed in the same way."""
MOST_NAMED = 3


def of_failure(name: str, ran: Ran) -> ArmResult:
    """The verdict of an arm whose run failed."""
    if ran.status is None:
        told = f"The run did not come to an end within {ran.seconds:.0f} s, and was killed. {_of_hang(ran.log)}"
        return ArmResult(name, Verdict.HANG.value, told)
    how = f"exit status {ran.status}" if ran.status > 0 else f"signal {-ran.status}"
    told = f"The run ended with {how}, and said last: {printable(ran.said_last)}. Its output: {ran.log}"
    return ArmResult(name, Verdict.CRASH.value, told)


def not_changed(why: str) -> str:
    """A note on a checkpoint whose values a reader refuses to change, with the reader's reason."""
    return f"nobody can say whether the resumed run reads the checkpoint, since its values cannot be changed ({why})"


def _of_hang(log: Path) -> str:
    """Where the processes of a killed run were, and the last line that the run printed."""
    places = places_in(log)
    where = f"Its processes were in {_shortened(places)}. " if places else ""
    said = last_lines(log)
    if not said:
        return f"{where}It printed nothing: {log} is empty{' but for stacks' if places else ''}."
    return f"{where}It printed last: {printable(said[-1].strip())}. Its output: {log}"


def came_once(first: ArmResult, second: ArmResult) -> ArmResult:
    """The verdict of a failure where a second try of the same run showed no failure, or another kind of failure."""
    again = f"A second try came to another failure, {second.verdict}. {second.sentence}"
    if not Verdict(second.verdict).is_failure:
        passed = second.verdict == Verdict.PASS.value
        again = "It did not come again in a second try."
        again = again if passed else f"{again} That one has no verdict. {second.sentence}"
    return replace(first, verdict=Verdict.NONDETERMINISTIC.value, sentence=f"{first.sentence.rstrip('.')}. {again}")


def of_unsteady(found: Sequence[EntryDifference]) -> str:
    """What two equal runs do not do in the same way."""
    return (
        f"The command is not deterministic: two whole runs end with other checkpoints. {_what(found)} differ. A seed "
        "that the script does not set, or threads, are the likely reason. Nothing else is claimed of what differs."
    )


def moving(found: Sequence[EntryDifference]) -> tuple[str, ...]:
    """Plain values that two runs have differently, such as a time."""
    names = [one.name for one in found]
    return (f"not compared, since two whole runs have other plain values there: {_shortened(names)}",) if names else ()


def of_numbers(who: str, observed: int | None, expected: int | None) -> str:
    """A run whose newest checkpoint has another number."""
    return f"{who} ends with {_numbered(observed)}, and the whole run with {_numbered(expected)}."


def _numbered(number: int | None) -> str:
    return "a checkpoint without a number" if number is None else f"checkpoint {number}"


def no_such_step(step: int, kept: Sequence[Checkpoint]) -> str:
    """Why the run that stops early is not compared with one of those that the whole run kept."""
    numbers = [str(one.number) for one in kept if one.number is not None]
    if numbers:
        names = f"checkpoint{'s' * (len(numbers) > 1)} {_shortened(numbers)}"
    else:
        names = f"{_shortened([path.name for one in kept for path in one.paths])} as it was at the end"
    return f"not compared: the whole run kept {names}, and no checkpoint of step {step}"


def leads_elsewhere(pointers: Sequence[Pointer], newest: Checkpoint) -> tuple[str, ...]:
    """Notes on pointers, such as `latest`, that lead to another checkpoint than the newest one of a run."""
    return tuple(
        f"{one.name} leads to {one.target}{'' if one.is_there else ', which is not there'}, "
        f"and the newest checkpoint is {newest.path.name}: a run that follows {one.name} does not resume from what is "
        "compared here"
        for one in pointers
    )


def stands_still(earlier: Checkpoint, later: Checkpoint, found: Sequence[tuple[str, str, int]]) -> tuple[str, ...]:
    """Notes on tensors that training should change, and which are equal in two checkpoints of one run.

    Args:
        found: file, role, and how many tensors that is; see `unchanged`.
    """
    return tuple(
        f"between checkpoints {earlier.number} and {later.number} of the whole run no {role} in {file} changes "
        f"({count} tensor{'s' * (count > 1)})"
        for file, role, count in found
    )


def nothing_to_resume(cut: int, ran: Ran) -> str:
    """A run that stops early without a checkpoint."""
    return (
        f"With {{until}}={cut} the command left no checkpoint. Let it save more often, or give --steps with a larger "
        f"first number. Its output: {ran.log}"
    )


def is_until(one: EntryDifference, asked: AskedCommand) -> bool:
    """Whether a plain value is nothing but `{until}`, as a checkpoint with the script's own arguments has it."""
    return one.kind == "value" and shown(one) == (str(asked.whole), str(asked.cut))


def until_itself(found: Sequence[EntryDifference]) -> tuple[str, ...]:
    """Values that the command line gives."""
    names = [one.name for one in found]
    return (f"not compared, since it is {{until}} itself: {_shortened(names)}",) if names else ()


def of_cut(found: Sequence[EntryDifference], asked: AskedCommand) -> str:
    """A run that stops early, and did other things before."""
    return (
        f"The run that stops at {asked.cut} is not the beginning of the one that stops at {asked.whole}: "
        f"{_what(found)} differ at step {asked.cut}. {_first(found)} Does a schedule depend on {{until}}?"
    )


def of_late(found: Sequence[EntryDifference], asked: AskedCommand) -> str:
    """A whole run whose early checkpoint holds a later state than the cut run saved."""
    one = _telling(found)
    late, early = shown(one)
    told = f" {one.role} of {one.name} is {late} there, and {early} in that of the run that stops." if early else ""
    return (
        f"Checkpoint {asked.cut} of the run that goes on to {asked.whole} holds a later state than the run that stops "
        f"at {asked.cut} saved: {_what(found)} differ.{told} Look at a save that goes on after it has returned, and at "
        "tensors that it takes without a copy."
    )


def are_later(found: Sequence[EntryDifference], cut: int) -> bool:
    """Whether optimizers have counted more steps in the first of two checkpoints than in the second, and that as many
    as there were."""
    try:
        counts = [[float(text) for text in shown(one)] for one in found if one.role == "step"]
    except ValueError:
        return False
    return bool(counts) and all(early == cut < late for late, early in counts)


def of_resumed(found: Sequence[EntryDifference], asked: AskedCommand) -> str:
    """What a resumed run has lost."""
    steps = [one for one in found if one.role == "step" and one.kind in ("bits", "value")]
    told = (
        f"Cut at {asked.cut} and resumed, the run ends with another checkpoint than without a break: "
        f"{_what(found)} differ."
    )
    if steps and all(_begins_anew(one, asked.cut) for one in steps):
        return f"{told} The optimizer has begun again at step 1: the resume did not restore its state. {_first(found)}"
    return f"{told} {_first(found)}"


def of_last(found: Sequence[EntryDifference]) -> str:
    """How the last checkpoint of a run differs from the one that it should be."""
    return f"It ends with another checkpoint: {_what(found)} differ. {_first(found)}"


def shown(one: EntryDifference) -> tuple[str, str]:
    """A value, or the first that differs, as it should be and as it is: `4` of `4 (0x40800000)` and of `4 (int)`."""
    expected, observed = (text.rpartition(" (")[0] or text for text in (one.first_a or one.a, one.first_b or one.b))
    return expected, observed


def _begins_anew(one: EntryDifference, cut: int) -> bool:
    """Whether a count of steps lacks those before the cut."""
    try:
        expected, observed = map(float, shown(one))
    except ValueError:
        return False
    return expected == observed + cut


def _what(found: Sequence[EntryDifference]) -> str:
    """What differs, by role: `exp_avg of 4 values, param of model.weight`."""
    roles: dict[str, list[str]] = {}
    for one in found:
        roles.setdefault(one.role, []).append(one.name)
    return ", ".join(
        f"{role} of {names[0]}" if len(names) == 1 else f"{role} of {len(names)} values"
        for role, names in sorted(roles.items())
    )


def _telling(found: Sequence[EntryDifference]) -> EntryDifference:
    """The difference that says most."""
    order = {role: place for place, role in enumerate(_TELLING)}
    return min(found, key=lambda each: order.get(each.role, len(order)))


def _first(found: Sequence[EntryDifference]) -> str:
    """The difference that says most, in words."""
    one = _telling(found)
    what = f"{one.role} of {one.name}"
    if one.kind in ("missing", "extra"):
        return f"{what} is {'not there' if one.kind == 'missing' else 'there, and should not be'}."
    if one.detail:
        return f"{what}: {one.detail}."
    where = " in its first wrong element" if one.kind == "bits" and one.total > 1 else ""
    expected, observed = shown(one)
    return f"{what} is {observed}{where}, and should be {expected} ({WORDS[one.kind]})."


def unread(names: Sequence[str]) -> tuple[str, ...]:
    """A note on files of an unknown format with other bytes."""
    return (f"not compared, since no reader knows the format: {_shortened(names)}",) if names else ()


def not_read(found: Compared) -> str:
    """Why files of an unknown format have no verdict."""
    names = _shortened(found.unread)
    return (
        f"not compared: other bytes in {names}, and no reader knows the format ({found.why}); a trainer class loads "
        "them with their own code (docs/trainer.md)"
    )


def by_bytes(found: Compared) -> str:
    """How files of an unknown format were compared."""
    return f"all bytes are equal; no reader knows the format ({found.why})"


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def led_by_failures(arms: Iterable[ArmResult]) -> list[ArmResult]:
    """The arms in the order of a report: first each arm whose run crashed or hung in both tries."""
    return sorted(arms, key=lambda arm: arm.verdict not in BOTH_TIMES)


def verdict_of(arms: Iterable[ArmResult]) -> Verdict:
    """The verdict of a command: a run that failed in both tries before all else, a failure before what nobody can say,
    and a pass only where an arm passed."""
    verdicts = [Verdict(arm.verdict) for arm in arms]
    if both := [verdict for verdict in verdicts if verdict.value in BOTH_TIMES]:
        return merge(both)
    failed = [verdict for verdict in verdicts if verdict.is_failure]
    return merge(failed or [verdict for verdict in verdicts if verdict is not Verdict.UNSUPPORTED] or verdicts)


def diff_of(differing: Compared) -> str:
    """The command that lists every difference between the two checkpoints of an arm."""
    return shlex.join(["shardproof", "diff", *map(str, differing.sides)])


def render(arms: Sequence[ArmResult], whole: Ran, differing: Mapping[str, Compared]) -> str:
    """The whole text.

    Args:
        differing: arm → what differs in the two checkpoints that it compared.
    """
    lines = [f"{SIGNS[Verdict(arm.verdict)]:<9} {arm.name}{': ' if arm.sentence else ''}{arm.sentence}" for arm in arms]
    told = [f"  {arm.name}: {note}" for arm in arms for note in arm.notes]
    if not whole.ended_well:
        end = last_lines(whole.log) or ["(it printed nothing)"]
        lines += ["", f"the end of {whole.log}:", *(f"  {line}" for line in end)]
    if differing:
        lines += ["", "everything that differs:", *(f"  {name}: {diff_of(one)}" for name, one in differing.items())]
    if told:
        lines += ["", "what was not compared:", *told]
    lines += ["", f"what no run of a command shows: {UNSEEN}"]
    return "".join(f"{printable(line)}\n" for line in lines)


def document(asked: AskedCommand, arms: Sequence[ArmResult], seconds: Mapping[str, float], out: Path) -> dict[str, Any]:
    """The results in JSON types."""
    return {
        "written_by": WRITTEN_BY, "command": asked.text, "steps": [asked.cut, asked.whole],
        "world": list(asked.worlds), "resume": asked.resume, "verdict": verdict_of(arms).value if arms else "",
        "arms": to_plain(tuple(arms)), "runs_s": dict(seconds), "logs": str(out / "logs"), "unseen": UNSEEN,
    }  # fmt: skip
