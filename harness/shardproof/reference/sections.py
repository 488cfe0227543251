"""The sections of fused weights, such as query, key and value in one matrix, and the rows of each section.

A SwiGLU layer's gate and up projections are one weight (megatron/core/transformer/mlp.py), and so are query, key, value
and gates of a gated delta net, in sections of several sizes (megatron/core/ssm/gated_delta_net.py). A format that takes
a fused weight apart files each section under a name of its own, whatever ranks hold of it: under FSDP and tensor
parallelism a rank's share may begin in one section and end in the next.
"""

from __future__ import annotations

from typing import NamedTuple

from shardproof.models import NamedParam


class Section(NamedTuple):
    """name: under which it is filed, after the weight's own and a colon. share: its rows, of `rows` in all; `before`
    lie in front of it."""

    name: str
    before: int
    share: int
    rows: int

    def within(self, numel: int) -> tuple[int, int]:
        """Where it begins and ends in a weight of so many elements."""
        return self.before * numel // self.rows, (self.before + self.share) * numel // self.rows


def sections(param: NamedParam) -> tuple[Section, ...]:
    """The sections of a weight along its dim 0, in order; empty where it is not fused."""
    parts = param.spec.sections
    if not parts and param.fqn.endswith("fc1.weight"):
        parts = (("gate", 1), ("up", 1))
    rows, found, before = sum(share for _, share in parts), [], 0
    for name, share in parts:
        found.append(Section(name, before, share, rows))
        before += share
    return tuple(found)


def start_of(param: NamedParam, name: str) -> int:
    """The element at which a section of a weight begins; 0 for the weight itself, whose name is empty."""
    return next((found.within(param.spec.numel)[0] for found in sections(param) if found.name == name), 0)
