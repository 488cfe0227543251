"""From what ranks observed to what differs and why. Runs in a warm worker (torch, one thread), never in the parent.

One scenario's records go in; the twin says what must be, the reference is asked whether it agrees, pieces
are assembled, compared and explained; plain data comes out, which the laboratory turns into a verdict.

*Verifies*: that twin and reference agree on this very scenario before either is believed; that every
load can be seen (the expected state right before it differs from the one right after); structure, dtype,
shape, coverage and bits of everything observed, live and written.
*Does not verify*: that a failure reproduces (the laboratory does that, in fresh ranks).
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.diagnosis import Context, Explanation, explain
from harness.diff import LAZY_STATE, Difference, as_numbers, diff
from harness.models import model_spec
from harness.observe.ambient import expected_generators
from harness.observe.assemble import assemble
from harness.observe.logical import Key, Logical, Problem, Value
from harness.observe.record import ITEMSIZE, LIVE, OWNER_ROLES, PER_RANK_ROLES, WRITTEN, Record, pack
from harness.oracle import pretrained, twin
from harness.oracle.carried import carried, without_addresses
from harness.oracle.contracts import NO_EXTRA_STATE, TWIN_OPTIONS, masters_in_model, rules, steps_on_gpu
from harness.oracle.host_elements import partition_matters
from harness.oracle.quantised import quantised
from harness.oracle.tags import parallel_tags
from harness.program import Op, expand, operations
from harness.readers import CheckpointError, must_be_written, read_written
from harness.reference import system as reference
from harness.result import differences_to_json, explanations_to_json
from harness.scenario import Mesh, Offload, Scenario
from harness.world.observations import read_observations


@dataclass(frozen=True)
class Judgement:
    """What one scenario's observation showed.

    differences: failing ones, structure first. normalisations: differences that a contract allows, listed and
    counted. explanations: mechanisms, most specific first. distrust: why no verdict can be given (twin and
    reference disagree, or a load that could not be seen); empty when the oracle is sound.
    """

    differences: tuple[Difference, ...]
    normalisations: tuple[Difference, ...]
    explanations: tuple[Explanation, ...]
    distrust: str


def serve(payload: bytes) -> bytes:
    """Worker entry: judge what real ranks observed.

    The request is JSON: `scenario` (axes), `observations` (files the ranks wrote), `checkpoints` (number →
    path) and `complete`: whether every rank finished every operation.
    """
    request = json.loads(payload)
    scenario = Scenario().with_axes(request["scenario"])
    ops = expand(scenario)
    complete = request["complete"]
    records = _finished(_read_observations(request["observations"], complete=complete), ops, complete=complete)
    if not complete and not records:
        return _reply(Judgement((), (), (), ""))  # the ranks failed before there was anything to compare
    records, notes = _without_notes(records)
    done = {r.op for r in records}
    written, unreadable = _read_written(scenario, [op for op in ops if op.index in done], request["checkpoints"])
    by_owners = OWNER_ROLES if rules(scenario.system).owner_groups else frozenset()
    absent = _absences(records, {op.index: op.mesh.world for op in ops}, by_owners)
    if by_owners:
        absent += _losses(records)
    return _reply(judge(scenario, [*records, *written], [*unreadable, *absent]), notes)


def serve_reference(payload: bytes) -> bytes:
    """Worker entry: run the reference in lockstep and judge it. Replies with the judgement and its packed records."""
    scenario = Scenario().with_axes(json.loads(payload)["scenario"])
    records = reference.run(scenario)
    reply = _reply(judge(scenario, records))
    return struct.pack("<Q", len(reply)) + reply + pack(records)


def judge(scenario: Scenario, records: Sequence[Record], problems: Sequence[Problem] = ()) -> Judgement:
    """Compare a scenario's records with what must be.

    Args:
        records: of all ranks, live and written, of operations that every rank completed.
        problems: found while reading what was written.
    """
    records = [without_addresses(record) for record in records]
    observed, found = assemble(records)
    expected = _expected(scenario, observed, {p.key.op for p in problems if p.kind == "unreadable"})
    differences = diff(expected, observed, [*problems, *found], (LAZY_STATE,), records)
    failing = tuple(d for d in differences if d.fails)
    distrust = _blind_load(scenario, expected)
    if scenario.system == "reference" and not scenario.faults:
        distrust = distrust or _disagreement(failing)
    else:
        distrust = distrust or _oracles_disagree(scenario)
    explanations = _explained(scenario, expected, observed, failing) if failing else ()
    return Judgement(failing, tuple(d for d in differences if not d.fails), explanations, distrust)


def _explained(
    scenario: Scenario, expected: Logical, observed: Logical, failing: Sequence[Difference]
) -> tuple[Explanation, ...]:
    cold = twin.run(scenario, dict(_reported_norms(observed)), loads=False)
    context = Context(expected, observed, scenario, expand(scenario), cold)
    return tuple(explain(failing, context))


def _expected(scenario: Scenario, observed: Logical, unreadable: Set[int]) -> Logical:
    """The twin's prediction for the operations that were observed, live, and for what they wrote and can be read."""
    truth = quantised(_twin(twin_axes(scenario), _reported_norms(observed)), scenario)
    done = {key.op for key in observed}
    expected = {key: value for key, value in truth.items() if key.op in done}
    if any(key.role == "rng" for key in observed):
        at = [op for op in expand(scenario) if op.index in done]
        expected |= expected_generators(scenario.seed, at, scenario.device)
    if rules(scenario.system).pretrained:
        expected |= {
            Key(op.index, LIVE, "resolved", name): Value("utf8", (len(text),), text.encode())
            for op in expand(scenario)
            if op.kind == "build" and op.index in done
            for name, text in pretrained.recipe(scenario).items()
        }
    expected |= {
        Key(op.index, LIVE, "tag", fqn): Value("int64", (), struct.pack("<q", dim))
        for op in expand(scenario)
        if op.kind == "build" and op.index in done
        for fqn, dim in parallel_tags(scenario, op.mesh).items()
    }
    saves = [op for op in expand(scenario) if op.kind == "save" and op.index in done - unreadable]
    kept = carried(observed, expand(scenario), left_out=NO_EXTRA_STATE in scenario.options)
    expected |= {
        key: value
        for key, value in kept.items()
        if key.op in done and not (key.where == WRITTEN and key.op in unreadable)
    }
    for op in saves:
        live = {key: value for key, value in truth.items() if key.op == op.index}
        expected |= must_be_written(live, op, scenario)
    return expected


