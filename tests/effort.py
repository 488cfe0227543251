"""How many examples Hypothesis draws: few on every change, ten times as many at night.

    @settings(max_examples=examples(20))
    @given(...)

draws 20 examples in CI, and 200 under `SHARDPROOF_EFFORT=10`, as `make nightly` runs them. Examples that are not drawn
anew are not lost: a failure found at night is kept in Hypothesis' database and tried first from then on.
"""

from __future__ import annotations

import os

VARIABLE = "SHARDPROOF_EFFORT"


def examples(in_ci: int) -> int:
    """The number of examples to draw, where CI draws `in_ci`.

    Raises:
        ValueError: the variable is no whole number of 1 or more.
    """
    effort = int(os.environ.get(VARIABLE, "1"))
    if effort < 1:
        raise ValueError(f"{VARIABLE}={effort}: give a whole number of 1 or more, as {VARIABLE}=10")
    return effort * in_ci
