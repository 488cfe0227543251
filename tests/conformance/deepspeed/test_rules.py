"""DeepSpeed's own rules: the twin's code and the reference's agree, and say what the written contract says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardproof.oracle.inputs import Clip, LossScale
from shardproof.oracle.scaler import CountedScaler
from shardproof.systems.deepspeed import clipping, reference
from shardproof.systems.deepspeed.contract import DIRECT_CLIPPING, INVERSE_CLIPPING, STABLE_INTERVALS, WINDOW
from shardproof.systems.deepspeed.scaler import count

RULE = LossScale(torch=False, window=WINDOW, hysteresis=2, minimum=1.0, rule=STABLE_INTERVALS)


def test_the_step_after_a_whole_window_doubles_the_scale() -> None:
    scaler = CountedScaler(RULE, 1024.0)
    scales = []
    for _ in range(6):
        count(scaler, overflow=False)
        scales.append(scaler.scale)
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0, 4096.0, 4096.0]


def test_an_overflow_takes_one_of_the_hysteresis_first() -> None:
    scaler = CountedScaler(RULE, 1024.0)
    seen = []
    for _ in range(3):
        count(scaler, overflow=True)
        seen.append((scaler.scale, scaler.hysteresis))
    assert seen == [(1024.0, 1), (512.0, 1), (256.0, 1)]


@given(st.lists(st.booleans(), max_size=20))
def test_twin_and_reference_count_alike(overflows: list[bool]) -> None:
    twin, other = CountedScaler(RULE, 1024.0), SimpleNamespace(scale=1024.0, growth_tracker=0, hysteresis_tracker=2)
    for overflow in overflows:
        count(twin, overflow=overflow)
        reference.count_scale(other, RULE, overflow)
        assert (twin.scale, twin.growth, twin.hysteresis) == tuple(vars(other).values())


@pytest.mark.parametrize("norm_dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("bound", [0.5, 100.0, 0.005])  # the last is rounded otherwise by a division
def test_twin_and_reference_clip_alike(norm_dtype: str, bound: float) -> None:
    values = np.arange(1, 9, dtype=np.float32) / 16
    squares = float(np.square(values.astype(np.float64)).sum())
    for rule, twin, other in (
        (INVERSE_CLIPPING, clipping.by_inverse, reference.clip_by_inverse),
        (DIRECT_CLIPPING, clipping.directly, reference.clip_directly),
    ):
        clip = Clip(bound, norm_dtype if rule is INVERSE_CLIPPING else "fp32", rule)
        norm, coefficient = other(squares, {"fp32"}, clip)
        gradients = {"weight": torch.from_numpy(values.copy())}
        twin(gradients, norm, clip)
        expected = values if coefficient is None else values * coefficient
        assert gradients["weight"].numpy().tobytes() == expected.astype(np.float32).tobytes()
