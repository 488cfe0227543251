"""From what ranks observed to what differs and why. Runs in a warm worker (torch, one thread), never in the parent.

The steps, in the order of the code:

1. `gather`: read the ranks' records, leave out operations that some rank did not complete, and read the checkpoints
   back with a reader of our own.
2. `judge_found`: look for what a rank should hold and recorded nothing of.
3. `judge`: join the pieces into logical tensors, ask the twin what must be, compare, and ask the reference whether it
   agrees with the twin on this very scenario.
4. `_explained`: after a difference, look for a mechanism that produces exactly these bits.

The answer is plain data (`Judgement`), which the laboratory turns into a verdict. For example: rank 1 stepped with a
stale master. Its records of `master` and `param` differ from the twin's from operation 3 on, the reference agrees with
the twin, and the rule `stale_copy_won` recognises the bits of the run that never loaded.

*Verifies*: that twin and reference agree on this very scenario before either is believed; that every load can be seen
(the expected state right before it differs from the one right after); structure, dtype, shape, coverage and bits of
everything observed, live and written.
*Does not verify*: that a failure reproduces (the laboratory does that, in fresh ranks).
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from shardproof.diagnosis import Context, Explanation, explain_refusal
from shardproof.diagnosis.rules.engine import explain
from shardproof.diff import LAZY_STATE, Difference, as_numbers, diff
from shardproof.faults.catalogue import planter_of
from shardproof.laboratory.oracle_agreement import describe_disagreement, known_to_both
from shardproof.loading import scenario_during
from shardproof.observe.ambient import expected_generators
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Problem
from shardproof.observe.record import ITEMSIZE, LIVE, OWNER_ROLES, PER_RANK_ROLES, WRITTEN, Record, pack
from shardproof.observe.settings import SETTING
from shardproof.oracle import twin
from shardproof.oracle.cold_run import ColdRun
from shardproof.oracle.extra_state import EXTRA_STATE, carried, without_addresses
from shardproof.oracle.inputs import Inputs, Placement
from shardproof.oracle.reported import NOTHING, Reported
from shardproof.oracle.settings import kept_settings
from shardproof.program import BLIND, LOADS, WRITES, Op, expand
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.readers.errors import CheckpointError, UnfamiliarError
from shardproof.readers.numbered import named
from shardproof.readers.stored import TorchStored
from shardproof.reference import system as reference
from shardproof.result import differences_to_json, explanations_to_json
from shardproof.scenario import Scenario
from shardproof.schedules import SCHEDULE
from shardproof.tensor_pictures import pack_elements
from shardproof.world.observations import read_observations


@dataclass(frozen=True)
class Judgement:
    """What one scenario's observation showed.

    * differences: those that fail, structure first.
    * normalisations: differences that the contract allows, listed and counted.
    * explanations: mechanisms, most specific first.
    * distrust: why there is no verdict: twin and reference disagree, or a load could do nothing unseen; else empty.
    * elements: those of what differs, packed for a reader (`shardproof.tensor_pictures`).
    """

    differences: tuple[Difference, ...]
    normalisations: tuple[Difference, ...]
    explanations: tuple[Explanation, ...]
    distrust: str
    elements: bytes = b""


Refused = Sequence[Any]
"""The text of an error that a library raised, and the index of the operation that it ended."""


@dataclass(frozen=True)
class ResolvedScenario:
    """A scenario with its expanded operations, the oracle's inputs and the reference's layout, as its contract says."""

    scenario: Scenario
    system: System
    ops: tuple[Op, ...]
    inputs: Inputs
    placement: Placement

    @classmethod
    def from_scenario(cls, scenario: Scenario) -> ResolvedScenario:
        """A scenario resolved by its system's contract."""
        system = system_named(scenario.system)
        return cls(scenario, system, expand(scenario), *system.contract.resolve(scenario))


def serve(payload: bytes) -> bytes:
    """Worker entry: judge what real ranks observed.

    The request is JSON: `scenario` (axes), `observations` (files the ranks wrote), `checkpoints` (number →
    path), `complete`: whether every rank finished every operation, and, where one raised, `refused`: the error's text
    and the operation.
    """
    request = json.loads(payload)
    found = gather(request)
    if not found.records and not request["complete"]:
        return _reply(Judgement((), (), (), ""))  # the ranks failed before anything could be compared
    return _reply(judge_found(found, request.get("refused")), found.notes)


