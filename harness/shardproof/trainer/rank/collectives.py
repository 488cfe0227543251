"""Which collectives a rank took part in, as torch's flight recorder says: each with how many numbers it carries, among
which ranks and, in a process that `torch.compile` has been used in, the line that it comes from: to name lines, the
recorder imports what compiles, which takes a second.

The recorder writes down whatever reaches a process group of gloo or NCCL, of C++ code as of DistributedDataParallel
too, and takes no part in it. *Does not see* more than the latest `KEPT` of an operation, and torch before 2.9 on gloo.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import COLLECTIVES
from shardproof.trainer.rank.lines import innermost

KEPT = 2000
_SIZE = "TORCH_FR_BUFFER_SIZE"
_NAMES_LINES = "torch._inductor.codecache"


class Collectives:
    """The collectives since the latest record. reductions: those of the latest one, each by its group and by which of
    the group's collectives it is."""

    def __init__(self) -> None:
        os.environ.setdefault(_SIZE, str(KEPT))  # which torch reads at a process' first collective
        self._next = 0
        self.reductions = set[tuple[str, int]]()

    def records(self, op: int, rank: int) -> Iterator[Record]:
        """What there was as a record that is not compared: kind, how many numbers, among which ranks, where, of
        which dtype, and how often. None in a process whose recorder has not recorded anything yet, and may be one that
        never does."""
        groups = {name: dist.get_process_group_ranks(group) for group, name in _groups().items()}
        every = list(range(dist.get_world_size())) if dist.is_initialized() else []
        found: Counter[tuple[str, int, tuple[int, ...], str, str]] = Counter()
        new = self._new()
        self.reductions = {(entry["process_group"][0], entry.get("collective_seq_id", 0)) for entry in new
                           if "reduce" in entry["profiling_name"]}  # fmt: skip
        if not self._next:
            return
        for entry in new:
            kind = entry["profiling_name"].partition(":")[2]
            ranks = groups.get(entry["process_group"][0], every)
            numbers = sum(prod(sizes) for sizes in entry["input_sizes"])
            line = innermost((frame["filename"], frame["line"]) for frame in entry.get("frames", ()))
            dtype = (entry.get("input_dtypes") or [""])[0]
            found[kind, numbers, tuple(ranks), line, dtype] += 1
        data = json.dumps([[*each, often] for each, often in found.items()]).encode()
        yield whole(op, rank, COLLECTIVES, "", "utf8", (len(data),), data)

    def _new(self) -> list[dict[str, Any]]:
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
        try:
            lines = _NAMES_LINES in sys.modules
            entries = pickle.loads(dump(True, lines, False))["entries"] if dump else []  # of this very process
        except Exception:  # a release whose recorder knows no such call: nothing is said of collectives
            return []
        new = [entry for entry in entries if entry["record_id"] >= self._next and not entry["is_p2p"]]
        self._next = max((entry["record_id"] + 1 for entry in entries), default=self._next)
        return new


def begun_collectives() -> dict[str, int]:
    """How many collectives this process has begun in each of its groups, by the groups' own count; of a backend, or a
    release, that does not count, none."""
    try:
        groups: dict[Any, str] = _groups()
        return {name: group._get_sequence_number_for_group() for group, name in groups.items()}
    except Exception:  # also of a group that this rank is not in
        return {}


def _groups() -> dict[Any, str]:
    return dict(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else {}
