"""Canaries: planted faults and wrong values that every CI run must notice. A run in which a canary goes unnoticed
fails.

*Verifies*: every logical fault, planted in its scenarios, gives a mismatch, a crash or a hang, and the same
scenarios without it pass; every boundary fault strikes, and comes to the verdict that it must, in the real ranks of
each of its systems; every comparison of `faults.comparisons` finds the kind of difference that it must.
*Does not verify*: that a fault's explanation is right; the table says whether the first one, or one of the first
three, names what the catalogue says is wrong. Nor does it confirm failures: the reference runs in lockstep, the same
each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardproof.checks.boundary_faults import Struck
from shardproof.checks.kept import keep
from shardproof.faults.boundary import boundary_fault
from shardproof.faults.catalogue import CATALOGUE, Fault, mechanisms, scenarios_of
from shardproof.faults.comparisons import PAIRS, found_kind
from shardproof.faults.confusion_table import confusion, confusion_lines
from shardproof.faults.plain_scenario import strikes
from shardproof.laboratory.laboratory import Laboratory
from shardproof.laboratory.run_verdict import NO_EFFECT
from shardproof.report.model import in_folder
from shardproof.report.publish import write_json
from shardproof.result import Result
from shardproof.verdict import ExitStatus, Verdict

STUCK_S = 10.0  # deadline of a session with a stuck rank; it is paid twice, since failures are confirmed
CAUGHT = (Verdict.MISMATCH, Verdict.CRASH, Verdict.HANG)


@dataclass(frozen=True)
class Detection:
    """What became of one fault.

    detected: in every one of its scenarios. top1, top3: what is wrong with the state is named by the first, or one of
    the first three, explanations in every scenario. control: the scenarios pass without it. effect: whether it changed
    anything in each of them; what changed nothing has not been missed by anybody.
    """

    fault: Fault
    results: tuple[Result, ...]
    controls: tuple[Result, ...]

    @property
    def detected(self) -> bool:
        return bool(self.results) and all(r.verdict in CAUGHT for r in self.results)

    @property
    def control(self) -> bool:
        return all(r.verdict is Verdict.PASS for r in self.controls)

    @property
    def effect(self) -> bool:
        return not any(r.reason == NO_EFFECT for r in self.results)

    @property
    def explainable(self) -> bool:
        """Whether some explanation would be right: not where nobody has said what is wrong, or where the run ends."""
        return bool(mechanisms().get(self.fault.mechanism))

    @property
    def noticed_in(self) -> str:
        """The operation in which it was noticed first, in the first of its scenarios."""
        first = next((r.failed_op for r in self.results if r.failed_op is not None), None)
        return "" if first is None else f"{first.index} {first.name}"

    @property
    def values(self) -> int:
        """The number of values that differed from the oracle, summed over the fault's scenarios."""
        return sum(len(r.differences) for r in self.results)

    def named_within(self, first: int) -> bool:
        """Whether one of every scenario's first few explanations is a right one."""
        right = set(mechanisms().get(self.fault.mechanism, ()))
        named = ({e.mechanism for e in r.explanations[:first]} for r in self.results)
        return bool(self.results) and all(right & found for found in named)


def run_canaries(
    out: Path, json_file: Path | None, jobs: int, plugins: Sequence[str] = (), only: Sequence[str] | None = None
) -> int:
    """Plant every fault and make every comparison; keep the results in a folder; print the table; the contract's exit
    status.

    Args:
        out: the folder.
        plugins: modules that ranks and workers import first; what their systems name in a `conformance.toml` is struck
            too. only: plant these logical faults, strike no ranks, and say what explains each.
    """
    if only is not None:
        detections, boundary, missed_pairs = _plant_all(jobs, out, plugins, only), [], []
        print(_table(detections))
        place = in_folder(str(out))
        print("\n".join(line for detection in detections for line in _describe_detection(detection, place)))
    else:
        detections, boundary = _plant_all(jobs, out, plugins), _strike_all(jobs, plugins)
        missed_pairs = [name for name, (a, b, kind) in PAIRS.items() if found_kind(a, b) != kind]
        print(_table(detections))
        for strike in boundary:
            print(strike.line)
        print(f"comparisons that must differ: {len(PAIRS) - len(missed_pairs)} of {len(PAIRS)} noticed")
    planted = (result for d in detections for result in (*d.controls, *d.results))
    keep(out, (*planted, *(strike.result for strike in boundary)))
    if json_file:
        found = {"faults": [_plain(d) for d in detections], "boundary": [strike.plain for strike in boundary]}
        write_json(json_file, found)
    missed = [d.fault.id for d in detections if not d.detected and d.effect] + missed_pairs
    missed += [f"{strike.fault.id} on {strike.result.system}" for strike in boundary if not strike.noticed]
    broken = [d.fault.id for d in detections if not d.control]
    idle = [d.fault.id for d in detections if not d.effect]
    for name in missed:
        print(f"NOT NOTICED: {name}")
    for name in idle:
        print(f"HAD NO EFFECT: {name}: it changed nothing in its scenarios, so that there was nothing to notice")
    for name in broken:
        print(f"FAILS WITHOUT ITS FAULT: {name}")
    return ExitStatus.HARNESS if missed or broken or idle else ExitStatus.OK


