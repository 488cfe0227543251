"""The worked example of docs/adding-a-rule.md: a rule that recognises a tensor with the wrong sign.

*Verifies*: that it is the first explanation of what it is about, silent about what merely looks alike, and asked after
the built-in rules once it is registered.
"""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

from collections.abc import Iterator

import numpy as np
import pytest
from shardproof.diagnosis import Context, Finding, Rule
from shardproof.diagnosis.explanation import tensor
from shardproof.diagnosis.rules import engine
from shardproof.diagnosis.rules.engine import explain
from shardproof.diff import Difference, diff
from shardproof.observe.logical import Key, Logical, Value
from shardproof.program import expand
from shardproof.scenario import Mesh, Scenario

from tests.oracles import by_twin, inputs_of


def negated(difference: Difference, context: Context) -> Finding | None:
    """Every deviating element has the expected number with the other sign: a term was subtracted that had to be
    added."""
    pair = context.pair(difference)
    if pair is None or not pair.is_float or not (pair.got == -pair.wanted).all():
        return None
    clause = f"{tensor(difference.key)} after {context.op_name(difference.key.op)}"
    return Finding(pair.strength, clause, {"name": difference.key.fqn, "elements": len(pair.at)})


NEGATED = Rule("negated", "Values have the wrong sign", negated)

STEP, GRADIENT = 1, Key(1, "live", "grad", "up.weight")
SCENARIO = Scenario(mesh=Mesh(1, 2, 1), program="build step")


@pytest.fixture
def registered() -> Iterator[None]:
    engine.register(NEGATED)
    yield
    engine._RULES.remove(NEGATED)


def changed(expected: Logical, key: Key, values: np.ndarray) -> Logical:
    """The expectation with other fp32 values in one place."""
    value: Value = expected[key]
    return {**expected, key: value._replace(data=values.astype(np.float32).tobytes())}


def explanations(observed: Logical, expected: Logical) -> list[str]:
    context = Context(expected, observed, SCENARIO, expand(SCENARIO), {}, inputs_of(SCENARIO))
    return [found.mechanism for found in explain(diff(expected, observed), context)]


@pytest.mark.usefixtures("registered")
def test_a_gradient_with_the_wrong_sign_is_explained() -> None:
    expected = by_twin(SCENARIO)
    gradient = np.frombuffer(expected[GRADIENT].data, np.float32)
    assert explanations(changed(expected, GRADIENT, -gradient), expected)[0] == "negated"


@pytest.mark.usefixtures("registered")
def test_one_element_that_is_otherwise_is_no_wrong_sign() -> None:
    expected = by_twin(SCENARIO)
    gradient = -np.frombuffer(expected[GRADIENT].data, np.float32)
    gradient[3] *= 1.5
    assert "negated" not in explanations(changed(expected, GRADIENT, gradient), expected)


@pytest.mark.usefixtures("registered")
def test_it_is_asked_after_the_built_in_rules() -> None:
    assert engine.rules()[-1] is NEGATED
