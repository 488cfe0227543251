"""For tests of the probe on one process: the forward computes with whole parameters, as no mesh shards them."""

from __future__ import annotations

from collections.abc import Callable

from shardproof.mechanisms.probe_module import Box
from shardproof.models import ModelSpec


def whole_box(spec: ModelSpec) -> Callable[[str], Box]:
    """The box of a forward that computes with whole parameters."""

    def box(fqn: str) -> Box:
        shape = spec.param(fqn).spec.shape
        return (0,) * len(shape), shape

    return box
