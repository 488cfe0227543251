"""Chained optimizers: several optimizers of one model, such as dense and expert ones, that step together.

Megatron-Core makes one optimizer of the parameters that every data-parallel rank has, and another one of the experts',
which ranks share out, and chains them (megatron/core/optimizer/optimizer.py, ChainedOptimizer). Each steps its own
parameters. Two things they have to decide together: whether a step overflowed, or one would go ahead of the other; and
the norm that gradients are clipped by, or each would be scaled by another factor.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.models import ModelSpec

Chain = tuple[frozenset[str], ...]
"""The names of the parameters of each optimizer."""


def chain_of(model: ModelSpec) -> Chain:
    """The parameter names of each optimizer in the chain: dense parameters first, then experts. A model without experts
    has a single optimizer."""
    experts = frozenset(p.fqn for p in model.unique_params if p.spec.ep_dim is not None)
    others = frozenset(p.fqn for p in model.unique_params) - experts
    return tuple(names for names in (others, experts) if names)


def waiting(chain: Chain, skips: Sequence[bool]) -> frozenset[str]:
    """The parameters of the optimizers that leave a step out."""
    return frozenset().union(*(names for names, skip in zip(chain, skips, strict=True) if skip))
