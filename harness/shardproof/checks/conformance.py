"""The conformance kit: checks that a system must pass before its verdicts can be believed, for example that one flipped
bit is noticed in every role on every rank.

A harness that drives a library can be wrong in ways that look like a pass. Its observer may change what it observes,
its records may leave something out, its list of refusals may refuse what works. Each check below plants such a mistake,
or looks for one, in a system's own plain scenario (`[axes]` of its `conformance.toml`) with its real library:

* the plain scenario passes;
* observing changes nothing: ranks that observe at the end only hold the same bits there;
* one flipped bit is seen, in every role of every rank, live and written;
* every number of a param group is recorded together with its type, live and, where it is written, written: a judge who
  has no types compares none;
* a load that does nothing is seen, and a killed rank is a crash;
* two meshes agree: the same state, bit for bit, on another number of ranks;
* every refusal that is said to be the library's is raised by it, in the operation and with the words that are given;
* every limit and constraint can be tabulated, so that plans can count exactly;
* an axis value that nobody declared is refused.

`shardproof conformance NAME` runs them on a built-in system, or on that of a plugin. docs/adding-a-system.md says how
to read what they find.

*Verifies* the harness's half of a system. *Does not verify* the library: that is what scenarios are for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.errors import HarnessError, UsageError
from shardproof.faults.plain_scenario import plain_scenario
from shardproof.laboratory.laboratory import Laboratory, judge_request, scratch_folder
from shardproof.observe.assemble import assemble
from shardproof.observe.record import LIVE, PER_RANK_ROLES
from shardproof.observe.settings import OTHERWISE, SETTING
from shardproof.protocol.accepts import Allowed, Anything, Limit, Only, Parts
from shardproof.protocol.system import System
from shardproof.scenario import AXES, Mesh, Scenario, parse_axis
from shardproof.space.constraints import constraints_of, constraints_of_load, tabulate
from shardproof.space.files import load_space
from shardproof.verdict import Verdict
from shardproof.world.devices import gpus
from shardproof.world.job import JobOutcome

WIDEST = "nightly"
"""The space whose walks of a system the rules are tabulated over."""

ATTEMPTS, ATTEMPT_S = 2, 8.0
"""How often, and for how long, a refusal is tried before which ranks may wait for each other for ever."""

OTHER_MESHES = (Mesh(1, 4, 1), Mesh(2, 1, 1), Mesh(2, 2, 1), Mesh(1, 3, 1), Mesh(1, 1, 2), Mesh(1, 2, 2))
"""Where the plain scenario may run a second time: on the first of them that the system accepts and that draws the same
gradients."""


@dataclass(frozen=True)
class Check:
    """One check's outcome. name: what must hold. wrong: what does not hold; empty where it does. skipped: why it does
    not apply to this system; empty where it does."""

    name: str
    wrong: str = ""
    skipped: str = ""

    @property
    def line(self) -> str:
        """Its line for a reader."""
        if self.skipped:
            return f"skip  {self.name}: {self.skipped}"
        return f"FAIL  {self.name}: {self.wrong}" if self.wrong else f"ok    {self.name}"


def check_system(
    system: System, laboratory: Laboratory, version: str = "", names: Sequence[str] = ()
) -> Iterator[Check]:
    """The checks of a system, in the order in which they are reached.

    Args:
        version: the release of its library; empty for the newest. names: of `CHECKS`, those to make; all without any.

    Raises:
        UsageError: its `conformance.toml` is malformed. StoreFull: the disk filled.
    """
    bench = _Bench(system, laboratory, replace(plain_scenario(system), version=version))
    for name in names or CHECKS:
        try:
            yield from _outcomes(name, CHECKS[name](bench))
        except HarnessError as error:
            yield Check(name, str(error))


def _outcomes(name: str, found: Iterable[Check | str]) -> Iterator[Check]:
    """The checks that a check function's yields amount to: each text is a failure, and nothing at all means that the
    check holds."""
    passed = True
    for each in found:
        passed = False
        yield each if isinstance(each, Check) else Check(name, each)
    if passed:
        yield Check(name)


@dataclass(frozen=True)
class _Bench:
    system: System
    laboratory: Laboratory
    plain: Scenario

    @property
    def in_lockstep(self) -> bool:
        return self.system.world == "lockstep"

    def verdict(self, scenario: Scenario, wanted: Verdict) -> Iterator[str]:
        """What is wrong with a scenario's verdict."""
        result = self.laboratory.examine_one(scenario)
        if result.verdict is not wanted:
            said = result.signature or result.reason or ""
            yield f"{result.verdict.value} and not {wanted.value}, of {scenario}: {said}"