def _plant_all(jobs: int, out: Path, plugins: Sequence[str] = (), only: Sequence[str] | None = None) -> list[Detection]:
    planted = {fault.id: scenarios_of(fault) for fault in CATALOGUE.values() if only is None or fault.id in only}
    everything = {s for scenarios in planted.values() for s in scenarios}
    everything |= {replace(s, faults=()) for s in everything}
    with Laboratory(jobs=jobs, deadline_s=20.0, plugins=plugins, keep=out / "logs") as laboratory:
        once = partial(laboratory.examine_one, confirm=False)
        results = {r.scenario: r for r in laboratory.side_by_side(once, everything)}
    return [
        Detection(
            CATALOGUE[fault],
            tuple(results[s] for s in scenarios),
            tuple(results[replace(s, faults=())] for s in scenarios),
        )
        for fault, scenarios in planted.items()
    ]


def _strike_all(jobs: int, plugins: Sequence[str] = ()) -> list[Struck]:
    """The outcome of every boundary fault, in every system that names it."""
    struck = {scenario: boundary_fault(scenario.faults[0]) for scenario in strikes()}
    with Laboratory(jobs=jobs, deadline_s=STUCK_S, plugins=plugins) as laboratory:
        found = [Struck(struck[r.scenario], r) for r in laboratory.examine(struck, lambda scenario, blob: None)]
    return sorted(found, key=lambda strike: (strike.result.system, strike.fault.id))


def _table(detections: Sequence[Detection]) -> str:
    width = max(len(d.fault.id) for d in detections)
    lines = [f"{'fault':<{width}}  noticed    in           values  top1  top3  bugs"]
    for d in detections:
        top1, top3 = (_mark(d, first) for first in (1, 3))
        bugs = ", ".join(d.fault.bug_ids)
        cells = f"{_noticed(d):<9}  {d.noticed_in:<11}  {d.values or '':>6}  {top1:<4}  {top3:<4}  {bugs}"
        lines.append(f"{d.fault.id:<{width}}  {cells}".rstrip())
    explainable = [d for d in detections if d.explainable]
    right = ", ".join(f"{sum(d.named_within(n) for d in explainable)} in the first {n}" for n in (1, 3))
    lines.append(f"{sum(d.detected for d in detections)} of {len(detections)} faults noticed")
    lines.append(f"{len(explainable)} can be explained: {right}")
    refused = sum(not d.explainable for d in detections)
    if refused:
        lines.append(f"{refused} end the run with the library's own error, which the fault raises: nothing to explain")
    every = [(d.fault.mechanism, r.explanations) for d in explainable for r in d.results]
    rows = confusion((mechanism, found[0].mechanism if found else "") for mechanism, found in every)
    return "\n".join([*lines, *(["", *confusion_lines(rows)] if rows else [])])


def _describe_detection(detection: Detection, place: str) -> list[str]:
    """What became of a fault in each of its scenarios: the control, where it was noticed, the best explanation, and the
    command that tells everything. place: the option that the command needs behind the id."""
    lines = [f"{detection.fault.id}: {detection.fault.doc}"]
    for result, control in zip(detection.results, detection.controls, strict=True):
        first = result.failed_op
        where = f", first in operation {first.index} ({first.name})" if first else ""
        lines.append(f"  {result.id}: {result.verdict.value}{where}; without it {control.verdict.value}")
        if result.error is not None:
            lines.append(f"    {result.error.type}: {result.error.message}")
        lines += [f"    {e.mechanism} ({e.confidence}): {e.text}" for e in result.explanations[:1]]
        if not result.explanations and result.differences:
            lines.append("    no rule explains it")
        lines.append(f"    explain: shardproof explain {result.id}{place}")
    return lines


def _noticed(detection: Detection) -> str:
    """What became of a fault, in a word or two."""
    if detection.detected:
        return "crash" if all(r.verdict is Verdict.CRASH for r in detection.results) else "yes"
    return "NO" if detection.effect else "NO EFFECT"


def _plain(detection: Detection) -> dict[str, object]:
    return {
        "id": detection.fault.id,
        "bug_ids": list(detection.fault.bug_ids),
        "mechanism": detection.fault.mechanism,
        "detected": detection.detected,
        "effect": detection.effect,
        "operation": detection.noticed_in,
        "values": detection.values,
        "scenarios": [r.id for r in detection.results],
        "verdicts": [r.verdict.value for r in detection.results],
        "explainable": detection.explainable,
        "said": [r.explanations[0].mechanism if r.explanations else None for r in detection.results],
        "top1": detection.named_within(1) if detection.explainable else None,
        "top3": detection.named_within(3) if detection.explainable else None,
    }


def _mark(detection: Detection, first: int) -> str:
    if not detection.explainable:
        return ""
    return "yes" if detection.named_within(first) else "no"
