"""The figures of the HTML page as plain geometry: what to draw where, in SVG user units. Templates only draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from harness.diff import Difference
from harness.errors import UsageError
from harness.layout import Box, flat_intervals, shard_box
from harness.models import model_spec
from harness.program import Op, expand
from harness.report.model import Report
from harness.result import Result
from harness.scenario import Mesh, Scenario
from harness.verdict import Verdict

ARMS = ("main", "uninterrupted", "cold", "resumed")

OP_WIDTH, OP_GAP, LANE_HEIGHT, LABEL_WIDTH = 92, 8, 46, 104


@dataclass(frozen=True)
class OpBox:
    """One operation in the timeline. state: `ok`, `failed`, `differs` (follows the first failure) or `after`."""

    op: Op
    x: int
    y: int
    state: str


@dataclass(frozen=True)
class SessionSpan:
    """A stretch of the timeline on one set of ranks."""

    label: str
    x: int
    width: int


@dataclass(frozen=True)
class Timeline:
    """The program's operations from left to right, one lane an arm."""

    lanes: tuple[tuple[str, int], ...]
    boxes: tuple[OpBox, ...]
    sessions: tuple[SessionSpan, ...]
    width: int
    height: int
    caption: str


def timeline(result: Result) -> Timeline | None:
    """The timeline of a result's program; None if the program does not expand (that was its failure)."""
    try:
        ops = expand(result.scenario)
    except UsageError:
        return None
    arms = [arm for arm in ARMS if any(op.arm == arm for op in ops)]
    top = 30
    lanes = tuple((arm, top + n * LANE_HEIGHT) for n, arm in enumerate(arms))
    y_of = dict(lanes)
    differing = {d.key.op for d in result.differences}
    boxes = tuple(OpBox(op, _x(op.index), y_of[op.arm], _state(op, result, differing)) for op in ops)
    caption = ", ".join(f"{op.index} {op.kind} ({op.arm})" for op in ops)
    if result.failed_op:
        caption += f"; failed at {result.failed_op.index} {result.failed_op.name}"
    return Timeline(lanes, boxes, _sessions(ops), _x(len(ops)), top + len(lanes) * LANE_HEIGHT, caption)


def _x(index: int) -> int:
    return LABEL_WIDTH + index * (OP_WIDTH + OP_GAP)


def _state(op: Op, result: Result, differing: set[int]) -> str:
    failed = result.failed_op.index if result.failed_op else None
    if failed is None or op.index < failed:
        return "ok"
    if op.index == failed:
        return "failed"
    return "differs" if op.index in differing else "after"


def _sessions(ops: Iterable[Op]) -> tuple[SessionSpan, ...]:
    grouped: dict[tuple[int, Mesh], list[Op]] = {}
    for op in ops:
        grouped.setdefault((op.session, op.mesh), []).append(op)
    return tuple(
        SessionSpan(
            f"{'ranks' if not session else 'fresh ranks'} · mesh {mesh}",
            _x(members[0].index),
            _x(members[-1].index) - _x(members[0].index) + OP_WIDTH,
        )
        for (session, mesh), members in grouped.items()
    )


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, with its label and the share of the tallest bar."""

    label: str
    count: int
    share: float


@dataclass(frozen=True)
class Timing:
    """How long one system's scenarios took, in seconds."""

    system: str
    bars: tuple[Bar, ...]
    median_s: float
    slowest_s: float


_EDGES_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def timings(report: Report) -> list[Timing]:
    """A histogram of durations a system, of the scenarios that ran."""
    grouped: dict[str, list[float]] = {}
    for result in report.results:
        if result.verdict is not Verdict.UNSUPPORTED:
            grouped.setdefault(result.system, []).append(result.duration_s)
    return [_timing(system, sorted(seconds)) for system, seconds in grouped.items()]


def _timing(system: str, seconds: list[float]) -> Timing:
    counts = Counter(sum(s >= edge for edge in _EDGES_S) for s in seconds)
    labels = [f"<{_EDGES_S[0]:g}", *(f"≥{edge:g}" for edge in _EDGES_S)]
    tallest = max(counts.values())
    bars = tuple(Bar(label, counts[n], counts[n] / tallest) for n, label in enumerate(labels))
    return Timing(system, bars, seconds[len(seconds) // 2], seconds[-1])


def ulp_bars(difference: Difference) -> tuple[Bar, ...]:
    """The ULP histogram of a difference."""
    tallest = max((n for _, n in difference.ulp_histogram), default=1)
    return tuple(Bar(label, n, n / tallest) for label, n in difference.ulp_histogram)


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of a flattened tensor. x, width: as a share of the whole."""

    label: str
    x: float
    width: float


@dataclass(frozen=True)
class Strip:
    """A flattened tensor: which shard owns which elements, and where the deviating ones are.

    owners: by shard, with its index. deviating: runs of deviating elements.
    """

    elements: int
    owners: tuple[tuple[int, Segment], ...]
    deviating: tuple[Segment, ...]


def strip(result: Result, difference: Difference) -> Strip | None:
    """Where a tensor deviates, against who owns it. None unless it is sharded along dim 0 and the indices that
    deviate are known."""
    shape, tp_dim = _logical_shape(result.scenario, difference)
    if shape is None or not difference.runs or len(difference.first_index) != len(shape):
        return None
    if result.scenario.sharding != "fully_shard" or not prod(shape):
        return None
    mesh = next((op.mesh for op in expand(result.scenario) if op.index == difference.key.op), result.scenario.mesh)
    elements = prod(shape)
    owners = [
        (shard, Segment(f"rank {rank}: elements {start} to {start + length - 1}", start / elements, length / elements))
        for shard, (rank, box) in enumerate(_shards(shape, mesh, tp_dim))
        for start, length in flat_intervals(shape, box)
    ]
    runs = tuple(
        Segment(f"{start} to {start + length - 1}", start / elements, length / elements)
        for start, length in difference.runs
    )
    return Strip(elements, tuple(sorted(owners, key=lambda owner: owner[1].x)), runs)


def _shards(shape: tuple[int, ...], mesh: Mesh, tp_dim: int | None) -> list[tuple[int, Box]]:
    """The first rank that holds each distinct box, by rank."""
    boxes: dict[Box, int] = {}
    sizes = (mesh.dp_replicate, mesh.dp_shard, mesh.tp)
    for rank in range(mesh.world):
        boxes.setdefault(shard_box(shape, sizes, mesh.coordinate(rank), tp_dim), rank)
    return [(rank, box) for box, rank in boxes.items() if box.volume]


def _logical_shape(scenario: Scenario, difference: Difference) -> tuple[tuple[int, ...] | None, int | None]:
    """Shape and tensor-parallel dim of the parameter that a difference is about; None if it is about no parameter."""
    if difference.key.role not in ("param", "compute_param", "grad", "master", "exp_avg", "exp_avg_sq", "momentum"):
        return None, None
    try:
        named = {p.fqn: p.spec for p in model_spec(scenario.model).params}
    except UsageError:
        return None, None
    spec = named.get(difference.key.fqn)
    return (spec.shape, spec.tp_dim) if spec else (None, None)
