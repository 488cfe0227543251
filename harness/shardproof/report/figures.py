"""The figures of the HTML page as plain geometry: what to draw where, in SVG user units. Templates only draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardproof.diff import Difference
from shardproof.errors import UsageError
from shardproof.observe.courses import RankCourse
from shardproof.program import Op, expand
from shardproof.report.history import History
from shardproof.report.model import Report
from shardproof.result import Result
from shardproof.scenario import Mesh
from shardproof.verdict import Verdict
from shardproof.wording.rank_ends import end_of

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
    known = dict.fromkeys((*ARMS, *(op.arm for op in ops)))  # a trainer has sessions for arms
    arms = [arm for arm in known if any(op.arm == arm for op in ops)]
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
class CourseBar:
    """A stretch of a rank's course, in percent of the width. kind: `before` the first operation, `op`, or `ours`, where
    shardproof reads and stores the state after it. label: its name, which is drawn where it fits; empty for `ours`.
    text: all of it in words."""

    x: float
    width: float
    label: str
    kind: str
    text: str


@dataclass(frozen=True)
class CourseRow:
    """A rank with its bars. told: how it ended, as the words after its name. text: its bars in words."""

    course: RankCourse
    told: str
    bars: tuple[CourseBar, ...]
    text: str


@dataclass(frozen=True)
class Courses:
    """The ranks of a session that failed, one row each. struck: the moment of the first failure, in percent of the
    width; None where the time was up before. cut: whether the beginning of a course was not kept."""

    rows: tuple[CourseRow, ...]
    struck: float | None
    cut: bool


def courses(result: Result) -> Courses | None:
    """Who was where when it struck; None where no rank failed, or an older release stored the result.

    Time is not to scale. A stretch between two events of any rank gets width by its square root, so that an operation
    of milliseconds can be seen beside a wait of seconds, and what happened first still stands first.
    """
    if not result.courses:
        return None
    moments = {at for course in result.courses for at in (course.end_s, *(mark[2] for mark in course.marks))}
    times = sorted({0.0, *moments})
    widths = [0.0, *((after - before) ** 0.5 for before, after in pairwise(times))]
    x_of = {at: 100 * x / (sum(widths) or 1.0) for at, x in zip(times, accumulate(widths), strict=True)}
    rows = tuple(_course_row(result, course, x_of) for course in result.courses)
    struck = next((x_of[course.end_s] for course in result.courses if course.first), None)
    return Courses(rows, struck, any(course.marks and course.marks[0][1] != "start" for course in result.courses))


def _course_row(result: Result, course: RankCourse, x_of: Mapping[float, float]) -> CourseRow:
    stretches = [(op, *_stretch(result, op, stage), at) for op, stage, at in course.marks]
    starts = [s for n, s in enumerate(stretches) if not n or s[:3] != stretches[n - 1][:3]]
    ends = [*(start[3] for start in starts[1:]), max(course.end_s, *(start[3] for start in starts), 0.0)]
    bars = []
    for (_, kind, label, at), end in zip(starts, ends, strict=False):
        width = x_of.get(end, 100.0) - x_of[at]
        name = "" if kind == "ours" else label
        bars.append(CourseBar(x_of[at], width, name, kind, f"{label}: {at:.3f} s to {end:.3f} s"))
    return CourseRow(course, end_of(result, course), tuple(bars), "; ".join(bar.text for bar in bars))


def _stretch(result: Result, op: int, stage: str) -> tuple[str, str]:
    """Kind and label of a stretch of a rank's course."""
    if op < 0:
        return "before", "start" if stage == "start" else "set-up"
    name = f"{op} {result.kind_of(op)}".rstrip()
    return ("op", name) if stage == "op" else ("ours", f"state after {name}")


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


NIGHT_WIDTH, NIGHT_GAP = 20, 6
FAILURES_HEIGHT, TURN_HEIGHT = 70, 6


@dataclass(frozen=True)
class NightBar:
    """One night. new, known: (y, height) of a part of its bar. appeared, disappeared: how many signatures, and the
    heights of their bars above and below a line of their own. text: all of it in words."""

    x: int
    new: tuple[float, float]
    known: tuple[float, float]
    appeared: tuple[int, float]
    disappeared: tuple[int, float]
    text: str


@dataclass(frozen=True)
class Nights:
    """Failures a night, at most `most`, as bars that stand on `floor`; signatures that came and went above and below
    `line`."""

    bars: tuple[NightBar, ...]
    width: int
    height: int
    floor: int
    line: float
    most: int
    text: str


def nights(history: History) -> Nights:
    """The figure of a folder's history."""
    floor = FAILURES_HEIGHT + 14
    tallest = max((max(turn) for turn in history.turns), default=0)
    scale = min(1.0, 5 / tallest) * TURN_HEIGHT if tallest else 0.0
    above = max((came for came, _ in history.turns), default=0) * scale
    below = max((went for _, went in history.turns), default=0) * scale
    bars = []
    for n, (night, (came, went)) in enumerate(zip(history.nights, history.turns, strict=True)):
        new, known = (FAILURES_HEIGHT * count / history.most for count in (night.new, night.known))
        text = f"{night.started}: {night.new} new, {night.known} known; {came} came, {went} went"
        bars.append(
            NightBar(
                n * (NIGHT_WIDTH + NIGHT_GAP) + NIGHT_GAP // 2, (floor - known - new, new), (floor - known, known),
                (came, came * scale), (went, went * scale), text,
            )
        )  # fmt: skip
    line = floor + 12 + above
    most = max((night.new + night.known for night in history.nights), default=0)
    width = (NIGHT_WIDTH + NIGHT_GAP) * len(bars)
    return Nights(tuple(bars), width, round(line + below + 4), floor, line, most, "; ".join(bar.text for bar in bars))
