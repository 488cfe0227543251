"""The built-in rules, from specific to general: the order decides among equally confident explanations."""

from shardproof.diagnosis.explanation import Rule
from shardproof.diagnosis.rules import (
    counters,
    dtypes,
    generators_and_fp8,
    gradients,
    order,
    parts,
    pieces,
    presence,
    ranks,
    sources,
    stretches,
    updates,
)

BUILT_IN: tuple[Rule, ...] = (
    *gradients.OVERFLOW,
    *pieces.FIRST,
    *stretches.FIRST,
    *generators_and_fp8.RULES,
    *ranks.RULES,
    *presence.FIRST,
    *gradients.ABSENT,
    *counters.RULES,
    *parts.RULES,
    *dtypes.RULES,
    *gradients.RULES,
    *order.RULES,
    *pieces.RULES,
    *updates.RULES,
    *stretches.RULES,
    *sources.RULES,
    *presence.RULES,
    *ranks.GENERAL,
)
