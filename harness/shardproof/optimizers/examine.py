"""Runs the arms for an optimizer, compares them, and derives the answer to every question.

The run on whole tensors comes first. Where it fails, nothing can be asked, since sharding has no part in it. Then
comes the first question, whose answer decides about the others: an optimizer that does not step on sharded parameters
cannot be asked what becomes of its checkpoints; of one whose sharded steps are others than whole ones, other questions
do not count that a second time.

A *no* is asked once more in fresh ranks, and counts if it comes again in the same words.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardproof.errors import HarnessError, UsageError
from shardproof.laboratory.laboratory import Laboratory, scratch_folder
from shardproof.laboratory.run_verdict import ranks_verdict
from shardproof.optimizers import arms
from shardproof.optimizers.answers import QUESTIONS, Answer, AnsweredQuestion, of_deviations, of_failure
from shardproof.optimizers.arms import LOAD, SAVE, SAVED, ArmRun
from shardproof.optimizers.models import FEW_ROWS, LAYERS, MATRICES
from shardproof.optimizers.request import ARGUMENT_FORM, FORM, Asked
from shardproof.result import Failure
from shardproof.scenario import Mesh

COMPARED = ("param", "state", "own", "setting")
STEPPED = ((1, 1), (2, 2), (3, 3), (4, 4))
"""Operations of `arms.STEPS` after which two runs are compared, each with the same one of the other."""

SAVING = ((1, 1), (2, 2), (3, 4))
"""The same of a run of `arms.STEPS` and one of `arms.SAVED`, whose third step comes after the save."""

STATE_AFTER = 2
"""Operation of `arms.SAVED` before the save: what there is to compare after a load."""

UNSHARDED = "it does not step on sharded parameters (the first question)"


@dataclass(frozen=True)
class Run:
    """What became of a trial: the ranks' observation files, and the error that ended it."""

    files: tuple[str, ...]
    failure: Failure | None


