"""Runs the cells that the questions about an optimizer need, and gives the answers.

The run on whole tensors comes first. Where it fails, nothing can be asked, since sharding has no part in it. Then
comes the first question, whose answer decides about the others: an optimizer that does not step on sharded parameters
cannot be asked what becomes of its checkpoints; of one whose sharded steps are others than whole ones, other questions
do not count that a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.errors import A_TRAINER, UsageError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.optimizers.answers import OF_WHOLE_TENSORS, QUESTIONS, Answer, AnsweredQuestion, Asking, answer_of
from shardproof.optimizers.request import ARGUMENT_FORM, FORM, Asked
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.tables import SHIPPED
from shardproof.trainer.arms import WHOLE
from shardproof.trainer.cells import scenario_of
from shardproof.trainer.described import Described, described
from shardproof.trainer.models import LAYERS, MATRICES
from shardproof.verdict import Verdict

TRAINER = f"{SHIPPED / 'trainers' / 'optimizers.py'}"
UNSHARDED = "it does not step on sharded parameters (the first question)"
CLOSURE = "its step needs a closure that computes the loss, more than once in a step"
WHOLE_TENSORS = Asking("it fails on whole tensors already", {}, WHOLE, "arms 4 0 uninterrupted")


def opened(jobs: int, deadline_s: float, python: str | None = None, keep: Path | None = None) -> Laboratory:
    """A laboratory for cells of the trainer, to be entered.

    Args:
        jobs, deadline_s, python, keep: of `Laboratory`.
    """
    trainer = described(TRAINER)
    plugins = load_plugins((trainer.plugin,))
    return Laboratory(
        jobs=jobs, deadline_s=deadline_s, plugins=plugins, python=python, keep=keep, systems={trainer.system}
    )


class Examination:
    """The questions about one optimizer.

    `about` is what `rank.trial` says of the class, `model` the one that it is tried on, `not_compared` what a reader
    should know of the first answer.
    """

    def __init__(self, laboratory: Laboratory, asked: Asked) -> None:
        self.laboratory, self.asked = laboratory, asked
        self.trainer: Described = described(TRAINER)
        self.about: dict[str, Any] = {}
        self.model = LAYERS
        self.not_compared: set[str] = set()
        self._results: dict[Scenario, Result] = {}

    def answers(self) -> Iterator[AnsweredQuestion]:
        """The answer to every question, in order.

        Raises:
            UsageError: the class cannot be imported, is no optimizer, or does not take what it was given.
            HarnessError: a server of ours failed.
        """
        with self._started():
            self._look()
        if cannot := self._cannot():
            yield from (replace(cannot, question=question) for question in QUESTIONS)
            return
        yield (stepping := self._answer("sharded", None))
        self._run_ahead(stepping)
        for question in list(QUESTIONS)[1:]:
            yield self._answer(question, stepping)

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Run the first cell beside this block: its server imports torch while a worker imports the optimizer's class.
        If the block raises, nobody waits for the cell, which ends with the laboratory."""
        pool = ThreadPoolExecutor(1, "first cell")
        first = pool.submit(self._run, WHOLE_TENSORS)
        pool.shutdown(wait=False)
        yield
        first.result()

    def _look(self) -> None:
        request = {"path": self.asked.path, "arguments": self.asked.arguments}
        self.about = self.laboratory.ask("shardproof.optimizers.rank.trial:serve", request)
        if wrong := self.about.get("wrong"):
            form = FORM if wrong["what"] != "--arg" else f"{FORM} {ARGUMENT_FORM}"
            error = UsageError.of(wrong["what"], wrong["given"], wrong["allowed"], form)
            raise error.led_to(A_TRAINER) if wrong.get("foreign") else error

    def _cannot(self) -> AnsweredQuestion | None:
        """The answer to all questions where nothing can be asked. Finds the model that the optimizer takes."""
        if self.about["closure"]:
            return AnsweredQuestion("", Answer.CANNOT, CLOSURE)
        tried = []
        for self.model in (LAYERS, MATRICES):
            tried.append(self._run(WHOLE_TENSORS))
            if tried[-1].verdict is Verdict.PASS:
                return None
        self.model, first = LAYERS, tried[0]
        if self.asked.arguments and all(result.error and result.error.op == 0 for result in tried):
            assert first.error is not None
            given = " ".join(f"{name}={text}" for name, text in self.asked.arguments)
            allowed = f"what the constructor of {self.asked.name} takes ({first.error.type}: {first.error.message})"
            raise UsageError.of("--arg", given, allowed, f"{FORM} {ARGUMENT_FORM}")
        found = answer_of("", WHOLE_TENSORS, first, self.about["home"])
        return found if found.answer is Answer.UNKNOWN else AnsweredQuestion("", Answer.CANNOT, found.why)

    def _scenario(self, asking: Asking) -> Scenario:
        cell: Mapping[str, str] = {
            "mesh": self.asked.mesh,
            "optimizer": self.asked.text,
            "model": self.model,
            **asking.cell,
        }
        return scenario_of(self.trainer, cell, program=asking.program)

    def _run(self, asking: Asking) -> Result:
        scenario = self._scenario(asking)
        if scenario not in self._results:
            self._results[scenario] = self.laboratory.examine_one(scenario)
        return self._results[scenario]

    def _run_ahead(self, stepping: AnsweredQuestion) -> None:
        """Have the cells run side by side, where there are jobs for it; questions find them done."""
        if self.laboratory.jobs > 1:
            todo = {self._scenario(asking) for question in QUESTIONS for asking in self._askings(question, stepping)}
            wanted = todo - self._results.keys()
            self._results |= {r.scenario: r for r in self.laboratory.examine(wanted, lambda scenario, blob: None)}

    def _askings(self, question: str, stepping: AnsweredQuestion | None) -> Iterable[Asking]:
        """What is asked in turn; nothing of an optimizer that does not step on what the question is about."""
        if stepping and not stepping.steps and question not in OF_WHOLE_TENSORS:
            return ()
        alike = stepping is None or stepping.answer is Answer.YES
        return [asking for asking in QUESTIONS[question][1] if alike or not asking.needs_steps]

    def _answer(self, question: str, stepping: AnsweredQuestion | None) -> AnsweredQuestion:
        found = AnsweredQuestion(question, Answer.CANNOT, UNSHARDED)
        alike = stepping is None or stepping.answer is Answer.YES
        for number, asking in enumerate(self._askings(question, stepping)):
            result = self._run(asking)
            if stepping is None:
                self.not_compared = {note for arm in result.arms if arm.name == asking.arm for note in arm.notes}
            found = answer_of(question, asking, result, self.about["home"], steps_count=alike)
            if found.answer is Answer.NOTHING and number:
                return AnsweredQuestion(question, Answer.YES)  # it keeps no state, and the steps before said yes
            if found.answer is not Answer.YES:
                return found
        return found
