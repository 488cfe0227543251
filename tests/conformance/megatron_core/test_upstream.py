"""Megatron-LM's own tests over the emulation, at the pinned tag, against the committed lists of verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import upstream_suites


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.parametrize(("suite", "ranks"), upstream_suites.cases("megatron-core"))
def test_every_test_ends_as_its_list_says(suite: str, ranks: int, tmp_path: Path) -> None:
    upstream_suites.check("megatron-core", suite, ranks, tmp_path)
