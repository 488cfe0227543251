"""What the tests of all systems share: one laboratory in each test process. Its servers start when first needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shardproof.laboratory.laboratory import Laboratory

pytest.register_assert_rewrite("tests.conformance.sessions")

PLUGINS = (
    "tests.conformance.automodel.careless",
    "tests.conformance.transformer_engine.careless",
    "tests.conformance.broken",
    "tests.conformance.torch_fsdp2.careless",
    "tests.conformance.megatron_bridge.careless",
    "tests.conformance.megatron_bridge.refreshed",
    "tests.conformance.megatron_core.careless",
    "tests.conformance.megatron_core.defects",
    "tests.conformance.megatron_core.repairs",
    "tests.conformance.own_adamw",
    "tests.conformance.own_adamw.hasty",
    "tests.conformance.torch_zero",
    "tests.conformance.torch_zero.forgetful",
    "tests.conformance.torch_zero.elsewhere",
)
"""Modules that register systems of our own making in every server of the shared laboratory."""

PATIENCE_S = 120.0
"""What a session may take before it counts as hanging. What does hang has a laboratory of its own."""


HANG_S = 10.0
"""What a scenario that does hang may take: twice that, and as much again to confirm it."""


@pytest.fixture(scope="module")
def hasty() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=HANG_S) as opened:
        yield opened


@pytest.fixture(scope="session")
def laboratory() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=PATIENCE_S, plugins=PLUGINS) as opened:
        yield opened
