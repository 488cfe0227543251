"""Ids of public bugs are addresses for a reader."""

from __future__ import annotations

import pytest
from shardproof.diagnosis.rules import engine
from shardproof.faults.catalogue import CATALOGUE
from shardproof.issues.upstream_links import address_of, compared

from tests.conformance.built_in import BUILT_IN


@pytest.mark.parametrize(
    ("bug", "address"),
    [
        ("PT-164929", "https://github.com/pytorch/pytorch/issues/164929"),
        ("AM-2419c", "https://github.com/NVIDIA-NeMo/Automodel/issues/2419"),
        ("MLM-mr2871", "https://github.com/NVIDIA/Megatron-LM/commit/2922bb6d753cc2653d35cfa2d5a27a419b2c7ad6"),
        ("OURS-1", ""),
        ("PT-", ""),
        ("PT-1; <script>", ""),
    ],
)
def test_an_id_leads_to_the_thread(bug: str, address: str) -> None:
    assert address_of(bug) == address


def test_every_id_that_we_name_has_an_address() -> None:
    rules = [*engine.rules(), *(rule for system in BUILT_IN for rule in system.rules)]
    sources = [*rules, *CATALOGUE.values()]
    named = {bug for source in sources for bug in source.bug_ids}
    assert len(named) > 100
    assert sorted(bug for bug in named if not address_of(bug)) == []


def test_a_line_has_room_for_a_few() -> None:
    assert compared(()) == ""
    assert compared(("OURS-1",)) == "; compare OURS-1"
    assert compared(("PT-1", "PT-2", "PT-3", "PT-4")).endswith("pytorch/issues/3 and 1 more")