@dataclass(frozen=True)
class RankObservations:
    """What real ranks left behind. records: live and written, of operations that every rank completed. unreadable: what
    is wrong with checkpoints. notes: what ranks said of themselves."""

    case: ResolvedScenario
    records: list[Record]
    unreadable: list[Problem]
    notes: dict[str, list[str]]


def gather(request: Mapping[str, Any]) -> RankObservations:
    """Read everything that a request to `serve` names: the ranks' observations and the checkpoints that they wrote."""
    case = ResolvedScenario.from_scenario(Scenario.from_axes(request["scenario"]))
    complete = request["complete"]
    records = _finished(_read_observations(request["observations"], complete=complete), case.ops, complete=complete)
    records, notes = _without_notes(records)
    done = {r.op for r in records}
    saved = [op for op in case.ops if op.index in done]
    written, unreadable, unfamiliar = _read_written(case, saved, request["checkpoints"])
    if not any(record.role == SETTING for record in records):  # which alone say what the settings must be
        written = [record for record in written if record.role != SETTING]
    notes |= {UNFAMILIAR: unfamiliar} if unfamiliar else {}
    return RankObservations(case, [*records, *written], unreadable, notes)


def judge_found(found: RankObservations, refused: Refused | None = None) -> Judgement:
    """Compare what was found with what must be, and add what some ranks should have recorded and did not."""
    case = found.case
    by_owners = OWNER_ROLES if case.inputs.owner_groups else frozenset()
    absent = _absences(found.records, {op.index: op.mesh.world for op in case.ops}, by_owners)
    if by_owners:
        absent += _losses(found.records)
    return judge(case, found.records, [*found.unreadable, *absent], refused)


def serve_reference(payload: bytes) -> bytes:
    """Worker entry: run the reference in lockstep and judge it. Replies with the judgement and, unless nothing differs,
    the packed records: those of a pass would be dropped, and come again whenever the scenario does."""
    found, records, notes = run_reference(
        ResolvedScenario.from_scenario(Scenario.from_axes(json.loads(payload)["scenario"]))
    )
    reply = _reply(found, notes)
    return struct.pack("<Q", len(reply)) + reply + (pack(records) if found.differences or found.distrust else b"")


def run_reference(case: ResolvedScenario) -> tuple[Judgement, list[Record], dict[str, Any]]:
    """The judgement of a run of the reference, with the scenario's faults planted in it; its records, and notes.

    A planted fault may end the run: then `crash` of the notes has the error, and what was observed before it is judged.
    A fault that changed no record has had `no_effect`.
    """
    if not case.scenario.faults and (passed := _passed(case)) is not None:
        return passed, [], {}
    try:
        records = reference.run(case.inputs, case.placement, install=planter_of(case.scenario.faults))
    except reference.CrashError as crash:
        refused = (str(crash.cause), crash.op.index)
        return judge(case, crash.records, refused=refused), crash.records, {"crash": _error(crash)}
    found = judge(case, records)
    notes: dict[str, Any] = {}
    if case.scenario.faults and not found.differences:
        clean = reference.run(case.inputs, case.placement)
        notes["no_effect"] = assemble(records) == assemble(clean)
    return found, records, notes


def _error(crash: reference.CrashError) -> dict[str, Any]:
    """What `RankError` says of an error in one of the simulated ranks."""
    text = "".join(traceback.format_exception(crash.cause))
    error = {"type": type(crash.cause).__name__, "message": str(crash.cause), "traceback": text, "errno": None}
    return {"rank": 0, "op_index": crash.op.index, "op": crash.op.kind, "stage": "op", **error}


def _passed(case: ResolvedScenario) -> Judgement | None:
    """The judgement of a run of the reference in which nothing differs, without a record of every rank; None where it
    takes these records to tell."""
    observed, written = reference.look(case.inputs, case.placement)
    if observed is None:
        return None
    read, problems = assemble(written)
    observed |= read
    expected = _expected(case, observed, frozenset())
    if problems or diff(expected, observed):
        return None
    return Judgement((), (), (), _blind_load(case.ops, expected))


