"""Stand-in until the real one is merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardproof.mechanisms.probe_module import DTYPE_NAME, tensor_bytes
from shardproof.observe.record import Record, whole


@dataclass(frozen=True)
class Item:
    name: str
    kind: str
    detail: str


class State:
    def __init__(self, roots: Mapping[str, object], rank: int, world: int) -> None:
        self.roots, self.rank = roots, rank
        self.found: list[Item] = []
        self.hidden: list[Item] = []
        for name, value in roots.items():
            if isinstance(value, (nn.Module, torch.optim.Optimizer)):
                self.found.append(Item(name, type(value).__name__, "stub"))

    def records(self, op: int) -> Iterator[Record]:
        names = {}
        for value in self.roots.values():
            if isinstance(value, nn.Module):
                for n, p in value.named_parameters():
                    n = n.replace("module.", "")
                    names[p] = n
                    yield whole(op, self.rank, "param", n, DTYPE_NAME[p.dtype], tuple(p.shape), tensor_bytes(p))
        for value in self.roots.values():
            if isinstance(value, torch.optim.Optimizer):
                for p, kept in value.state.items():
                    for k, t in kept.items():
                        t = torch.as_tensor(t)
                        role = k if k in ("exp_avg", "exp_avg_sq", "step") else "state"
                        yield whole(op, self.rank, role, names[p], DTYPE_NAME[t.dtype], tuple(t.shape), tensor_bytes(t))