def _plain_passes(bench: _Bench) -> Iterator[str]:
    yield from bench.verdict(bench.plain, Verdict.PASS)


def _load_is_seen(bench: _Bench) -> Iterator[str]:
    fault = "no-op-load" if bench.in_lockstep else "boundary.skip-load"
    yield from bench.verdict(replace(bench.plain, faults=(fault,)), Verdict.MISMATCH)


def _killed_is_crash(bench: _Bench) -> Iterator[Check | str]:
    if bench.in_lockstep:
        yield Check("a killed rank is a crash", skipped="no process is a rank in lockstep")
        return
    yield from bench.verdict(replace(bench.plain, faults=("boundary.kill-rank",)), Verdict.CRASH)


def _observing_changes_nothing(bench: _Bench) -> Iterator[Check | str]:
    name = "observing changes nothing"
    if bench.in_lockstep:
        yield Check(name, skipped="a lockstep system is read, not run, between operations")
        return
    with _folder() as loud, _folder() as quiet:
        requests = [_run(bench, bench.plain, loud), _run(bench, bench.plain, quiet, quiet=True)]
        answer = bench.laboratory.ask("shardproof.checks.conformance:compare_last", {"runs": requests})
    yield from (f"observed at the end only, {difference}" for difference in answer["different"])


def _every_bit_is_seen(bench: _Bench) -> Iterator[Check | str]:
    name = "one flipped bit is seen in every role of every rank"
    with _folder() as folder:
        if bench.in_lockstep:
            request: dict[str, Any] = {"scenario": bench.plain.axis_values(only_changed=True), "lockstep": True}
        else:
            request = _run(bench, bench.plain, folder)
        answer = bench.laboratory.ask("shardproof.checks.conformance:flip_bits", request)
    if not answer["flipped"]:
        yield "there was nothing to flip"
    yield from (f"{unseen} could flip unseen" for unseen in answer["unseen"])
    if not answer["unseen"] and answer["flipped"]:
        yield Check(f"{name} ({answer['flipped']} flips)")


def _numbers_have_types(bench: _Bench) -> Iterator[Check | str]:
    name = "every number of a param group is recorded with its type"
    if bench.in_lockstep:
        yield Check(name, skipped="param groups that are no dicts of a library have no types")
        return
    with _folder() as folder:
        answer = bench.laboratory.ask("shardproof.checks.conformance:without_types", _run(bench, bench.plain, folder))
    if not answer["numbers"]:
        yield "no rank records a number of a param group"
    yield from answer["without"]
    if not answer["without"] and answer["numbers"]:
        yield Check(f"{name} ({answer['numbers']} numbers)")


def _meshes_agree(bench: _Bench) -> Iterator[Check | str]:
    name = "two meshes agree"
    plain, contract = bench.plain, bench.system.contract
    inputs = contract.resolve(plain)[0]
    for mesh in OTHER_MESHES:
        other = replace(plain, mesh=mesh)
        if mesh == plain.mesh or bench.system.refusal(other) or contract.resolve(other)[0] != inputs:
            continue
        with _folder() as here, _folder() as there:
            states = [_state(bench, plain, here), _state(bench, other, there)]
        keys = states[0].keys() | states[1].keys()
        differing = sorted(key for key in keys if states[0].get(key) != states[1].get(key))
        if differing:
            yield f"{plain.mesh} and {mesh} differ in {len(differing)} values, such as {differing[0]}"
        else:
            yield Check(f"{name} ({plain.mesh} and {mesh}, {len(states[0])} values)")
        return
    yield Check(name, skipped="no other mesh draws the same gradients")


def _refusals_are_raised(bench: _Bench) -> Iterator[Check | str]:
    claimed = [limit for limit in bench.system.accepts.limits if limit.error]
    outcomes = [_is_raised(bench, limit) for limit in claimed]
    yield from (outcome for outcome in outcomes if outcome.wrong or outcome.skipped)
    held = sum(not outcome.wrong and not outcome.skipped for outcome in outcomes)
    if held or not claimed:
        yield Check(f"every refusal that is said to be the library's is raised by it ({held} of {len(claimed)})")