def judge(
    case: ResolvedScenario, records: Sequence[Record], problems: Sequence[Problem] = (), refused: Refused | None = None
) -> Judgement:
    """Compare a scenario's records with what must be.

    Args:
        records: of all ranks, live and written, of operations that every rank completed.
        problems: found while reading what was written. refused: the error that ended the run.
    """
    records = [without_addresses(record) for record in records]
    observed, found = assemble(records)
    expected = _expected(case, observed, {p.key.op for p in problems if p.kind == "unreadable"})
    differences = diff(expected, observed, [*problems, *found], (LAZY_STATE,), records)
    failing = tuple(d for d in differences if d.fails)
    distrust = _blind_load(case.ops, expected)
    if case.system.world == "lockstep" and not case.scenario.faults:
        distrust = distrust or describe_disagreement(failing)
    else:
        distrust = distrust or _oracles_disagree(case)
    explanations = _explained(case, expected, observed, failing, records, refused) if failing or refused else ()
    elements = pack_elements(failing, expected, observed, records) if failing else b""
    return Judgement(failing, tuple(d for d in differences if not d.fails), explanations, distrust, elements)


def _explained(
    case: ResolvedScenario,
    expected: Logical,
    observed: Logical,
    failing: Sequence[Difference],
    records: Sequence[Record],
    refused: Refused | None,
) -> tuple[Explanation, ...]:
    """What the differences say or, where they say nothing, the text of the error that ended the run."""
    cold = ColdRun(case.inputs, _reported(observed), expected)
    context = Context(expected, observed, case.scenario, case.ops, cold, case.inputs, records)
    found = explain(failing, context, case.system.rules)
    return tuple(found or (explain_refusal(refused[0], refused[1], context) if refused else ()))


_OP_AND_ROLE = itemgetter(Key._fields.index("op"), Key._fields.index("role"))


def _expected(case: ResolvedScenario, observed: Logical, unreadable: Set[int]) -> Logical:
    """What must be observed: the twin's values, live, and what the saves must have written of them.

    Only operations that were observed count, and only checkpoints that could be read.
    """
    scenario, contract = case.scenario, case.system.contract
    seen = set(map(_OP_AND_ROLE, observed))
    done, roles = {op for op, _ in seen}, {role for _, role in seen}
    reported = _reported(observed) if not roles.isdisjoint(("norm", "direction")) else NOTHING
    truth = contract.completed(_twin(case.inputs, reported), observed, scenario, done)
    whole = len(done) == len(case.ops)
    expected = dict(truth) if whole else {key: value for key, value in truth.items() if key.op in done}
    if "rng" in roles and case.system.world != "lockstep":  # whose ranks are no processes
        at = [op for op in case.ops if op.index in done]
        expected = expected_generators(scenario.seed, at, scenario.device) | expected  # what a contract knows better
    saves = [op for op in case.ops if op.kind in WRITES and op.index in done - unreadable]
    kept = kept_settings(observed, case.ops, contract.run_keeps(scenario)) if SETTING in roles else {}
    if EXTRA_STATE in roles:
        kept |= carried(observed, case.ops, left_out=not contract.stores_extra_state(scenario))
    readable = {(LIVE, op) for op in done} | {(WRITTEN, op) for op in done - unreadable}
    expected |= {key: value for key, value in kept.items() if (key.where, key.op) in readable}
    live: dict[int, Logical] = {op.taken: {} for op in saves}
    for values in (truth, kept) if saves else ():
        for key, value in values.items():
            if key[0] in live:
                live[key[0]][key] = value
    for op in saves:
        taken = live[op.taken]
        if op.taken != op.index:
            taken = {key._replace(op=op.index): value for key, value in taken.items()}
        expected |= _must_be_written(case, taken, op)
    return expected


def _must_be_written(case: ResolvedScenario, live: Logical, op: Op) -> Logical:
    """The values that a checkpoint must hold after a save. The reference's formats keep every role that lasts."""
    if case.system.world == "lockstep":
        return TorchStored().must_hold(live, op, scenario_during(case.scenario, op))
    return case.system.stored.must_hold(live, op, scenario_during(case.scenario, op))


def _reported(observed: Logical) -> Reported:
    """What ranks reported of their steps, where it is of a kind that the twin can take."""
    norms = tuple(
        (op, float(as_numbers(value)[0]))
        for (op, _, role, _), value in observed.items()
        if role == "norm" and value.dtype in ("fp32", "fp64") and len(value.data) == ITEMSIZE[value.dtype]
    )
    directions = tuple(((op, fqn), value) for (op, _, role, fqn), value in observed.items() if role == "direction")
    return Reported(norms, directions)