def twin_axes(scenario: Scenario) -> Scenario:
    """The scenario with every axis set to default that the twin does not depend on: scenarios that share it share
    one twin. The mesh matters through the grid, that is through whether one rank or several reduce, and where the
    contract has the partition choose a kernel."""
    mesh, load = _twin_meshes(scenario)
    offload, options = _twin_offload(scenario)
    return replace(
        scenario, system=_ruled_as(scenario.system), version="", mesh=mesh, load=load, faults=(),
        device=scenario.device if steps_on_gpu(scenario) else "cpu",
        expert_parallel=scenario.expert_parallel if _shares_experts(scenario) else 1,
        sharding=_twin_sharding(scenario),
        offload=offload, options=options, reshard_after_forward="true", checkpoint="dcp", grad_sync="last",
    )  # fmt: skip


def _twin_sharding(scenario: Scenario) -> str:
    """The sharding that stands for all that a twin does not tell apart."""
    if scenario.sharding == "zero2" or (scenario.sharding == "replicate" and not _is_offloaded(scenario)):
        return "zero1"
    return scenario.sharding


def _ruled_as(system: str) -> str:
    """The system that stands for all with the same rules."""
    return "reference" if rules(system) == rules("reference") else system


def _shares_experts(scenario: Scenario) -> bool:
    """Whether experts are shared out, so that their gradients come from fewer ranks than others'."""
    return scenario.expert_parallel > 1 and any(p.spec.ep_dim is not None for p in model_spec(scenario.model).params)


def _twin_meshes(scenario: Scenario) -> tuple[Mesh, str]:
    """Mesh and load relation as far as a twin depends on them."""
    if _shares_experts(scenario) or partition_matters(scenario):
        return scenario.mesh, scenario.load
    alone = rules(scenario.system).pretrained  # where one rank is another contract, as a world and not as a divisor
    wide = {(op.mesh.dp > 1, alone and op.mesh.world > 1) for op in expand(scenario)}
    if len(wide) > 1:
        return scenario.mesh, scenario.load
    ((divides, sharded),) = wide
    return Mesh(1, 2 if divides else 1, 2 if sharded and not divides else 1), "same"


def _twin_offload(scenario: Scenario) -> tuple[Offload, tuple[str, ...]]:
    """Offload and switches as far as a twin depends on them: on what is precision-aware, and on what is on the host."""
    if partition_matters(scenario):
        return scenario.offload, scenario.options
    if rules(scenario.system).pretrained:
        return Offload(), scenario.options
    kept = tuple(o for o in scenario.options if o in TWIN_OPTIONS)
    if masters_in_model(scenario) and "load_model_only" in operations(scenario.program):
        kept = scenario.options
    return scenario.offload if _is_offloaded(scenario) else Offload(), kept


def _is_offloaded(scenario: Scenario) -> bool:
    """Whether something is stepped on the host, by the rules of the system."""
    return scenario.offload.fraction > 0 and rules(scenario.system).host_kernel


def _reported_norms(observed: Logical) -> tuple[tuple[int, float], ...]:
    return tuple(
        (key.op, float(as_numbers(value)[0]))
        for key, value in observed.items()
        if key.role == "norm" and value.dtype in ("fp32", "fp64") and len(value.data) == ITEMSIZE[value.dtype]
    )


@lru_cache(maxsize=256)
def _twin(scenario: Scenario, norms: tuple[tuple[int, float], ...]) -> Logical:
    return twin.run(scenario, dict(norms))


