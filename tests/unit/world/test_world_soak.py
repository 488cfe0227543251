"""Nothing accumulates in the server over many scenarios: descriptors, threads, memory, processes, files."""

from __future__ import annotations

import pytest

from benchmarks.soak import leaks, soak


@pytest.mark.nightly
@pytest.mark.parametrize(("system", "scenarios"), [("stub", 2000), ("torch-fsdp2", 500), ("megatron-core", 200)])
def test_nothing_accumulates(system: str, scenarios: int) -> None:
    first, last, wrong = soak(scenarios, 3, system, print)
    assert leaks(first, last) == []
    assert wrong == []


@pytest.mark.nightly
def test_a_short_soak_with_incidents() -> None:
    first, last, wrong = soak(20, 4, "stub", print)
    assert leaks(first, last) == []
    assert wrong == []