@lru_cache(maxsize=256)
def _twin(inputs: Inputs, reported: Reported) -> Logical:
    return twin.run(inputs, reported)


def _blind_load(ops: Sequence[Op], expected: Logical) -> str:
    """Why a load of this program could do nothing without being noticed; empty if none could.

    If what a load restores is expected to be as it was before it, a load that does nothing passes: the parameters or,
    of a load of the optimizer alone, its state and settings. Then the scenario proves nothing about loading, and its
    verdict is `unknown`.
    """
    loads = [(before, op) for before, op in itertools.pairwise(ops) if op.kind in LOADS]
    restored: dict[int, dict[str, dict[str, bytes]]] = {op.index: {} for pair in loads for op in pair}
    for (index, where, role, fqn), value in expected.items() if loads else ():
        if index in restored and where == LIVE and role in _PART_OF:
            restored[index].setdefault(_PART_OF[role], {})[f"{role} {fqn}"] = value.data
    done = {index for index, _, _, _ in expected} if loads else ()
    for before, op in loads:
        if op.index not in done:
            continue
        of = _LOADS_ALONE.get(op.kind, "model")
        if restored[before.index].get(of) == restored[op.index].get(of):
            what = "no parameter" if of == "model" else "nothing that it restores"
            return f"operation {op.index} ({op.kind}) changes {what}: {BLIND}"
    return ""


_LOADS_ALONE = {"load_optimizer_only": "optimizer", "load_schedule_only": "schedule"}
"""Load of one part → which; all others restore the model's parameters among others."""

_PART_OF = {
    "param": "model", "scheduler": "schedule", SCHEDULE: "schedule",
    **dict.fromkeys(("master", "exp_avg", "exp_avg_sq", "momentum", "step", "hyperparameter"), "optimizer"),
}  # fmt: skip
"""Role → the part of the state that it belongs to, of those that loads restore."""


def _oracles_disagree(case: ResolvedScenario) -> str:
    """How twin and reference differ on this scenario; empty where they agree.

    They must agree bit for bit. Where a GPU's kernel steps, numpy cannot know its bits, and they must agree on what
    there is, in which dtype and shape.
    """
    return _reference_against_twin(case.inputs, case.placement)


@lru_cache(maxsize=4096)
def _reference_against_twin(inputs: Inputs, placement: Placement) -> str:
    observed, _ = reference.look(inputs, placement)
    problems: list[Problem] = []
    if observed is None:
        observed, problems = assemble(r for r in reference.run(inputs, placement) if r.where == LIVE)
    expected = _twin(inputs, _reported(observed))
    observed, expected = (known_to_both(logical, placement.model) for logical in (observed, expected))
    found = [d for d in diff(expected, observed, problems, (LAZY_STATE,)) if d.fails]
    of_bits = ("bits", "norm", "direction") if inputs.steps_on_gpu else ()
    return describe_disagreement([d for d in found if d.kind not in of_bits])


def _read_observations(paths: Iterable[str], *, complete: bool) -> Iterator[Record]:
    """The records of the ranks' files. A rank that died while it wrote leaves half a record behind, which ends its
    file."""
    for path in paths:
        try:
            yield from read_observations(Path(path))
        except ValueError:
            if complete:
                raise


def _finished(records: Iterable[Record], ops: Sequence[Op], *, complete: bool) -> list[Record]:
    """The records without those of operations that some rank of their mesh did not complete."""
    kept = list(records)
    if complete:
        return kept
    ranks: dict[int, set[int]] = {}
    for record in kept:
        ranks.setdefault(record.op, set()).add(record.rank)
    done = {op.index for op in ops if len(ranks.get(op.index, ())) == op.mesh.world}
    return [r for r in kept if r.op in done]


def _without_notes(records: Iterable[Record]) -> tuple[list[Record], dict[str, list[str]]]:
    """Splits records into values to compare and notes: the rank's device, and the emulated symbols that it used."""
    kept: list[Record] = []
    notes: dict[str, set[str]] = {role: set() for role in _NOTES}
    for record in records:
        if record.role in _NOTES:
            notes[record.role] |= set(record.data.decode().split("\n")) - {""}
        else:
            kept.append(record)
    return kept, {role: sorted(texts) for role, texts in notes.items()}