def _blind_load(scenario: Scenario, expected: Logical) -> str:
    """Why a load of this scenario could do nothing unnoticed; empty if it could not."""
    ops = expand(scenario)
    for before, op in itertools.pairwise(ops):
        if op.kind not in ("load", "load_model_only") or not any(key.op == op.index for key in expected):
            continue
        states = [_params(expected, index) for index in (before.index, op.index)]
        if states[0] == states[1]:
            return f"operation {op.index} ({op.kind}) changes no parameter: a load that does nothing would pass"
    return ""


def _params(expected: Logical, op: int) -> dict[str, bytes]:
    return {key.fqn: value.data for key, value in expected.items() if key.op == op and key.role == "param"}


def _oracles_disagree(scenario: Scenario) -> str:
    """How twin and reference differ on this scenario; empty when they agree bit for bit, or, where a GPU steps, in what
    there is, in which dtype and shape."""
    sharding = scenario.sharding
    if sharding == "zero2" or (sharding == "fully_shard" and scenario.dtype.master):
        sharding = "zero1"  # the reference's masters lie in flat buffers: logically the same
    mirror = replace(
        scenario, system=_ruled_as(scenario.system), version="", checkpoint="sharded", faults=(), sharding=sharding
    )
    return _reference_against_twin(mirror)


@lru_cache(maxsize=4096)
def _reference_against_twin(scenario: Scenario) -> str:
    observed, problems = assemble(r for r in reference.run(scenario) if r.where == LIVE)
    expected = _twin(twin_axes(scenario), _reported_norms(observed))
    found = [d for d in diff(expected, observed, problems, (LAZY_STATE,)) if d.fails]
    return _disagreement([d for d in found if not (steps_on_gpu(scenario) and d.kind in ("bits", "norm"))])


def _disagreement(found: Sequence[Difference]) -> str:
    if not found:
        return ""
    first = found[0]
    seen = first.detail or f"{first.expected_first} against {first.observed_first}"
    return (
        f"twin and reference disagree in {len(found)} values, first after operation {first.key.op}: "
        f"{first.key.role} of {first.key.fqn} ({first.kind}: {seen})"
    )


def _read_observations(paths: Iterable[str], *, complete: bool) -> Iterator[Record]:
    """The records of the ranks' files; what a dying rank cut off in the middle ends its file."""
    for path in paths:
        try:
            yield from read_observations(Path(path))
        except ValueError:
            if complete:
                raise


def _finished(records: Iterable[Record], ops: Sequence[Op], *, complete: bool) -> list[Record]:
    """Without the operations that some rank of their mesh did not complete."""
    kept = list(records)
    if complete:
        return kept
    ranks: dict[int, set[int]] = {}
    for record in kept:
        ranks.setdefault(record.op, set()).add(record.rank)
    done = {op.index for op in ops if len(ranks.get(op.index, ())) == op.mesh.world}
    return [r for r in kept if r.op in done]


def _without_notes(records: Iterable[Record]) -> tuple[list[Record], dict[str, list[str]]]:
    """The records to compare, and what ranks said of themselves: the emulated symbols that some touched, and their
    devices."""
    kept: list[Record] = []
    notes: dict[str, set[str]] = {role: set() for role in _NOTES}
    for record in records:
        if record.role in _NOTES:
            notes[record.role] |= set(record.data.decode().split("\n")) - {""}
        else:
            kept.append(record)
    return kept, {role: sorted(texts) for role, texts in notes.items()}


_NOTES = ("emulated", "device")


def _absences(records: Iterable[Record], worlds: Mapping[int, int], by_owners: Set[str]) -> list[Problem]:
    """What some ranks hold and others know nothing of: real ranks record every value, an empty shard too, save for the
    roles that only owners record."""
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
    """What owners of a part of a parameter hold nothing of, though others that own some of it do: elements are counted
    over all ranks, and a copy elsewhere, or a number that every owner should have, would hide it."""
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
"""Roles of which a rank has elements if, and only if, its optimizer steps them."""

_FOLLOWS = frozenset({"step", "hyperparameter", "exp_avg", "exp_avg_sq", "momentum"})
"""Roles that a rank has, once they are created, of every parameter that it owns elements of."""

_OWNED = _HELD | _FOLLOWS


def _read_written(
    scenario: Scenario, ops: Sequence[Op], paths: Mapping[str, str]
) -> tuple[list[Record], list[Problem]]:
    records: list[Record] = []
    problems: list[Problem] = []
    for op in ops:
        if op.kind != "save":
            continue
        try:
            records += read_written(Path(paths[str(op.checkpoint)]), op, scenario)
        except CheckpointError as error:
            problems.append(Problem(Key(op.index, WRITTEN, "checkpoint", "checkpoint"), "unreadable", (), str(error)))
    return records, problems


def _reply(judgement: Judgement, notes: Mapping[str, Sequence[str]] | None = None) -> bytes:
    reply: dict[str, Any] = {
        "differences": differences_to_json(judgement.differences),
        "normalisations": differences_to_json(judgement.normalisations),
        "explanations": explanations_to_json(judgement.explanations),
        "distrust": judgement.distrust,
        **(notes or {}),
    }
    return json.dumps(reply).encode()
