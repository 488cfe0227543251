"""Skipped steps, read off the state."""

from __future__ import annotations

from shardproof.observe.logical import Value
from shardproof.trainer.values.every_mesh import Values
from shardproof.trainer.values.overflows import all_overflow, overflows


def state(weight: float, scale: float, place: int) -> Values:
    texts = {("scaler", "scaler.scale"): f"float {scale}", ("scheduler", "schedule.last_epoch"): f"int {place}",
             ("param", "w"): f"float {weight}"}  # fmt: skip
    return {name: Value("utf8", (len(text),), text.encode()) for name, text in texts.items()}


def test_a_skipped_step_is_one_in_which_the_scale_falls_and_nothing_moves() -> None:
    begun = state(1.0, 8.0, 0)
    (one,) = overflows([(3, begun, state(1.0, 4.0, 1))])
    assert (one.step, one.scale, one.schedule) == (3, ("8.0", "4.0"), True)
    assert not overflows([(3, begun, state(1.0, 4.0, 0))])[0].schedule
    assert overflows([(3, begun, state(2.0, 4.0, 1)), (4, begun, state(1.0, 8.0, 1))]) == []
    assert "fell from 8.0 to 4.0" in all_overflow([one], 1)
    assert all_overflow([one], 2) == ""
