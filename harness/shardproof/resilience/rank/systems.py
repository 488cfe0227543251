"""The stacks of systems: a system's own rank saves and loads, alone, as a training script around it does.

A state is what the rank has after some steps: the model, its masters, the optimizer's state and settings. Each save has
a folder of its own, and a small file beside them says which one is whole: the library writes it, or the training script
around it (`Tracker`). A load builds a model with other initial values and reads the folder that this file names.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from shardproof.entry import resolve
from shardproof.models import model_spec
from shardproof.observe.record import Record
from shardproof.program import Op, expand
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.scenario import Scenario

ROLES = frozenset({"param", "buffer", "master", "exp_avg", "exp_avg_sq", "momentum", "step", "hyperparameter"})
"""Of what a rank holds, what a checkpoint has to bring back."""


def digest_of(record: Record) -> str:
    """The digest of a record's type, place and bytes."""
    told = f"{record.dtype} {record.shape} {record.start} {record.size} ".encode()
    return hashlib.blake2b(told + bytes(record.data), digest_size=12).hexdigest()


class OfSystem:
    """Saves and loads by the rank of a system.

    Args:
        system: its name. axes: of the scenario, beyond what the system takes by default. tracker: name of the file that
            says which save is the newest. by_script: the training script writes it, not the library.
    """

    def __init__(self, system: str, axes: Mapping[str, str], tracker: str, by_script: bool) -> None:
        self.system = system_named(system)
        self.scenario = Scenario(system=system, program="build step save build load").with_axes(dict(axes))
        self.tracker, self.by_script = tracker, by_script

    def warm(self) -> None:
        if self.system.library:
            resolve(self.system.entry(self.system.library))(self.scenario.device)
        if self.system.warm_up:
            resolve(self.system.entry(self.system.warm_up))()

    def state(self, generation: int, run: int) -> Any:
        """The rank after so many steps of a run."""
        rank = self._rank(run)
        for op in expand(replace(self.scenario, program=" ".join(["build", *["step"] * generation]))):
            getattr(rank, op.kind)(op)
        return rank

    def save(self, folder: Path, state: Any, generation: int, run: int) -> None:
        state.context = replace(state.context, directory=folder)
        state.save(self._op("save", generation))
        if self.by_script:
            with (folder / self.tracker).open("w", encoding="ascii") as file:
                file.write(str(generation))

    def load(self, folder: Path) -> Any:
        number = re.search(r"\d+$", (folder / self.tracker).read_text("utf-8"))
        if number is None:
            raise ValueError(f"{self.tracker} names no step")
        rank = self._rank(1)
        rank.build(replace(self._op("build"), init_seed=9))
        rank.context = replace(rank.context, directory=folder)
        rank.load(self._op("load", int(number[0])))
        if getattr(rank, "loaded", folder) is None:  # the library returns that it found nothing, and raises nothing
            raise FileNotFoundError(f"{self.system.name} says that it loaded nothing")
        return rank

    def digests(self, state: RankSystem) -> Mapping[str, str]:
        found = {}
        for record in state.observe(self._op("step")):
            if record.role in ROLES:
                found[f"{record.role} {record.fqn} {record.start}"] = digest_of(record)
        return found

    def _op(self, kind: str, checkpoint: int = 0) -> Op:
        op = next(op for op in expand(self.scenario) if op.kind == kind)
        return replace(op, checkpoint=checkpoint)

    def _rank(self, run: int) -> Any:
        """A rank that is not built yet. What a build writes goes to a folder of its own among the trials'."""
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        scenario = replace(self.scenario, seed=run)
        own = Path(tempfile.mkdtemp(prefix="built-"))
        context = RankContext(scenario, model_spec(scenario.model), scenario.mesh, 0, own, self.system.contract)
        return resolve(self.system.entry(self.system.rank))(context)
