"""How walks go over Megatron-FSDP."""

from __future__ import annotations

import pytest
from shardproof.space.files import load_space
from shardproof.systems.megatron_fsdp import SYSTEM


@pytest.mark.parametrize("name", ["nightly", "weekly"])
def test_the_model_that_shows_its_defect_of_ragged_units_is_walked(name: str) -> None:
    (walk,) = (walk for walk in load_space(name).walks if (walk.system, walk.part) == (SYSTEM.name, ""))
    assert "ragged_unit" in walk.axes["model"]
