"""A trainer of a user's own, as a stack: its `build`, `step`, `save` and `load`, or its `fit`, in ranks of the cell.

To save the state of generation n is to build the cell in fresh ranks, make n steps, and call `save`. A load builds
from another seed and calls `load`. What the ranks hold afterwards is found as `shardproof trainer` finds it, and
joined. Of a trainer with `fit` what is compared is the state after the first update of the run that resumed, since
nothing can be seen before.

A folder of trials holds the folders that `save` is given: one, `checkpoint0`, that each save goes over; or one for each
generation, `checkpoint3`, and a file `latest` that names the newest (`shardproof.resilience.trainer_stacks`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from shardproof.models import model_spec
from shardproof.observe.record import Record
from shardproof.program import FIT, NO_CHECKPOINT, Op, expand
from shardproof.protocol.system import RankContext
from shardproof.resilience.rank.collective_marks import marked
from shardproof.resilience.rank.ranks import in_ranks
from shardproof.resilience.rank.systems import digest_of
from shardproof.resilience.trainer_stacks import STEPS, TRACKER
from shardproof.resilience.trial import LOAD, NOTHING
from shardproof.trainer.arms import NO_STATE
from shardproof.trainer.cells import scenario_of
from shardproof.trainer.rank import Rank
from shardproof.trainer.rank.warm import warm_up
from shardproof.trainer.system import VARIANT, register

Digests = Mapping[str, str]

OTHER_SEED = 9
"""From which ranks that load are built, so that a load which does nothing is seen."""
AFTER_ALL = 4
"""Until so many updates a `fit` goes on that resumes: one more than the latest save has."""


class OfTrainer:
    """Saves and loads by a trainer.

    Args:
        trainer: its file, and behind a colon the class. cell: axis → the text of its value. layout: `LAYOUTS` of
            `shardproof.resilience.trainer_stacks`.
    """

    def __init__(self, trainer: str, cell: Mapping[str, str], layout: str) -> None:
        self.plugin, self.system = trainer, register(trainer)
        found = self.system.trainer
        assert found is not None
        self.described, self.scenario, self.steps = found, scenario_of(found, cell), layout == STEPS
        first = expand(self.scenario)[0]
        self.first, self.world = first, first.mesh.world

    def warm(self) -> None:
        os.environ[VARIANT] = self.plugin
        warm_up()

    def state(self, generation: int, run: int) -> Digests:
        """Nothing yet: only the ranks have a state, and they begin with the save."""
        return {}

    def digests(self, state: Digests) -> Digests:
        return state

    def save(self, folder: Path, state: Digests, generation: int, run: int) -> Digests:
        number = generation if self.steps else 0
        built = Path(tempfile.mkdtemp(prefix="built-"))

        def body() -> Digests:
            rank = self._rank(folder, built)
            if self.described.fits:
                with marked(folder):
                    rank.fit(self._op(FIT, generation, run, checkpoint=number))
                    self._name(folder, number)
                return {}
            rank.build(self._op("build", seed=run))
            for index in range(generation):
                rank.step(self._op("step", index))
            found = digests_of(rank.observe(self._op("step", generation)))
            with marked(folder):
                rank.save(self._op("save", generation, checkpoint=number))
                self._name(folder, number)
            return found

        return self._joined(body, folder)

    def load(self, folder: Path) -> Digests:
        number = int((folder / TRACKER).read_text("ascii")) if self.steps else 0
        built = Path(tempfile.mkdtemp(prefix="built-"))

        def body() -> Digests:
            rank = self._rank(folder, built)
            if self.described.fits:
                rank.fit(replace(self._op(FIT, AFTER_ALL, OTHER_SEED), taken=number))
                return digests_of(rank.observe(self._op("step")))
            rank.build(self._op("build", seed=OTHER_SEED))
            before = digests_of(rank.observe(self._op("build")))
            rank.load(self._op("load", checkpoint=number))
            found = digests_of(rank.observe(self._op("load")))
            return {**found, LOAD: NOTHING if found == before else "something"}

        return self._joined(body, folder)

    def _op(self, kind: str, iteration: int = 0, seed: int = 0, checkpoint: int = NO_CHECKPOINT) -> Op:
        return replace(self.first, kind=kind, iteration=iteration, init_seed=seed, checkpoint=checkpoint, taken=-1)

    def _rank(self, folder: Path, built: Path) -> Rank:
        """This process as a rank of the cell, not built yet."""
        scenario, mesh = self.scenario, self.first.mesh
        model, contract = model_spec(scenario.model), self.system.contract
        return Rank(RankContext(scenario, model, mesh, dist.get_rank(), folder, contract), built)

    def _name(self, folder: Path, number: int) -> None:
        """Say that a checkpoint is complete, as a careful script does: once all ranks have returned, and synced."""
        if not self.steps:
            return
        dist.barrier()
        if dist.get_rank() == 0:
            new = folder / f"{TRACKER}.new"
            with new.open("w", encoding="ascii") as file:
                file.write(str(number))
                file.flush()
                os.fsync(file.fileno())
            new.replace(folder / TRACKER)
            place = os.open(folder, os.O_RDONLY)
            os.fsync(place)
            os.close(place)

    def _joined(self, body: Callable[[], Digests], folder: Path) -> Digests:
        """The answers of all ranks, which are forked; where the cell has one rank, this process is that rank."""
        if self.world == 1:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            return body()
        found: dict[str, str] = {}
        for number, one in enumerate(in_ranks(self.world, folder.parent, lambda _: body())):
            for name, digest in one.items():
                found[name if found.setdefault(name, digest) == digest else f"{name} on rank {number}"] = digest
        return found


def digests_of(records: Iterable[Record]) -> dict[str, str]:
    """Name of each piece of a state → digest of its type, place and bytes."""
    found = {}
    for record in records:
        if record.role not in NO_STATE:
            at = f" {record.start}" if any(record.start) else ""
            found[f"{record.role} {record.fqn}{at}"] = digest_of(record)
    return found
