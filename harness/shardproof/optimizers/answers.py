"""The questions asked of an optimizer, the cells that answer each, and the answer that an arm gives. No torch.

A question is answered by one arm of one cell of scenarios/trainers/optimizers.py, or by several in turn, of which the
first that is no yes decides. For example, *position* is asked of the cell in which each tensor is cut into the rows of
the ranks, by its arm `alike way`, and then of the cell in which tensors are turned around.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardproof.result import ArmResult, Failure, Result
from shardproof.trainer.arms import ALIKE, OTHER, RESUMED, WHOLE
from shardproof.trainer.values.wording import AGREE, ROUNDED
from shardproof.verdict import ExitStatus, Verdict

STEPS, LOADS, LOADS_ELSEWHERE = "arms 4 0 alike", "arms 2 1 resumed", "arms 2 1 resumed other-mesh"
"""Programs of cells: four steps and no save; a save between two steps and one."""


@dataclass(frozen=True)
class Asking:
    """One arm of one cell, which answers a question or a part of one.

    * told: what is compared, for a reader. cell: the axes of the trainer that are not at their first value.
    * arm: the beginning of the arm's name. program: of the scenario.
    * needs_steps: asked only of an optimizer whose sharded steps equal whole ones.
    * rounds: whether what another order of sums makes counts for nothing.
    """

    told: str
    cell: Mapping[str, str]
    arm: str
    program: str = STEPS
    needs_steps: bool = False
    rounds: bool = False


SHARDED, TWO, TENSOR = {"way": "sharded"}, {"groups": "two"}, {"lr": "tensor", "halved": "true"}
_WAY = f"{ALIKE} way"

QUESTIONS: dict[str, tuple[str, tuple[Asking, ...]]] = {
    "sharded": (
        "sharded steps equal unsharded ones",
        (Asking("on the ranks against whole tensors", SHARDED, _WAY),),
    ),
    "position": (
        "an element's update does not depend on where it lies",
        (
            Asking("whole tensors, cut into the ranks' rows", {"way": "cut"}, _WAY),
            Asking("whole tensors, the last element first", {"way": "reversed"}, _WAY),
        ),
    ),
    "few_rows": (
        "a parameter with fewer rows than ranks",
        (Asking("on the ranks against whole tensors", {**SHARDED, "model": "optimizer_few_rows"}, _WAY),),
    ),
    "state_dict": (
        "state_dict and load_state_dict",
        (Asking("whole tensors, torch.save and torch.load", {}, RESUMED, LOADS),),
    ),
    "dcp": (
        "a DCP checkpoint, loaded on the same mesh",
        (Asking("loaded on the same mesh", SHARDED, RESUMED, LOADS_ELSEWHERE),),
    ),
    "reshard": (
        "a DCP checkpoint, loaded on another world size",
        (Asking("loaded on another world size", SHARDED, OTHER, LOADS_ELSEWHERE),),
    ),
    "offload": (
        "CPUOffloadPolicy",
        (Asking("offloaded against not offloaded", {**SHARDED, "offload": "true"}, f"{ALIKE} offload"),),
    ),
    "bf16": (
        "bf16 parameters",
        (Asking("on the ranks against whole tensors", {**SHARDED, "dtype": "bf16"}, _WAY),),
    ),
    "groups": (
        "param groups with settings of their own",
        (
            Asking("two groups against two optimizers, on whole tensors", {**TWO, "apart": "true"}, f"{ALIKE} apart"),
            Asking("two groups, on the ranks against whole tensors", {**SHARDED, **TWO}, _WAY, needs_steps=True),
            Asking("two groups, loaded on the same mesh", {**SHARDED, **TWO}, RESUMED, LOADS),
        ),
    ),
    "tensor_lr": (
        "a learning rate that is a tensor",
        (
            Asking("a tensor against a number, on whole tensors", TENSOR, f"{ALIKE} lr", rounds=True),
            Asking("a tensor, on the ranks against whole tensors", {**SHARDED, **TENSOR}, _WAY, needs_steps=True),
            Asking("a tensor, loaded on the same mesh", {**SHARDED, **TENSOR}, RESUMED, LOADS),
        ),
    ),
}
"""Question → what is true where the answer is yes, and what is asked in turn."""

OF_WHOLE_TENSORS = ("position", "state_dict")
"""Questions about whole tensors alone."""

KEEPS_NOTHING = "it keeps no state"
"""What the trainer says in the place of a save, where there is nothing to save."""


class Answer(Enum):
    """What one question came to.

    `refuses`: the optimizer says by an error of its own that it does not do this. `nothing to compare`: it keeps no
    state, and empty never equals anything. `cannot be asked`: it fails, or needs something else, before the question.
    `unknown`: an error of ours, or an answer that did not come again in fresh ranks.
    """

    YES = "yes"
    NO = "no"
    REFUSES = "refuses"
    NOTHING = "nothing to compare"
    CANNOT = "cannot be asked"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class AnsweredQuestion:
    """The answer to a question. why: one sentence; empty for a plain yes. rounding: a no whose differences are all as
    small as another order of addition makes them. failed: a run ended with an error. traceback: of the rank that raised
    it, if one did."""

    question: str
    answer: Answer
    why: str = ""
    rounding: bool = False
    failed: bool = False
    traceback: str = ""

    @property
    def said(self) -> str:
        """The answer in the words of reports."""
        return "no (rounding)" if self.rounding else self.answer.value

    @property
    def steps(self) -> bool:
        """Of the first question: whether the optimizer steps on sharded parameters at all."""
        return self.answer is Answer.YES or (self.answer is Answer.NO and not self.failed)

    def to_json(self) -> dict[str, Any]:
        return {"question": self.question, "answer": self.said, "why": self.why, "traceback": self.traceback}


def exit_status(found: Iterable[AnsweredQuestion]) -> ExitStatus:
    """3 with an unknown, 1 with a no, 0 with a yes, 4 where nothing could be asked."""
    answers = {one.answer for one in found}
    if Answer.UNKNOWN in answers:
        return ExitStatus.HARNESS
    if Answer.NO in answers:
        return ExitStatus.FAILURE
    return ExitStatus.OK if Answer.YES in answers else ExitStatus.NOTHING_RUN


def answer_of(
    question: str, asking: Asking, result: Result, home: str, *, steps_count: bool = True
) -> AnsweredQuestion:
    """What a cell answers.

    Args:
        home: folder or file of the optimizer's own code. steps_count: whether the steps after a load on another mesh
            count: not where sharded steps are others than whole ones anyway.
    """
    if result.verdict in (Verdict.UNKNOWN, Verdict.NONDETERMINISTIC) or not result.arms:
        why = result.reason.split("\n", 1)[0] or "it did not come again in fresh ranks"
        return AnsweredQuestion(question, Answer.UNKNOWN, f"{asking.told}: {why}")
    arm = _arm_of(asking, result)
    why = f"{asking.told}: {_shortened(arm.sentence)}"
    match Verdict(arm.verdict):
        case Verdict.PASS:
            rounding = next((note for note in arm.notes if note.startswith(ROUNDED)), "")
            forgiven = asking.rounds or (asking.arm == OTHER and not steps_count)
            if rounding and not forgiven:
                return AnsweredQuestion(question, Answer.NO, f"{asking.told}: {rounding}", rounding=True)
            return AnsweredQuestion(question, Answer.YES)
        case Verdict.UNSUPPORTED if arm.sentence == KEEPS_NOTHING:
            return AnsweredQuestion(question, Answer.NOTHING, KEEPS_NOTHING)
        case Verdict.UNSUPPORTED:
            return AnsweredQuestion(question, Answer.CANNOT, why)
        case Verdict.MISMATCH if asking.arm == OTHER and not steps_count and not _at_the_load(arm, result):
            return AnsweredQuestion(question, Answer.YES)
        case Verdict.MISMATCH:
            return AnsweredQuestion(question, Answer.NO, why)
    refuses = result.error is not None and is_statement(result.error, home)
    traceback = result.error.traceback if result.error else ""
    return AnsweredQuestion(question, Answer.REFUSES if refuses else Answer.NO, why, failed=True, traceback=traceback)


def _arm_of(asking: Asking, result: Result) -> ArmResult:
    """The arm that answers. Of several, such as one for each other mesh, the first that is no pass. Where the run did
    not come so far, the one that ended it. Where ranks are compared with whole tensors, ranks that disagree are a no as
    well; other questions do not count that a second time."""
    passed: ArmResult | None = None
    for arm in result.arms:
        if arm.name.startswith(asking.arm):
            if arm.verdict != Verdict.PASS.value:
                return arm
            passed = arm
    named = {arm.name: arm for arm in result.arms}
    if passed is None:
        return named[WHOLE]
    return named.get(AGREE, passed) if asking.arm == _WAY else passed


def _at_the_load(arm: ArmResult, result: Result) -> bool:
    """Whether an arm's differences are there right after the load."""
    return any(result.operations[d.key.op] == (arm.name, "load") for d in result.differences)


