"""The built-in rules, from specific to general: the order decides among equally confident explanations."""

from harness.diagnosis.explanation import Rule
from harness.diagnosis.rules import (
    beside,
    counters,
    dtypes,
    gradients,
    order,
    pieces,
    presence,
    ranks,
    sources,
    updates,
)

BUILT_IN: tuple[Rule, ...] = (
    *gradients.OVERFLOW,
    *pieces.FIRST,
    *beside.RULES,
    *ranks.RULES,
    *counters.RULES,
    *dtypes.RULES,
    *gradients.RULES,
    *order.RULES,
    *pieces.RULES,
    *updates.RULES,
    *sources.RULES,
    *presence.RULES,
    *ranks.GENERAL,
)