_NOTES = ("emulated", "device")
UNFAMILIAR = "unfamiliar"
"""The key of a reply's notes that has what readers did not know of checkpoints."""


def _absences(records: Iterable[Record], worlds: Mapping[int, int], by_owners: Set[str]) -> list[Problem]:
    """Values that some ranks recorded and others of the same mesh did not.

    A real rank records every value, one of which it holds nothing as an empty piece. Roles that only the owners of a
    parameter record are left out here; `_losses` looks at them.
    """
    holders: dict[Key, set[int]] = {}
    for record in records:
        if record.where == LIVE and record.role not in PER_RANK_ROLES and record.role not in by_owners:
            holders.setdefault(Key(record.op, LIVE, record.role, record.fqn), set()).add(record.rank)
    return [
        Problem(key, "gap", missing, f"ranks {list(missing)} hold nothing of it")
        for key, ranks in holders.items()
        if (missing := tuple(sorted(set(range(worlds[key.op])) - ranks)))
    ]


def _losses(records: Iterable[Record]) -> list[Problem]:
    """Owners of a part of a parameter that hold nothing of some value, though other owners hold it.

    Assembly does not see this: it counts elements over all ranks, and a copy on another rank fills the hole. For
    example, two ranks own halves of a weight and both have a master, but only one has a step counter: each shape is
    complete, and one rank's bias correction is lost.
    """
    owners: dict[tuple[int, str], set[int]] = {}
    holders: dict[tuple[int, str], dict[Key, set[int]]] = {}
    for record in records:
        if record.where != LIVE or record.role not in _OWNED:
            continue
        part = (record.op, record.fqn.rpartition(".")[0] if record.role == "hyperparameter" else record.fqn)
        if record.data and record.role in _HELD:
            owners.setdefault(part, set()).add(record.rank)
        if record.data and record.role in _FOLLOWS:
            key = Key(record.op, LIVE, record.role, record.fqn)
            holders.setdefault(part, {}).setdefault(key, set()).add(record.rank)
    return [
        Problem(key, "gap", lost, f"ranks {list(lost)} own some of the parameter and hold nothing of it")
        for part, ranks in owners.items()
        for key, having in holders.get(part, {}).items()
        if (lost := tuple(sorted(ranks - having)))
    ]


_HELD = frozenset({"master", "grad", "exp_avg", "exp_avg_sq", "momentum"})
"""Roles of which a rank has elements if, and only if, its optimizer steps them: they say who owns what."""

_FOLLOWS = frozenset({"step", "hyperparameter", "exp_avg", "exp_avg_sq", "momentum"})
"""Roles that a rank must have of every parameter that it owns elements of, once they are created."""

_OWNED = _HELD | _FOLLOWS


def _read_written(
    case: ResolvedScenario, ops: Sequence[Op], paths: Mapping[str, str]
) -> tuple[list[Record], list[Problem], list[str]]:
    """Read the checkpoints of a run: their records, the problems found, and messages about forms that no reader
    knows."""
    unfamiliar: list[str] = []
    records: list[Record] = []
    problems: list[Problem] = []
    for op in ops:
        if op.kind not in WRITES:
            continue
        try:
            path, groups = Path(paths[str(op.checkpoint)]), case.inputs.groups_at(op.index)
            found = case.system.stored.read(path, op, scenario_during(case.scenario, op))
            records += named(found, groups, by_parameter=case.inputs.owner_groups, origin=str(path))
        except CheckpointError as error:
            if isinstance(error, UnfamiliarError):
                unfamiliar.append(str(error))
            problems.append(Problem(Key(op.index, WRITTEN, "checkpoint", "checkpoint"), "unreadable", (), str(error)))
    return records, problems, unfamiliar


def _reply(judgement: Judgement, notes: Mapping[str, Any] | None = None) -> bytes:
    reply: dict[str, Any] = {
        "differences": differences_to_json(judgement.differences),
        "normalisations": differences_to_json(judgement.normalisations),
        "explanations": explanations_to_json(judgement.explanations),
        "distrust": judgement.distrust,
        "elements": base64.b64encode(judgement.elements).decode(),
        **(notes or {}),
    }
    return json.dumps(reply).encode()
