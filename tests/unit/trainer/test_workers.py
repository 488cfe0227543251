"""Generators of a dataset that a loader's workers get copies of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shardproof.trainer.rank.walk import walk
from shardproof.trainer.rank.workers import copied_generators
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset[float]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(self.rng.normal())


def told(dataset: Dataset[float], **options: Any) -> list[str]:
    return copied_generators(walk({"loader": DataLoader(dataset, **options)}))


def test_workers_that_get_copies_of_a_generator_are_told() -> None:
    (said,) = told(Noisy(), num_workers=2)
    assert said.startswith("loader has `num_workers=2`, and its dataset holds loader.dataset.rng: its 2 workers get ")
    assert "copies that begin alike, and draw the same numbers in every epoch, unless the dataset seeds it" in said


def test_one_worker_begins_alike_in_every_epoch_unless_it_stays() -> None:
    (said,) = told(Noisy(), num_workers=1)
    assert "its worker gets a copy and draws the same numbers in every epoch, unless" in said
    assert told(Noisy(), num_workers=1, persistent_workers=True) == []
    (said,) = told(Noisy(), num_workers=2, persistent_workers=True)
    assert "begin alike, unless" in said


def nothing(_: int) -> None:
    """Stands for what seeds a worker."""


@pytest.mark.parametrize(
    ("dataset", "options"), [(Noisy(), {}), (Noisy(), {"num_workers": 2, "worker_init_fn": nothing})]
)
def test_nothing_is_told_without_workers_or_of_one_that_is_seeded(dataset: Any, options: dict[str, Any]) -> None:
    assert told(dataset, **options) == []