def _is_raised(bench: _Bench, limit: Limit) -> Check:
    """Whether the library raises what a limit says, in the scenario that the limit names."""
    name, error = f"the library raises what {limit.id} says", limit.error
    assert error is not None
    if not error.axes:
        return Check(name, "no scenario shows it: give its axes (LibraryError.axes)")
    scenario = bench.plain.with_axes(error.axes)
    if scenario.version != bench.plain.version:
        return Check(name, skipped=f"of release {scenario.version}: ask for {bench.system.name}@{scenario.version}")
    if not limit.refuses(scenario):
        return Check(name, f"it does not refuse its own scenario: {scenario}")
    if scenario.device == "cuda" and (missing := gpus(sys.executable).reason):
        return Check(name, skipped=missing)
    first = bench.system.accepts.refusal(scenario)
    if first is not None and first.id != limit.id:
        return Check(name, skipped=f"another limit is before it here: {first.id}")
    for _ in range(ATTEMPTS if error.may_hang else 1):
        with _folder() as folder:
            deadline_s = ATTEMPT_S if error.may_hang else None
            outcomes = bench.laboratory.run_ranks(scenario, folder, deadline_s=deadline_s)
        if not outcomes[-1].timed_out:
            break
    if outcomes[-1].timed_out and error.may_hang:
        return Check(name, skipped=f"before it does, its ranks waited for each other: {ATTEMPTS} times of {ATTEMPTS}")
    raised = [e for outcome in outcomes for e in outcome.errors]
    if any((e.type, e.op) == (error.kind, error.op) and error.message in e.message for e in raised):
        return Check(name)
    seen = "; ".join(f"{e.type} in {e.op or e.stage}: {e.message.partition(chr(10))[0]}" for e in raised)
    wanted = f"{error.kind} {error.message!r} in {error.op}"
    return Check(name, f"{wanted} was not raised, but {seen or 'nothing'}: {scenario}")


def _rules_tabulate(bench: _Bench) -> Iterator[Check | str]:
    name, accepts = bench.system.name, bench.system.accepts
    rules = [(c.id, c.reason, c.excludes) for c in (*constraints_of(name), *constraints_of_load(name))]
    rules += [(limit.id, limit.reason, limit.refuses) for limit in (*accepts.limits, *accepts.load_limits)]
    wrong = False
    for walk in load_space(WIDEST).on_systems([bench.system.name]).walks:
        values = {axis: [parse_axis(axis, text) for text in texts] for axis, texts in walk.axes.items()}
        for rule_id, reason, excludes in rules:
            try:
                tabulate(rule_id, reason, excludes, Scenario(system=bench.system.name), values)
            except HarnessError as error:
                wrong = True
                yield str(error)
    if not wrong:
        yield Check(f"every limit and constraint can be tabulated ({len(rules)} of them)")


def _undeclared_is_refused(bench: _Bench) -> Iterator[str]:
    declared = bench.system.accepts.axes
    for axis in AXES:
        allowed = declared.get(axis, Only(getattr(Scenario(), axis)))
        parts = allowed.parts() if isinstance(allowed, Parts) else {"": allowed}
        for part, each in parts.items():
            if axis not in _ELSEWHERE and not isinstance(each, Anything) and not _refuses(each, axis):
                yield f"{axis} {part}=novel is accepted, which nobody declared".replace(" =", "=")


_ELSEWHERE = ("system", "version", "faults")
"""Axes whose values are checked where a scenario is read."""


def _refuses(allowed: Allowed, axis: str) -> bool:
    novel = ("novel",) if isinstance(getattr(Scenario(), axis), tuple) else "novel"
    try:
        return allowed.refuses(novel)
    except UsageError:
        return True  # it is no value of the axis at all


CHECKS: Mapping[str, Callable[[_Bench], Iterator[Check | str]]] = {
    "an axis value that nobody declared is refused": _undeclared_is_refused,
    "every limit and constraint can be tabulated": _rules_tabulate,
    "the plain scenario passes": _plain_passes,
    "observing changes nothing": _observing_changes_nothing,
    "one flipped bit is seen in every role of every rank": _every_bit_is_seen,
    "every number of a param group is recorded with its type": _numbers_have_types,
    "a load that does nothing is seen": _load_is_seen,
    "a killed rank is a crash": _killed_is_crash,
    "two meshes agree": _meshes_agree,
    "every refusal that is said to be the library's is raised by it": _refusals_are_raised,
}
"""Every check by its name, in the order in which they are made: first those that start no rank."""


# Running