class Examination:
    """The questions about one optimizer. A context; its folder is removed at the end.

    `about` is what `rank.trial` says of the class, `model` the one that it is tried on.

    Args:
        ranks: the mesh that shards. keep: folder that receives the logs of ranks that failed.
    """

    def __init__(self, laboratory: Laboratory, asked: Asked, ranks: Mesh, jobs: int = 1, keep: Path | None = None):
        self.laboratory, self.asked, self.ranks, self.jobs, self.keep = laboratory, asked, ranks, jobs, keep
        self.about: dict[str, Any] = {}
        self.model = LAYERS
        self.facts: dict[str, float] = {}
        self.not_compared: set[str] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="shardproof-optimizer-", dir=scratch_folder()))
        self._runs: dict[ArmRun, Run] = {}
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def answers(self) -> Iterator[AnsweredQuestion]:
        """The answer to every question, in order.

        Raises:
            UsageError: the class cannot be imported, is no optimizer, or does not take what it was given.
            HarnessError: a server of ours failed.
        """
        self._look()
        reason = self._cannot()
        if reason:
            yield from (AnsweredQuestion(question, Answer.CANNOT, reason) for question in QUESTIONS)
            return
        stepping = self._confirmed("sharded", None)
        yield stepping
        held = _steps(stepping)
        self._run_ahead(held)
        for question in list(QUESTIONS)[1:]:
            yield self._confirmed(question, stepping)

    # What is asked before the questions

    def _look(self) -> None:
        request = {"path": self.asked.path, "arguments": self.asked.arguments}
        self.about = self.laboratory.ask("shardproof.optimizers.rank.trial:serve", request)
        if wrong := self.about.get("wrong"):
            form = FORM if wrong["what"] != "--arg" else f"{FORM} {ARGUMENT_FORM}"
            raise UsageError.of(wrong["what"], wrong["given"], wrong["allowed"], form)

    def _cannot(self) -> str:
        """Why nothing can be asked; empty where it can. Finds the model that the optimizer takes."""
        if self.about["closure"]:
            return "its step needs a closure that computes the loss, more than once in a step"
        failures = []
        for model in (LAYERS, MATRICES):
            self.model = model
            failure = self._run(self._unsharded_run).failure
            if failure is None:
                return ""
            failures.append(failure)
        self.model, first = LAYERS, failures[0]
        if self.asked.arguments and all(failure.op == 0 for failure in failures):
            given = " ".join(f"{name}={text}" for name, text in self.asked.arguments)
            allowed = f"what the constructor of {self.asked.name} takes ({first.type}: {first.message})"
            raise UsageError.of("--arg", given, allowed, f"{FORM} {ARGUMENT_FORM}")
        told = of_failure("", first, "it fails on whole tensors in one process already", self.about["home"])
        return told.why

    # Trials

    @property
    def _unsharded_run(self) -> ArmRun:
        return arms.first(self.asked, self.ranks, self.model)

    @property
    def _sharded(self) -> ArmRun:
        return self._unsharded_run.but(whole=False)

    def _trials(self, held: bool) -> list[ArmRun]:
        """The runs behind all questions but the first. held: whether the optimizer steps on sharded parameters."""
        whole, sharded = self._unsharded_run, self._sharded
        found = [whole.but(arrangement="cut"), whole.but(arrangement="reversed"), whole.but(program=SAVED)]
        if held:
            found += [*self._few_rows(), *self._loading(), *self._bf16(), *self._tensor_lr(), _offloaded(sharded)]
            found += self._groups()
        return found

    def _few_rows(self) -> tuple[ArmRun, ArmRun]:
        return self._unsharded_run.but(model=FEW_ROWS), self._sharded.but(model=FEW_ROWS)

    def _loading(self) -> list[ArmRun]:
        saved = self._sharded.but(program=SAVED)
        return [saved, saved.under(load=arms.loaded_elsewhere(self.ranks))]

    def _bf16(self) -> tuple[ArmRun, ArmRun]:
        return self._unsharded_run.under(dtype="bf16"), self._sharded.under(dtype="bf16")

    def _groups(self) -> list[ArmRun]:
        whole = self._unsharded_run.but(groups="two", program=SAVED)
        return [whole.but(groups="apart", program=arms.STEPS), whole, whole.but(whole=False)]

    def _tensor_lr(self) -> list[ArmRun]:
        tensor = self._unsharded_run.but(lr="tensor", halves=True)
        return [tensor.but(lr="float"), tensor, tensor.but(whole=False, program=SAVED)]

    def _run_ahead(self, held: bool) -> None:
        """Have the runs done side by side, where there are jobs for it; questions find them done."""
        if self.jobs > 1:
            with ThreadPoolExecutor(self.jobs) as pool:
                list(pool.map(self._run, self._trials(held)))

    def _run(self, trial: ArmRun) -> Run:
        if trial not in self._runs:
            self._runs[trial] = self._run_anew(trial)
        return self._runs[trial]

    def _run_anew(self, trial: ArmRun) -> Run:
        self._count += 1
        folder = self._folder / f"{self._count}-{trial.scenario.id}"
        folder.mkdir()
        trial.arm.write(folder)
        outcomes = self.laboratory.run_ranks(trial.scenario, folder)
        _, failure = ranks_verdict(outcomes)
        if failure and self.keep:
            for log in folder.glob("*.log"):
                (self.keep / folder.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(log, self.keep / folder.name)
        return Run(tuple(str(path) for outcome in outcomes for path in outcome.observations), failure)

    # Questions

    def _confirmed(self, question: str, stepping: AnsweredQuestion | None) -> AnsweredQuestion:
        """An answer; a no, or a refusal, after it came a second time, in fresh ranks."""
        try:
            first = self._answer(question, stepping)
            if first.answer is not Answer.NO:
                return first
            kept, self._runs = self._runs, {}
            try:
                second = self._answer(question, stepping)
            finally:
                self._runs = kept
        except HarnessError as error:
            return AnsweredQuestion(question, Answer.UNKNOWN, f"an error of shardproof's own: {error}")
        if (first.said, first.why) == (second.said, second.why):
            return first
        return AnsweredQuestion(
            question, Answer.UNKNOWN, f"it did not come again in fresh ranks. {first.why}; then {second.why}"
        )

    def _answer(self, question: str, stepping: AnsweredQuestion | None) -> AnsweredQuestion:
        if stepping is not None and not _steps(stepping) and question not in UNSHARDED_QUESTIONS:
            return AnsweredQuestion(question, Answer.CANNOT, UNSHARDED)
        alike = stepping is None or stepping.answer is Answer.YES
        found: AnsweredQuestion = getattr(self, f"_ask_{question}")(*((alike,) if question in FORGIVING else ()))
        return replace(found, question=question)

    def _ask_sharded(self) -> AnsweredQuestion:
        found = self._twins(self._unsharded_run, self._sharded)
        cut = self._run(self._unsharded_run.but(arrangement="cut"))
        if found.answer is not Answer.NO or found.rounding or found.failed or cut.failure:
            return found
        reply = self._asked(cut.files, self._run(self._sharded).files, STEPPED, ("param",), {})
        alike = all(deviation["rounding"] for deviation in reply["deviations"])
        return replace(found, why=f"{found.why}. {OWN_TENSORS}") if alike else found

    def _ask_position(self) -> AnsweredQuestion:
        for arrangement, told in (("cut", "cut into the ranks' rows"), ("reversed", "the last element first")):
            other = self._unsharded_run.but(arrangement=arrangement)
            if failure := self._run(other).failure:
                return of_failure("", failure, told, self.about["home"])
            reply = self._compare(self._unsharded_run, other, STEPPED, ("param",))
            if found := of_deviations("", reply, f"whole tensors, {told}"):
                return found
        return AnsweredQuestion("", Answer.YES)

    def _ask_few_rows(self) -> AnsweredQuestion:
        return self._twins(*self._few_rows())

    def _ask_state_dict(self) -> AnsweredQuestion:
        return self._resumed(self._unsharded_run.but(program=SAVED), "one process, torch.save and torch.load")

    def _ask_dcp(self) -> AnsweredQuestion:
        return self._resumed(self._loading()[0], "loaded on the same mesh")

    def _ask_reshard(self, alike: bool) -> AnsweredQuestion:
        return self._resumed(self._loading()[1], "loaded on another world size", then=alike)

    def _ask_offload(self) -> AnsweredQuestion:
        return self._twins(self._sharded, _offloaded(self._sharded), "offloaded against not offloaded")

    def _ask_bf16(self) -> AnsweredQuestion:
        return self._twins(*self._bf16())

    def _ask_groups(self, alike: bool) -> AnsweredQuestion:
        """Two groups do what two optimizers with these settings do; sharded they do the same; a checkpoint keeps
        their settings apart."""
        apart, whole, saved = self._groups()
        told = "two groups against two optimizers, on whole tensors"
        first = self._twins(apart, whole, told, ("param", "state"), pairs=SAVING)
        if first.answer is not Answer.YES:
            return first
        if alike:
            told, stepped = "two groups, on the ranks against whole tensors", ((1, 1), (2, 2), (4, 4))
            second = self._twins(whole, saved, told, pairs=stepped)
            if second.answer is not Answer.YES:
                return second
        third = self._resumed(saved, "two groups, loaded on the same mesh", ("param", "state", "own", "setting"))
        return AnsweredQuestion("", Answer.YES) if third.answer is Answer.NOTHING else third

    def _ask_tensor_lr(self, alike: bool) -> AnsweredQuestion:
        """A tensor does what the number does, also after a schedule changed it; sharded too; a checkpoint keeps it."""
        number, whole, saved = self._tensor_lr()
        first = self._twins(number, whole, "a tensor against a number, on whole tensors", ("param",), forgiving=True)
        if first.answer is not Answer.YES:
            return first
        if alike:
            told = "a tensor, on the ranks against whole tensors"
            second = self._twins(whole, saved, told, pairs=SAVING)
            if second.answer is not Answer.YES:
                return second
        third = self._resumed(saved, "a tensor, loaded on the same mesh")
        return AnsweredQuestion("", Answer.YES) if third.answer is Answer.NOTHING else third

    # Comparisons

    def _twins(
        self, left: ArmRun, right: ArmRun, told: str = "on the ranks against whole tensors",
        roles: Sequence[str] = COMPARED, *, pairs: Sequence[tuple[int, int]] = STEPPED, forgiving: bool = False,
    ) -> AnsweredQuestion:  # fmt: skip
        """Whether two runs do the same after every step."""
        for trial in (left, right):
            if failure := self._run(trial).failure:
                where = "whole tensors" if trial.arm.whole else "on the ranks"
                return of_failure("", failure, f"{where}, {_at(trial, failure)}", self.about["home"])
        reply = self._compare(left, right, pairs, roles)
        if not reply["compared"]:
            return AnsweredQuestion("", Answer.NOTHING, "no step was completed")
        return of_deviations("", reply, told, forgiving=forgiving) or AnsweredQuestion("", Answer.YES)

    def _resumed(
        self, trial: ArmRun, told: str, roles: Sequence[str] = COMPARED, *, then: bool = True
    ) -> AnsweredQuestion:
        """Whether a load restores what was there after the save, and, with `then`, whether the step after it does what
        it did without."""
        run = self._run(trial)
        if failure := run.failure:
            return of_failure("", failure, f"{told}, {_at(trial, failure)}", self.about["home"])
        if not self._compare(trial, trial, ((STATE_AFTER, STATE_AFTER),), roles)["states"]:
            return AnsweredQuestion("", Answer.NOTHING, "it keeps no state")
        loaded = of_deviations("", self._compare(trial, trial, ((SAVE, LOAD),), roles), f"{told}, after the load")
        if loaded:
            return replace(loaded, rounding=False)  # a load adds nothing up
        if not then:
            return AnsweredQuestion("", Answer.YES)
        stepped = self._compare(trial, trial, ((SAVE + 1, LOAD + 1),), roles)
        other = of_deviations("", stepped, f"{told}, in the step after the load")
        elsewhere = trial.scenario.load != "same"
        return replace(other, rounding=other.rounding and elsewhere) if other else AnsweredQuestion("", Answer.YES)

    def _compare(
        self, left: ArmRun, right: ArmRun, pairs: Sequence[tuple[int, int]], roles: Sequence[str]
    ) -> dict[str, Any]:
        files = self._run(left).files, self._run(right).files
        reply = self._asked(*files, pairs, roles, {})
        if not right.arm.arrangement and any(not deviation["rounding"] for deviation in reply["deviations"]):
            reply = self._asked(*files, pairs, roles, self._order(left))
        self.facts |= {name: value for name, value in reply["facts"].items() if value}
        self.not_compared |= set(reply["not_compared"])
        return reply

    def _order(self, trial: ArmRun) -> dict[str, float]:
        """`compare.Shares` of a trial's model and dtypes: whole tensors against the same ones in reversed order."""
        dtype = tuple((axis, text) for axis, text in trial.axes if axis == "dtype")
        whole = replace(self._unsharded_run.but(model=trial.model), axes=dtype)
        ways = [self._run(whole), self._run(whole.but(arrangement="reversed"))]
        if any(way.failure for way in ways):
            return {}
        found: dict[str, float] = {}
        for deviation in self._asked(ways[0].files, ways[1].files, STEPPED, ("param",), {})["deviations"]:
            found[deviation["name"]] = max(deviation["share"], found.get(deviation["name"], 0.0))
        return found

    def _asked(
        self, left: Sequence[str], right: Sequence[str], pairs: Sequence[tuple[int, int]], roles: Sequence[str],
        order: Mapping[str, float],
    ) -> dict[str, Any]:  # fmt: skip
        request = {"left": left, "right": right, "pairs": pairs, "roles": roles, "order": order}
        reply: dict[str, Any] = self.laboratory.ask("shardproof.optimizers.compare:serve", request)
        return reply


OWN_TENSORS = "The ranks step as they would if each shard were a tensor of its own"
"""What is said where the run on shards equals the one on whole tensors that were cut up first."""

UNSHARDED_QUESTIONS = ("position", "state_dict")
"""Questions about whole tensors alone."""

FORGIVING = ("reshard", "groups", "tensor_lr")
"""Questions that leave sharded steps uncompared where the first one found that they are others than whole ones."""


def _offloaded(trial: ArmRun) -> ArmRun:
    """The same under CPUOffloadPolicy."""
    return trial.under(offload="cpu")


def _steps(stepping: AnsweredQuestion) -> bool:
    """Whether the first answer says that the optimizer steps on sharded parameters at all."""
    return stepping.answer is Answer.YES or (stepping.answer is Answer.NO and not stepping.failed)


def _at(trial: ArmRun, failure: Failure) -> str:
    """Where in its program a run ended."""
    words = [word for word in trial.program.split() if word != "restart"]
    if failure.op is None or failure.op < 0:
        return "at the start"
    word = words[failure.op]
    return f"in step {words[: failure.op + 1].count('step')}" if word == "step" else f"in the {word}"
