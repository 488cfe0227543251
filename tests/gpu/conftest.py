"""Everything here needs a GPU; without one it is skipped, and says why. The tests share one laboratory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.world.devices import gpus


@pytest.fixture(scope="session")
def laboratory() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=180.0) as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    reason = gpus(sys.executable).reason if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