@contextmanager
def _folder() -> Iterator[Path]:
    """A scenario's folder, gone when it is left."""
    path = Path(tempfile.mkdtemp(prefix="shardproof-conformance-", dir=scratch_folder()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run(bench: _Bench, scenario: Scenario, folder: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Run a scenario, and what the judge has to know of it.

    Raises:
        HarnessError: it did not run to its end.
    """
    outcomes: Sequence[JobOutcome] = bench.laboratory.run_ranks(scenario, folder, quiet=quiet)
    for outcome in outcomes:
        if not outcome.ok:
            raised = "; ".join(f"{error.type}: {error.message}" for error in outcome.errors) or "no rank says why"
            raise HarnessError(f"the plain scenario did not run to its end: {raised}")
    return judge_request(scenario, folder, outcomes)


def _state(bench: _Bench, scenario: Scenario, folder: Path) -> dict[str, str]:
    """Name → digest of every value that ranks hold in common after the last operation."""
    if bench.in_lockstep:
        request: dict[str, Any] = {"scenario": scenario.axis_values(only_changed=True), "lockstep": True}
    else:
        request = _run(bench, scenario, folder)
    state: dict[str, str] = bench.laboratory.ask("shardproof.checks.conformance:last_state", request)
    return state


# In a worker, where torch is loaded


def flip_bits(payload: bytes) -> bytes:
    """Worker entry: judge an observation again and again, each time with one bit flipped in the first record of a role
    of a rank. Replies with the number of flips, and those that nothing was seen of."""
    found = _found(json.loads(payload))
    first: dict[tuple[str, str, int], int] = {}
    for index, record in enumerate(found.records):
        if record.data:
            first.setdefault((record.where, record.role, record.rank), index)
    unseen = ["a difference without any flip"] if _differs(found) else []
    for (where, role, rank), index in first.items():
        records = list(found.records)
        data = records[index].data
        records[index] = records[index]._replace(data=bytes([data[0] ^ 1]) + data[1:])
        if not _differs(replace(found, records=records)):
            unseen.append(f"{where} {role} of rank {rank}")
    return json.dumps({"flipped": len(first), "unseen": unseen}).encode()


def _differs(found: Any) -> bool:
    """Whether the judge finds a difference. Ranks in lockstep record nothing of what they hold nothing of."""
    from shardproof.laboratory.judge import judge, judge_found

    lockstep = found.case.system.world == "lockstep"
    return bool((judge(found.case, found.records) if lockstep else judge_found(found)).differences)


def without_types(payload: bytes) -> bytes:
    """Worker entry: how many numbers of param groups were recorded, and of which of them no record says the type
    (`shardproof.observe.settings`)."""
    records = _found(json.loads(payload)).records
    typed = {(r.where, r.rank, r.op, r.fqn) for r in records if r.role == SETTING}
    numbers: dict[tuple[str, int, int, str], str] = {}
    for record in records:
        owner, _, key = record.fqn.rpartition(".")
        if record.role == "hyperparameter" and key not in OTHERWISE:
            setting = f"{owner}.{_PAIRS.get(key, key)}"
            numbers[record.where, record.rank, record.op, setting] = f"{record.where} {setting} of rank {record.rank}"
    without = dict.fromkeys(text for at, text in numbers.items() if at not in typed)
    return json.dumps({"numbers": len(numbers), "without": [f"{text} has no type" for text in without]}).encode()


_PAIRS = {"beta1": "betas", "beta2": "betas"}
"""Numbers that stand together under one key of a group."""


def compare_last(payload: bytes) -> bytes:
    """Worker entry: how what two runs left after each session's last operation differs."""
    loud, quiet = (_found(request).records for request in json.loads(payload)["runs"])
    last = {record.op for record in quiet}
    held, seen = ({r for r in records if r.op in last and r.where == LIVE} for records in (loud, quiet))
    names = sorted({f"{r.role} of {r.fqn} on rank {r.rank} differs after operation {r.op}" for r in held ^ seen})
    return json.dumps({"different": names[:8]}).encode()


def last_state(payload: bytes) -> bytes:
    """Worker entry: the digest of every live value after the last operation that is not one rank's own."""
    found = _found(json.loads(payload))
    end = max(record.op for record in found.records)
    records = [r for r in found.records if r.op == end and r.where == LIVE and r.role not in PER_RANK_ROLES]
    logical, problems = assemble(records)
    if problems:
        raise HarnessError(f"pieces do not fit: {problems[0]}")
    return json.dumps(
        {f"{key.role} {key.fqn}": hashlib.sha256(value.data).hexdigest() for key, value in logical.items()}
    ).encode()


def _found(request: Mapping[str, Any]) -> Any:
    """What the ranks of a request left behind; of a system in lockstep, what the reference recorded."""
    from shardproof.laboratory.judge import RankObservations, ResolvedScenario, gather
    from shardproof.observe.record import every_rank
    from shardproof.reference import system as reference

    if not request.get("lockstep"):
        return gather(request)
    case = ResolvedScenario.from_scenario(Scenario.from_axes(request["scenario"]))
    return RankObservations(case, list(every_rank(reference.run(case.inputs, case.placement))), [], {})
