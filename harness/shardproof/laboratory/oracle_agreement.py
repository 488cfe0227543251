"""Compares the two oracles, twin and reference: which values both know, and a sentence on the first disagreement."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.diff import Difference
from shardproof.models import model_spec
from shardproof.observe.logical import Logical
from shardproof.oracle.extra_state import EXTRA_STATE


def known_to_both(logical: Logical, model: str) -> Logical:
    """Values without those that the reference has beside training state proper, of which the twin knows nothing."""
    modules = model_spec(model).modules
    if not any(module.opaque or module.draws or module.quantised for module in modules):
        return logical
    in_fp8 = {f"{module.path}.{param.name}" for module in modules if module.quantised for param in module.params}
    return {
        key: value
        for key, value in logical.items()
        if key.role not in (EXTRA_STATE, "rng", "quantised", "quant_scale")
        and not (key.role == "compute_param" and key.fqn in in_fp8)
    }


def describe_disagreement(found: Sequence[Difference]) -> str:
    """How many values differ and which is the first; empty where none does."""
    if not found:
        return ""
    first = found[0]
    seen = first.detail or f"{first.expected_first} against {first.observed_first}"
    return (
        f"twin and reference disagree in {len(found)} values, first after operation {first.key.op}: "
        f"{first.key.role} of {first.key.fqn} ({first.kind}: {seen})"
    )
