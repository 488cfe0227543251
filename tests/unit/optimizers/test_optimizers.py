"""`shardproof optimizer`: what is asked, which arm of which cell answers, and what an answer is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from shardproof.errors import UsageError
from shardproof.optimizers.answers import (
    QUESTIONS,
    Answer,
    AnsweredQuestion,
    Asking,
    answer_of,
    exit_status,
    is_statement,
)
from shardproof.optimizers.examine import TRAINER
from shardproof.optimizers.rank.trial import serve
from shardproof.optimizers.request import Asked, asked, written
from shardproof.protocol import registry
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.result import ArmResult, Failure, Result
from shardproof.scenario import Scenario
from shardproof.trainer.arms import sessions_of
from shardproof.trainer.cells import scenario_of
from shardproof.trainer.described import described
from shardproof.verdict import ExitStatus, Verdict


@pytest.fixture(autouse=True)
def _systems_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))


# What is asked


def test_a_path_and_arguments_are_read() -> None:
    assert asked("torch.optim.SGD", ["momentum=0.9", "betas=(0.9, 0.5)"]) == Asked(
        "torch.optim.SGD", (("momentum", "0.9"), ("betas", "(0.9, 0.5)"))
    )
    assert asked("a.b.C").module == "a.b"
    assert asked("a.b.C").name == "C"


@pytest.mark.parametrize("path", ["AdamW", "torch.optim.", ".AdamW", "torch optim.AdamW", "torch:AdamW", "1a.B"])
def test_a_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="for example: shardproof optimizer torch"):
        asked(path)


@pytest.mark.parametrize("given", [["momentum"], ["=3"], ["momentum="], ["a b=3"], ["lr=1", "lr=2"]])
def test_an_argument_of_another_form_is_refused(given: list[str]) -> None:
    with pytest.raises(UsageError, match="--arg"):
        asked("torch.optim.SGD", given)


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("0.9", "0.9"), ("(0.9, 0.95)", "(0.9,0.95)"), ("true", "True"), ("False", "False"), ("none", "None"),
        ("abs", "'abs'"), ("torch.bfloat16", "torch.bfloat16"), ("'0.9'", "'0.9'"), ("[1,", "'[1,'"),
    ],
)  # fmt: skip
def test_values_are_literals_or_text(text: str, literal: str) -> None:
    assert written(text) == literal


def test_what_is_asked_is_a_value_of_the_trainers_axis() -> None:
    assert asked("a.B").text == "a.B"
    assert asked("a.B", ["betas=(0.9, 0.5)", "mode=max"]).text == "a.B(betas=(0.9,0.5),mode='max')"


@pytest.mark.parametrize("value", ["'two words'", "a+b", "a b"])
def test_an_argument_that_an_axis_cannot_hold_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="without blanks"):
        asked("torch.optim.SGD", [f"mode={value}"])


@pytest.mark.parametrize(("ranks", "mesh"), [("1x2x1", "2"), ("1x4x1", "4"), ("2x2x1", "2x2")])
def test_a_mesh_shards(ranks: str, mesh: str) -> None:
    assert asked("a.B", (), ranks).mesh == mesh


@pytest.mark.parametrize("text", ["1x1x1", "1x2x2", "2", "4x4x1", "0x2x1", "1x2x1x1"])
def test_a_mesh_that_does_not_shard_over_eight_ranks_at_most_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="dp_shard from 2 to 8"):
        asked("a.B", (), text)


# Which arm answers


def scenario(asking: Asking) -> Scenario:
    trainer = described(TRAINER)
    load_plugins((trainer.plugin,))
    return scenario_of(trainer, {"mesh": "2", **asking.cell}, program=asking.program)


@pytest.mark.parametrize("asking", [one for _, all_ in QUESTIONS.values() for one in all_], ids=lambda one: one.told)
def test_every_question_is_asked_of_an_arm_that_its_cell_has(asking: Asking) -> None:
    names = [session.name for session in sessions_of(scenario(asking))]
    assert any(name.startswith(asking.arm) for name in names)


WAY = QUESTIONS["sharded"][1][0]


def answered(*arms: ArmResult, asking: Asking = WAY, verdict: Verdict = Verdict.MISMATCH,
             error: Failure | None = None) -> AnsweredQuestion:  # fmt: skip
    found = Result(scenario(WAY), "optimizers:Optimizers", "", verdict, arms=arms, error=error)
    return answer_of("sharded", asking, found, "/site/lion")


def arm(name: str, verdict: Verdict, sentence: str = "", *notes: str) -> ArmResult:
    return ArmResult(name, verdict.value, sentence, notes)


ROUNDED = "equal up to rounding: what differs is apart by no more than another order of sums makes"


def test_the_arm_of_the_question_answers_and_no_other() -> None:
    other = arm("unsaved", Verdict.MISMATCH, "Saving changed it.")
    assert answered(other, arm("alike way", Verdict.PASS)).answer is Answer.YES
    found = answered(other, arm("alike way", Verdict.MISMATCH, "w differs."))
    assert (found.answer, found.why) == (Answer.NO, "on the ranks against whole tensors: w differs.")


def test_rounding_is_a_no_of_its_own_unless_the_question_forgives_it() -> None:
    rounded = arm("alike way", Verdict.PASS, "", ROUNDED)
    assert answered(rounded).said == "no (rounding)"
    assert answered(rounded, asking=replace(WAY, rounds=True)).answer is Answer.YES


@pytest.mark.parametrize(("counts", "said"), [(True, "no (rounding)"), (False, "yes")])
def test_a_step_after_a_load_elsewhere_is_not_counted_twice(counts: bool, said: str) -> None:
    asking, arms = replace(WAY, arm="other mesh"), (arm("other mesh 4", Verdict.PASS, "", ROUNDED),)
    found = Result(scenario(WAY), "optimizers:Optimizers", "", Verdict.MISMATCH, arms=arms)
    assert answer_of("reshard", asking, found, "/site/lion", steps_count=counts).said == said


def test_ranks_that_disagree_are_a_no_where_they_are_compared_with_whole_tensors() -> None:
    apart, loaded = arm("ranks agree", Verdict.MISMATCH, "They do not fit."), arm("resumed", Verdict.PASS)
    assert answered(apart, arm("alike way", Verdict.PASS)).answer is Answer.NO
    assert answered(apart, loaded, asking=replace(WAY, arm="resumed")).answer is Answer.YES


def test_a_run_that_did_not_come_so_far_answers_by_what_ended_it() -> None:
    ended = arm("uninterrupted", Verdict.CRASH, "RuntimeError on rank 0.")
    found = answered(ended, verdict=Verdict.CRASH)
    assert (found.answer, found.failed, found.steps) == (Answer.NO, True, False)


def test_no_state_is_nothing_to_compare() -> None:
    kept = arm("resumed", Verdict.UNSUPPORTED, "it keeps no state")
    assert answered(kept, asking=replace(WAY, arm="resumed")).answer is Answer.NOTHING
    refused = arm("resumed", Verdict.UNSUPPORTED, "something else")
    assert answered(refused, asking=replace(WAY, arm="resumed")).answer is Answer.CANNOT


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.NONDETERMINISTIC])
def test_an_error_of_ours_or_an_answer_that_does_not_come_again_is_unknown(verdict: Verdict) -> None:
    assert answered(arm("alike way", Verdict.PASS), verdict=verdict).answer is Answer.UNKNOWN


# What an answer is

OWN = '  File "/site/lion/lion.py", line 3, in step\n    {line}\n{type}: no\n'


def failure(message: str, line: str = "torch.boom()", type_: str = "RuntimeError", home: str = "/site/lion") -> Failure:
    above = '  File "/site/ours.py", line 1, in step\n    optimizer.step()\n'
    return Failure(type_, message, 0, above + OWN.format(line=line, type=type_).replace("/site/lion", home), 1)


@pytest.mark.parametrize(
    ("error", "states"),
    [
        (failure("Lion does not support sparse gradients"), True),
        (failure("", type_="NotImplementedError"), True),
        (failure("unsupported dtype"), True),
        (failure("size of tensor a must match tensor b"), False),
        (failure("DTensor does not support this", home="/site/torch"), False),  # torch says it, and not the optimizer
    ],
)
def test_a_refusal_is_the_optimizers_own_word(error: Failure, states: bool) -> None:
    assert is_statement(error, "/site/lion") is states
    found = answered(arm("alike way", Verdict.CRASH, "It raised."), verdict=Verdict.CRASH, error=error)
    assert found.answer is (Answer.REFUSES if states else Answer.NO)
    assert found.failed


def test_what_a_constructor_raises_of_its_own_is_a_refusal() -> None:
    made = '  File "/site/ours.py", line 1, in optimizer_of\n    return self.cls(described, **options)\n'
    own = '  File "/site/lion/lion.py", line 3, in __init__\n    raise ValueError("lr")\n'
    assert is_statement(Failure("ValueError", "bad lr", 0, made + own, 0), "/site/lion")
    assert not is_statement(Failure("ValueError", "bad lr", 0, own, 1), "/site/lion")


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        (["yes", "nothing to compare", "refuses"], ExitStatus.OK),
        (["yes", "no", "cannot be asked"], ExitStatus.FAILURE),
        (["no", "unknown"], ExitStatus.HARNESS),
        (["cannot be asked", "nothing to compare"], ExitStatus.NOTHING_RUN),
    ],
)
def test_exit_statuses(answers: list[str], status: ExitStatus) -> None:
    assert exit_status(AnsweredQuestion("sharded", Answer(answer)) for answer in answers) is status


def test_a_module_that_is_not_here_is_said_to_be_absent_and_how_to_bring_it() -> None:
    reply = json.loads(serve(json.dumps({"path": "no_such_optimizers.Lion", "arguments": []}).encode()))
    assert "there is no module no_such_optimizers" in reply["wrong"]["allowed"]
    assert "with pip" in reply["wrong"]["allowed"]
