"""A plugin for servers: boundary faults that strike once, some of them at processes of ours, and judges that die, hang,
raise or are wrong.

A scenario's fault chooses the first, its seed the second. Imported in the parent it would make the parent's own judge
fail: give it to a Laboratory or a subprocess as a plugin.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.faults.boundary import BOUNDARY, BoundaryFault, Perform
from shardproof.laboratory import judge
from shardproof.observe.logical import Logical
from shardproof.oracle import twin
from shardproof.oracle.inputs import Inputs
from shardproof.program import Op
from shardproof.protocol.system import RankContext, RankSystem

DIES, HANGS, RAISES, DISAGREES, KILLS_SERVER = 101, 102, 103, 104, 105
MARKERS = "SHARDPROOF_TEST_MARKERS"


def _is_first(name: str) -> bool:
    """Whether no process of this test has asked for that name before."""
    marker = Path(os.environ[MARKERS]) / name
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _flaky(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    """Fails in the first step that any process of this test takes."""
    if op.kind == "step" and _is_first(context.scenario.id):
        raise ConnectionError("once")
    act()


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _kills_supervisor(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    if op.kind == "step" and _is_first(context.scenario.id):
        os.kill(os.getppid(), signal.SIGKILL)
    act()


def _kills_server(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    if op.kind == "step" and _is_first(context.scenario.id):
        os.kill(_parent_of(os.getppid()), signal.SIGKILL)
    act()


def _broken(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    if op.kind == "step":
        raise ZeroDivisionError(f"always, on rank {context.rank}")
    act()


def _slow(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    time.sleep(0.2)
    act()


for _fault in (
    BoundaryFault("boundary.flaky", "raises in the first step of all", "nondeterministic", _flaky),
    BoundaryFault("boundary.broken", "raises in every step", "crash", _broken),
    BoundaryFault("boundary.slow", "takes its time", "pass", _slow),
    BoundaryFault("boundary.kills-supervisor", "kills what runs the job, once", "pass", _kills_supervisor),
    BoundaryFault("boundary.kills-server", "kills the fork server, once", "pass", _kills_server),
):
    BOUNDARY[_fault.id] = _fault

_FAILING: dict[int, Callable[[], object]] = {
    DIES: lambda: os._exit(9),
    HANGS: lambda: time.sleep(600),
    RAISES: lambda: {}["absent"],
    KILLS_SERVER: lambda: os.kill(os.getppid(), signal.SIGKILL) if _is_first("judge") else None,
}
_judge, _passed, _twin = judge.judge, judge._passed, twin.run


def _failing_judge(case: judge.ResolvedScenario, *rest: Any) -> judge.Judgement:
    _FAILING.get(case.scenario.seed, lambda: None)()
    return _judge(case, *rest)


def _failing_short_way(case: judge.ResolvedScenario) -> judge.Judgement | None:
    _FAILING.get(case.scenario.seed, lambda: None)()
    return _passed(case)


def _wrong_twin(inputs: Inputs, *rest: Any, **options: Any) -> Logical:
    return _twin(replace(inputs, seed=0) if inputs.seed == DISAGREES else inputs, *rest, **options)


judge.judge, judge._passed = _failing_judge, _failing_short_way
twin.run = _wrong_twin
