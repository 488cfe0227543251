"""`shardproof optimizer` on real ranks: one optimizer that is right in CI, and by night what docs/optimizers.toml says
of all of torch.optim, and mistakes that must be noticed.

*Verifies*: that answers come out of real runs as they are kept. *Does not verify*: optimizers from PyPI, which no test
installs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.optimizers.answers import QUESTIONS, Answer, AnsweredQuestion
from shardproof.optimizers.examine import Examination, opened
from shardproof.optimizers.request import Asked

from docs.written.optimizer_survey import asked_of

ROOT = Path(__file__).parents[2]
KEPT = [
    entry
    for entry in tomllib.loads((ROOT / "docs/optimizers.toml").read_text("utf-8"))["optimizer"]
    if entry["path"].startswith("torch.optim.")
]
MISTAKES = "tests.conformance.mistaken_optimizers"

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Laboratory]:
    with opened(1, 120.0) as warm:
        yield warm


def answers(laboratory: Laboratory, asked: Asked) -> dict[str, AnsweredQuestion]:
    return {found.question: found for found in Examination(laboratory, asked).answers()}


def test_sgd_steps_on_ranks_as_on_whole_tensors(laboratory: Laboratory) -> None:
    assert next(Examination(laboratory, Asked("torch.optim.SGD")).answers()).answer is Answer.YES


@pytest.mark.nightly
@pytest.mark.parametrize("entry", KEPT, ids=lambda entry: "-".join([entry["path"], *entry.get("arguments", ())]))
def test_torch_answers_as_it_is_kept(laboratory: Laboratory, entry: dict[str, dict[str, str]]) -> None:
    found = answers(laboratory, asked_of(entry))
    assert {question: one.said for question, one in found.items()} == entry["answers"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LocalNorm", {"sharded": "no", "position": "no", "dcp": "yes", "reshard": "yes"}),
        ("WholeNorm", {"sharded": "no (rounding)", "position": "no", "reshard": "yes", "groups": "yes"}),
        ("Forgetful", {"sharded": "yes", "state_dict": "no", "dcp": "no", "reshard": "no"}),
        ("OneLearningRate", {"sharded": "yes", "groups": "no"}),
        ("Copied", {"sharded": "yes", "tensor_lr": "no", "groups": "yes"}),
        ("NoShards", {"sharded": "refuses", "position": "yes", "dcp": "cannot be asked", "state_dict": "yes"}),
        ("Places", {"position": "no", "state_dict": "yes"}),
    ],
)
def test_a_mistake_is_noticed(laboratory: Laboratory, name: str, expected: dict[str, str]) -> None:
    found = answers(laboratory, Asked(f"{MISTAKES}.{name}"))
    assert {question: found[question].said for question in expected} == expected
    assert list(found) == list(QUESTIONS)
    assert all(found[question].why for question, said in expected.items() if said != "yes")
