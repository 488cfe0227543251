"""Canaries: what must be noticed in every CI run. A run in which one goes unnoticed has failed.

*Verifies*: every logical fault, planted in its scenarios, gives a mismatch, a crash or a hang, and the same
scenarios without it pass; every boundary fault comes to the verdict that it must in the real ranks of each of its
systems; every comparison of `faults.comparisons` finds the kind of difference that it must.
*Does not verify*: that a fault's explanation is right; the table says whether its bug is among the first
one and the first three explanations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.arguments import write_json
from harness.faults.boundary import BOUNDARY, BoundaryFault
from harness.faults.catalogue import CATALOGUE, Fault, scenarios_of
from harness.faults.comparisons import PAIRS, found_kind
from harness.faults.strikes import strikes
from harness.laboratory import Laboratory
from harness.result import Result
from harness.verdict import ExitStatus, Verdict

STUCK_S = 10.0  # deadline of a session with a stuck rank; it is paid twice, since failures are confirmed
CAUGHT = (Verdict.MISMATCH, Verdict.CRASH, Verdict.HANG)


@dataclass(frozen=True)
class Detection:
    """What became of one fault.

    detected: in every one of its scenarios. top1, top3: its bug, or its own id, is named by the first, or one of the
    first three, explanations in every scenario. control: the scenarios pass without it.
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

    def named_within(self, first: int) -> bool:
        """Whether every scenario's first few explanations name one of the fault's bugs."""
        wanted = set(self.fault.bug_ids)
        named = ({bug for e in r.explanations[:first] for bug in e.bug_ids} for r in self.results)
        return bool(self.results) and all(wanted & bugs for bugs in named)


@dataclass(frozen=True)
class Strike:
    """One boundary fault in the real ranks of one scenario."""

    fault: BoundaryFault
    result: Result

    @property
    def noticed(self) -> bool:
        """Whether it came to the verdict that it must, and to no other."""
        return self.result.verdict.value == self.fault.verdict

    @property
    def line(self) -> str:
        """Its line of the table; of a strike that was not noticed, with the reason that the result gives."""
        said = "noticed" if self.noticed else "NOT NOTICED"
        because = f" ({self.result.reason})" if self.result.reason and not self.noticed else ""
        return f"{self.fault.id:<28} {self.result.system:<14} {said}: {self.result.verdict.value}{because}"

    @property
    def plain(self) -> dict[str, object]:
        """Its object of the machine report."""
        return {
            "id": self.fault.id,
            "system": self.result.system,
            "version": self.result.version,
            "scenario": self.result.id,
            "verdict": self.result.verdict.value,
            "detected": self.noticed,
        }


def run_canaries(out: Path, json_file: Path | None, jobs: int, plugins: Sequence[str] = ()) -> int:
    """Plant every fault and make every comparison; print the table; the contract's exit status.

    Args:
        plugins: modules that ranks and workers import first; what their systems name in a `conformance.toml` is struck
            too.
    """
    detections = _plant_all(jobs, out, plugins)
    boundary = _strike_all(jobs, plugins)
    missed_pairs = [name for name, (a, b, kind) in PAIRS.items() if found_kind(a, b) != kind]
    print(_table(detections))
    for strike in boundary:
        print(strike.line)
    print(f"comparisons that must differ: {len(PAIRS) - len(missed_pairs)} of {len(PAIRS)} noticed")
    if json_file:
        found = {"faults": [_plain(d) for d in detections], "boundary": [strike.plain for strike in boundary]}
        write_json(json_file, found)
    missed = [d.fault.id for d in detections if not d.detected] + missed_pairs
    missed += [f"{strike.fault.id} on {strike.result.system}" for strike in boundary if not strike.noticed]
    broken = [d.fault.id for d in detections if not d.control]
    for name in missed:
        print(f"NOT NOTICED: {name}")
    for name in broken:
        print(f"FAILS WITHOUT ITS FAULT: {name}")
    return ExitStatus.HARNESS if missed or broken else ExitStatus.OK


def _plant_all(jobs: int, out: Path, plugins: Sequence[str] = ()) -> list[Detection]:
    planted = {fault.id: scenarios_of(fault) for fault in CATALOGUE.values()}
    everything = {s for scenarios in planted.values() for s in scenarios}
    everything |= {replace(s, faults=()) for s in everything}
    with Laboratory(jobs=jobs, deadline_s=20.0, plugins=plugins, keep=out / "logs") as laboratory:
        results = {r.scenario: r for r in laboratory.examine(everything, lambda scenario, blob: None)}
    return [
        Detection(
            CATALOGUE[fault],
            tuple(results[s] for s in scenarios),
            tuple(results[replace(s, faults=())] for s in scenarios),
        )
        for fault, scenarios in planted.items()
    ]


def _strike_all(jobs: int, plugins: Sequence[str] = ()) -> list[Strike]:
    """The outcome of every boundary fault, in every system that names it."""
    struck = {scenario: BOUNDARY[scenario.faults[0]] for scenario in strikes()}
    with Laboratory(jobs=jobs, deadline_s=STUCK_S, plugins=plugins) as laboratory:
        found = [Strike(struck[r.scenario], r) for r in laboratory.examine(struck, lambda scenario, blob: None)]
    return sorted(found, key=lambda strike: (strike.result.system, strike.fault.id))


def _table(detections: Sequence[Detection]) -> str:
    width = max(len(d.fault.id) for d in detections)
    lines = [f"{'fault':<{width}}  noticed  top1  top3  bugs"]
    for d in detections:
        noticed, (top1, top3) = "yes" if d.detected else "NO", (_mark(d, first) for first in (1, 3))
        lines.append(
            f"{d.fault.id:<{width}}  {noticed:<7}  {top1:<4}  {top3:<4}  {', '.join(d.fault.bug_ids)}".rstrip()
        )
    lines.append(f"{sum(d.detected for d in detections)} of {len(detections)} faults noticed")
    return "\n".join(lines)


def _plain(detection: Detection) -> dict[str, object]:
    return {
        "id": detection.fault.id,
        "bug_ids": list(detection.fault.bug_ids),
        "detected": detection.detected,
        "scenarios": [r.id for r in detection.results],
        "verdicts": [r.verdict.value for r in detection.results],
        "top1": detection.named_within(1) if detection.fault.bug_ids else None,
        "top3": detection.named_within(3) if detection.fault.bug_ids else None,
    }


def _mark(detection: Detection, first: int) -> str:
    if not detection.fault.bug_ids:
        return ""
    return "yes" if detection.named_within(first) else "no"
