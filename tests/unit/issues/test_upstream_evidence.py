"""What an entry of issues.toml owes its reader: where it is public or how that was searched, its reach, its effect."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from shardproof.errors import UsageError
from shardproof.issues.upstream_evidence import REACHES, novelty_of
from shardproof.tables import Table

PUBLIC = {
    "harm": "Updates are 4 times too large on 4 ranks.",
    "reach": "documented flag",
    "trigger": "Gradient accumulation under ZeRO-2.",
    "upstream": "https://github.com/NVIDIA/Megatron-LM/issues/6660",
}
SEARCH = {"on": "2026-11-22", "queries": ["gradient doubled one rank", "git log --all -G'is_data_distributed'"]}
SEARCHED = {key: value for key, value in PUBLIC.items() if key != "upstream"} | {"searched": SEARCH}
NOBODYS = {key: value for key, value in PUBLIC.items() if key != "upstream"}


def table(content: Mapping[str, object]) -> Table:
    return Table(content, "s/issues.toml: issue 1")


def test_what_is_public_says_where() -> None:
    found = novelty_of(table({**PUBLIC, "also": ["https://github.com/NVIDIA/Megatron-LM/pull/6773"]}))
    assert found.upstream == PUBLIC["upstream"]
    assert found.also == ("https://github.com/NVIDIA/Megatron-LM/pull/6773",)
    assert found.on_a_release
    assert not found.searched


def test_what_was_not_found_says_how_and_when_it_was_searched() -> None:
    found = novelty_of(table(SEARCHED))
    assert found.searched == "2026-11-22"
    assert found.queries == tuple(SEARCH["queries"])
    assert not found.upstream


def test_another_face_leaves_it_to_its_cause() -> None:
    assert not novelty_of(table({**NOBODYS, "cause": "megatron-fsdp-one-rank-shard"})).upstream


@pytest.mark.parametrize("reach", REACHES)
def test_only_what_a_release_shows_counts_as_found(reach: str) -> None:
    found = novelty_of(table({**PUBLIC, "reach": reach}))
    assert found.on_a_release == (reach in ("default", "documented flag", "API only"))
    assert not novelty_of(table({**PUBLIC, "reach": reach, "doubtful": "It may be the contract."})).on_a_release


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (PUBLIC | {"reach": "some flag"}, r"issue 1: reach: given 'some flag'; allowed: default, documented flag, API"),
        ({k: v for k, v in PUBLIC.items() if k != "reach"}, r"allowed: reach too; for example: reach = …"),
        ({k: v for k, v in PUBLIC.items() if k != "harm"}, r"allowed: harm too"),
        ({k: v for k, v in PUBLIC.items() if k != "trigger"}, r"allowed: trigger too"),
        (PUBLIC | {"harm": "Broken"}, r"harm: given 'Broken'; allowed: a sentence of 4 words or more"),
        (PUBLIC | {"harm": "The same after moving to one rank."}, r"allowed: what happens, without another entry"),
        (PUBLIC | {"trigger": "offload"}, r"trigger: given 'offload'; allowed: a sentence"),
        (PUBLIC | {"upstream": "issue 6660"}, r"upstream: given 'issue 6660'; allowed: an https address; for example"),
        (PUBLIC | {"also": ["#6773"]}, r"also: given '#6773'; allowed: an https address; for example: also = \["),
        (PUBLIC | {"related": [""]}, r"related: given ''; allowed: an https address"),
        (PUBLIC | {"searched": SEARCH}, r"allowed: an https address, or searched in its place"),
        (NOBODYS, r"upstream: given ''; allowed: an https address, or searched in its place; for example: searched"),
        (NOBODYS | {"upstream": ""}, r"or searched in its place"),
        (SEARCHED | {"searched": SEARCH | {"on": "yesterday"}}, r"searched: on: given 'yesterday'; allowed: a day"),
        (SEARCHED | {"searched": SEARCH | {"on": "20261122"}}, r"allowed: a day, ISO 8601; for example: on = "),
        (SEARCHED | {"searched": {"on": "2026-11-22"}}, r"allowed: queries too"),
        (SEARCHED | {"searched": SEARCH | {"queries": ["one", "one"]}}, r"allowed: 2 different searches or more"),
        (SEARCHED | {"searched": SEARCH | {"where": "github"}}, r"searched: key: given 'where'; allowed: on, queries"),
    ],
)
def test_an_answer_that_is_missing_or_vague_is_bad_input(content: Mapping[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        novelty_of(table(content))
