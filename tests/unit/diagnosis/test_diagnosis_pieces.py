"""Rules about the pieces of a tensor, about moments and about the texts of errors: that each speaks, and that it is
silent where one element is otherwise. What the faults of the catalogue make of them is `golden/faults.toml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from shardproof.diagnosis import Explanation, explain_refusal
from shardproof.diagnosis.rules.engine import explain
from shardproof.diff import as_numbers, diff
from shardproof.faults.confusion_table import confusion, confusion_lines
from shardproof.laboratory.judge import ResolvedScenario
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical
from shardproof.observe.record import Record
from shardproof.reference import system as reference
from shardproof.scenario import Mesh, Scenario

from tests.unit.diagnosis.test_diagnosis import (
    LAST,
    LOAD,
    SAVE,
    STEP,
    change,
    context_of,
    diagnose,
    like,
    live,
    predicted,
)

pytestmark = pytest.mark.usefixtures("explained_word_for_word")

FLAT = Scenario(
    system="reference", mesh=Mesh(1, 4, 1), sharding="zero1", checkpoint="model_space", program="build step"
)
UP = "up.weight"


def with_pieces(how: Callable[[Record], Record]) -> list[Explanation]:
    """What is said if pieces of what the reference holds were others."""
    case = ResolvedScenario.from_scenario(FLAT)
    right = reference.run(case.inputs, case.placement)
    expected, _ = assemble(right)
    wrong = [how(record) for record in right]
    observed, problems = assemble(wrong)
    context = replace(context_of(expected, observed, FLAT), records=wrong)
    return explain(diff(expected, observed, problems), context)


def part(record: Record, rank: int) -> bool:
    return (record.op, record.rank, record.role, record.fqn) == (1, rank, "exp_avg", UP)


def moved(spoil: bool) -> list[Explanation]:
    """Rank 2's stretch of a moment, taken from five elements further on; spoilt in one of them."""
    case = ResolvedScenario.from_scenario(FLAT)
    expected, _ = assemble(reference.run(case.inputs, case.placement))
    whole = np.frombuffer(expected[live(1, "exp_avg", UP)].data, np.float32)

    def how(record: Record) -> Record:
        if not part(record, 2):
            return record
        (at,), (size,) = record.start, record.size
        own = whole[at + 5 : at + 5 + size].copy()
        own[3] *= 3 if spoil else 1
        return record._replace(data=own.tobytes())

    return with_pieces(how)


def test_a_rank_that_has_a_stretch_from_further_on() -> None:
    best = moved(spoil=False)[0]
    assert best.mechanism in ("misplaced", "shifted")
    assert best.confidence == "certain"


def test_a_stretch_of_which_one_element_is_new_comes_from_nowhere() -> None:
    assert "misplaced" not in [e.mechanism for e in moved(spoil=True)]


def momentum(how: Callable[[Logical], np.ndarray]) -> list[str]:  # type: ignore[type-arg]
    """What is said if the momentum of one parameter is another after the last step."""
    scenario = Scenario.from_axes({"mesh": "1x2x1", "optimizer": "sgd"})
    key = live(LAST, "momentum", UP)

    def mutate(state: Logical) -> None:
        state[key] = like(state[key], how(predicted(scenario)))

    return [e.mechanism for e in diagnose(scenario, mutate, since=LAST)]


def numbers(values: Logical, op: int) -> np.ndarray:  # type: ignore[type-arg]
    return as_numbers(values[live(op, "momentum", UP)]).astype(np.float64)


def kept(values: Logical) -> float:
    return float(as_numbers(values[live(LOAD, "hyperparameter", "group0.momentum")])[0])


def test_a_momentum_without_its_past_was_counted_anew() -> None:
    assert momentum(lambda v: numbers(v, LAST) - kept(v) * numbers(v, LOAD))[0] == "counted_anew"


def test_half_of_the_past_is_no_first_step() -> None:
    assert "counted_anew" not in momentum(lambda v: numbers(v, LAST) - 0.5 * kept(v) * numbers(v, LOAD))


def test_a_momentum_that_went_on_from_an_earlier_one() -> None:
    found = momentum(lambda v: numbers(v, LAST) + kept(v) * (numbers(v, STEP) - numbers(v, LOAD)))
    assert found[0] == "moment_continued_from"


def test_a_momentum_that_is_merely_off_went_on_from_nothing() -> None:
    assert "moment_continued_from" not in momentum(lambda v: numbers(v, LAST) * 1.01)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("state of 'up.bias' has 7 elements where its parameter has 16", ("likely", ["down.bias"])),
        ("size mismatch for up.weight: shape (112,), given torch.Size([7])", ("likely", ["down.bias"])),
        ("state of 'up.bias' has 5 elements where its parameter has 16", None),
        ("state of 'up.bias' has 7 elements", None),
        ("up.bias and down.bias differ: 7 and 16", None),
        ("unhashable type: 'numpy.ndarray'", None),
    ],
)
def test_an_error_that_names_two_sizes(message: str, expected: tuple[str, list[str]] | None) -> None:
    found = explain_refusal(message, SAVE, context_of({}, {}))
    assert [(e.confidence, e.evidence[0]["as_many_as"]) for e in found] == ([expected] if expected else [])


def test_a_wrong_norm_beside_wrong_gradients_is_their_consequence() -> None:
    scenario = Scenario.from_axes({"mesh": "1x2x1", "optimizer": "adamw/clip=1.0", "microbatches": "2"})
    norm = Key(STEP, "live", "norm", "total_norm")

    def mutate(state: Logical) -> None:
        change(live(STEP, "grad", UP), lambda values: np.where(np.arange(112).reshape(16, 7) % 2, values, 0))(state)
        state[norm] = like(state[norm], as_numbers(state[norm]) * 0.5)

    if norm not in predicted(scenario):
        pytest.skip("the twin predicts no norm of its own")
    said = {e.mechanism: e.confidence for e in diagnose(scenario, mutate, since=STEP)}
    assert said.get("norm_of_a_part", "possible") == "possible"


def test_the_confusion_table_marks_what_is_wrong() -> None:
    rows = confusion([("padding", "shifted"), ("padding", "shifted"), ("padding", ""), ("refused", ""), ("dtype", "x")])
    assert [(r.mechanism, r.planted, r.right, r.explanations_text) for r in rows] == [
        ("padding", 3, 2, "shifted 2, !nothing 1"),
        ("dtype", 1, 0, "!x 1"),
    ]
    assert confusion_lines(rows)[1] == "padding    3      2  shifted 2, !nothing 1"
