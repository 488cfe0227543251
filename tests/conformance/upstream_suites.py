"""Upstream's own tests over the emulation against the committed lists, where the caller names a clone.

The clone of a package is named as for `NAME@git:REV`: SHARDPROOF_CLONE_MEGATRON_CORE=/src/Megatron-LM. Without it the
tests are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shardproof.suites import ranks as runner
from shardproof.suites.declared import Upstream, upstream_of
from shardproof.suites.verdicts import CommittedVerdicts, differences
from shardproof.world.preflight import clone_variable_of


def cases(system: str) -> list[tuple[str, int]]:
    """Name and ranks of every list of verdicts of a system."""
    return [(suite.name, ranks) for suite in upstream_of(system).suites for ranks in suite.ranks]


def check(system: str, name: str, ranks: int, scratch: Path) -> None:
    """Run a suite, and fail with one line for each test that did not end as its list says."""
    variable = clone_variable_of(system)
    if not os.environ.get(variable):
        pytest.skip(f"no clone of {system}'s repository: {variable}=DIR")
    upstream: Upstream = upstream_of(system)
    suite = upstream.suite(name)
    where = runner.place(upstream, scratch)
    seen = runner.verdicts(upstream, suite, ranks, where, 300.0)
    kept = CommittedVerdicts.read(upstream.verdicts_file(suite, ranks).read_text("utf-8"), name)
    assert not (lines := differences(kept, seen)), "\n".join(lines)
