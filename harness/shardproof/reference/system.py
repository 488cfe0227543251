"""The reference as a system: the full sharded optimizer of all ranks in one process, no files, no library.

`run` executes a scenario's expanded program in lockstep and returns what every rank held after every operation.
Faults are planted by whoever asks for a run: it may change the ranks of every session before they build.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from shardproof.models import model_spec
from shardproof.observe.logical import Logical
from shardproof.observe.record import Record
from shardproof.oracle.inputs import Inputs, Operation, Placement
from shardproof.program import NO_CHECKPOINT, STEPS, WRITES, seed_of_replaced
from shardproof.reference.checkpoint import Content, Saver
from shardproof.reference.observe import Observation, Observer, values_of
from shardproof.reference.placement import Catalogue, catalogue_of
from shardproof.reference.readback import read_back
from shardproof.reference.restore import Loader
from shardproof.reference.state import Session
from shardproof.reference.trainer import Trainer


class CrashError(Exception):
    """A planted fault ended the run, with the error that is this one's cause.

    Attributes:
        op: the operation in which it did. records: what was observed before it.
    """

    def __init__(self, op: Operation, records: list[Record], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.op, self.records, self.cause = op, records, cause


class Ranks:
    """All ranks of one build: the session and what steps, saves and loads it. Faults are installed here."""

    def __init__(self, inputs: Inputs, placement: Placement, catalogue: Catalogue, op: Operation) -> None:
        self.session = Session(inputs, placement, catalogue.model, catalogue, op)
        self.trainer = Trainer(self.session)
        self.saver = Saver(self.session)
        self.loader = Loader(self.session)
        self.observer = Observer(self.session, self.trainer)
        self.staged: Content = {}  # of a save that has begun and is not over

    def perform(self, op: Operation, checkpoints: dict[int, Content]) -> None:
        """Execute one operation, such as `step` or `load`, on all simulated ranks in lockstep."""
        match op.kind:
            case "build":
                self.session.build()
            case kind if kind in STEPS:
                self.trainer.step(op)
            case "save" | "keep":
                checkpoints[op.checkpoint] = self.saver.save(self.session.placement.checkpoint)
            case "save_kept":
                checkpoints[op.checkpoint] = self.saver.save_kept(checkpoints[NO_CHECKPOINT])
            case "begin_save":
                self.staged = self.saver.begin(self.session.placement.checkpoint)
            case "finish_save":
                checkpoints[op.checkpoint] = self.saver.finish(self.staged)
            case "load" | "recall":
                self.loader.load(checkpoints[op.checkpoint])
            case "load_schedule_only":
                self.loader.load_schedule_only(checkpoints[op.checkpoint])
            case "load_optimizer_only":
                self.loader.load_optimizer_only(checkpoints[op.checkpoint])
            case "load_model_only":
                self.loader.load_model_only(checkpoints[op.checkpoint])
                if self.session.inputs.load_refreshes and not self.session.inputs.masters_in_model:
                    self.session.reload_params()
            case "reload_params" if self.session.inputs.masters_in_model:
                pass
            case "reload_params":
                self.session.reload_params()
            case "replace_params":
                self.session.replace_params(seed_of_replaced(op.index))
            case "unfreeze":
                self.session.unfreeze()
            case "add_group":
                self.session.add_group()
            case other:
                raise ValueError(f"the reference has no operation {other!r}")


def run(
    inputs: Inputs,
    placement: Placement,
    *,
    observe_ops: Collection[int] | None = None,
    install: Callable[[Ranks], None] | None = None,
) -> list[Record]:
    """Everything every rank of a scenario held.

    Args:
        inputs, placement: as a contract resolves a scenario (`shardproof.oracle.contract`).
        observe_ops: indices of the operations to observe; None observes all.
        install: called with the ranks of every build before they build, to plant faults in them
            (`shardproof.faults.catalogue.planter_of`).

    Raises:
        CrashError: what was planted raised an error.
    """
    records: list[Record] = []
    plant = install or _nothing
    ours: list[Exception] = []  # errors of planting itself, such as a seam that there is not: no faults of the ranks
    reached = 0

    def planted(ranks: Ranks) -> None:
        try:
            plant(ranks)
        except Exception as error:
            ours.append(error)
            raise

    try:
        for op, ranks, content in _performed(inputs, placement, planted):
            reached = op.index
            if observe_ops is None or op.index in observe_ops:
                observed = list(ranks.observer.observe(op))
                if content is not None:
                    observed += read_back(content, ranks.session.model, op.index)
                records += observed
            reached += 1
    except Exception as error:
        if error in ours or install is None:
            raise
        raise CrashError(inputs.operations[reached], records, error) from error
    return records


def look(
    inputs: Inputs, placement: Placement, *, observe_ops: Collection[int] | None = None
) -> tuple[Logical | None, list[Record]]:
    """The same without faults, the short way: what lived as whole values, and the records of what was written.

    Returns:
        No values where they cannot be told without a closer look at the records of `run`.
    """
    observations: list[Observation] = []
    written: list[Record] = []
    for op, ranks, content in _performed(inputs, placement, _nothing):
        if observe_ops is None or op.index in observe_ops:
            observations.append(ranks.observer.look(op))
            if content is not None:
                written.extend(read_back(content, ranks.session.model, op.index))
    return values_of(observations), written


def _performed(
    inputs: Inputs, placement: Placement, install: Callable[[Ranks], None]
) -> Iterator[tuple[Operation, Ranks, Content | None]]:
    """Perform one operation after the other; gives the ranks right after each, and what a save wrote."""
    checkpoints: dict[int, Content] = {}
    ranks: Ranks | None = None
    for op in inputs.operations:
        if op.kind == "build":
            catalogue = catalogue_of(model_spec(placement.models[op.index]), inputs.seed)
            ranks = Ranks(inputs, placement, catalogue, op)
            install(ranks)
        assert ranks is not None
        ranks.perform(op, checkpoints)
        yield op, ranks, checkpoints[op.checkpoint] if op.kind in WRITES else None


def _nothing(ranks: Ranks) -> None:
    """Plants no fault."""