MOST_OF_A_SENTENCE = 400
_OUR_PLACE = re.compile(r" \(optimizers\.py, line \d+\)")


def _shortened(sentence: str) -> str:
    """A sentence in one line, without the place in the trainer that asks; some messages of libraries are pages long."""
    line = " ".join(_OUR_PLACE.sub("", sentence).split())
    return line if len(line) <= MOST_OF_A_SENTENCE else f"{line[:MOST_OF_A_SENTENCE]}…"


_STATES = re.compile(
    r"(not|n't|un|only)[ -]?(currently |yet |be )?support|not (yet )?implemented|not allowed|only works|requires? ",
    re.IGNORECASE,
)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line \d+, in .*(?:\n +(?P<line>.*))?', re.MULTILINE)


def is_statement(failure: Failure, home: str) -> bool:
    """Whether an error is the optimizer's own word that it does not do what was asked of it: it was raised in the
    optimizer's own code, and is a NotImplementedError, says that something is not supported, or refuses what its
    constructor was given.

    Args:
        home: folder or file of the optimizer's own code.
    """
    frames = list(_FRAME.finditer(failure.traceback))
    if not frames or not frames[-1]["file"].startswith(home):
        return False
    if failure.type == "NotImplementedError" or _STATES.search(failure.message):
        return True
    raised = (frames[-1]["line"] or "").startswith("raise ")
    return raised and any(frame["line"] and "self.cls(" in frame["line"] for frame in frames)
