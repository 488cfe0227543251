"""The message for a plan without scenarios: the reason, and the nearest command line that does run something.

The line is complete, to be pasted as it is. It is made of the selection that was given: the scenario nearest to the one
that was refused (`shardproof.space.defaults.nearest`), said with `--set`; for a space that is walked, the same without
the `--set` that leaves nothing of it. Every line is planned before it is proposed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from shardproof.errors import A_TRAINER, TWO_CHECKPOINTS, UsageError
from shardproof.scenario import Scenario
from shardproof.space.constraints import impossible
from shardproof.space.defaults import Axes, completed, is_accepted, nearest
from shardproof.space.files import Space
from shardproof.space.walk import Walked

Settings = Mapping[str, Sequence[str]]
"""Axis → values, as `--set` gives them."""

ALWAYS_RUNS = "shardproof run smoke"


def impossible_scenario(scenarios: Sequence[Scenario], line: Callable[[], str]) -> UsageError | None:
    """The error of the first of some explicit scenarios that has no single right answer; None where all have one."""
    for scenario in scenarios:
        constraint = impossible(scenario)
        if constraint is not None:
            allowed = f"all that constraint {constraint.id!r} leaves ({constraint.reason})"
            return UsageError.of("scenario", str(scenario), allowed, line())
    return None


def nothing_supported(refused: Mapping[Scenario, str], walked: Sequence[Walked], line: str) -> UsageError:
    """The error where no system runs anything that was asked for."""
    reasons = dict.fromkeys(f"{scenario.system}: {reason}" for scenario, reason in refused.items())
    excluded = dict.fromkeys(table.reason for entry in walked for table in entry.exclusions)
    given = next(iter(refused), "these axis values")
    allowed = f"what a system supports ({'; '.join([*reasons, *excluded])})"
    error = UsageError.of("scenarios", str(given), allowed, line)
    if not refused:
        return error
    asked = any("checkpoint" in scenario.axis_values(only_changed=True) for scenario in refused)
    return error.led_to(A_TRAINER, *([TWO_CHECKPOINTS] if asked else []))


def nearest_line(
    names: Sequence[str], systems: Sequence[str], given: Settings, chosen: Sequence[Space],
    runs: Callable[[Settings], bool],
) -> str:  # fmt: skip
    """The command line nearest to a selection of which nothing can be run.

    Args:
        names, systems, given: the spaces, `--system` and `--set` of the selection. chosen: the spaces under it. runs:
            whether the same names and systems come to something with other settings.
    """
    tried = chain(_for_scenarios(given, chosen), _less_one(given), _for_walks(given, chosen), [{}])
    found = next(filter(runs, tried), None)
    if found is None:
        return ALWAYS_RUNS
    words = ["shardproof", "run", *names]
    for system in systems:
        words += ["--system", system]
    for axis, values in found.items():
        for part in values if axis == "faults" else [",".join(values)]:
            words += ["--set", f"{axis}={part or ('none' if axis == 'options' else '')}"]
    return shlex.join(words)


def _for_scenarios(given: Settings, chosen: Sequence[Space]) -> Iterator[Settings]:
    """The settings that turn each explicit scenario that is refused into the nearest that runs."""
    for stated in (stated for space in chosen for stated in space.stated):
        if not is_accepted(completed(stated)):
            changed = _changes(stated, nearest(stated))
            own = {axis: (stated[axis],) for axis in given}
            yield {**own, **{axis: (text,) for axis, text in changed.items()}}


def _changes(stated: Axes, wanted: Scenario) -> Axes:
    """What must be set over a file's axes for them to come to a scenario."""
    texts = wanted.axis_values()
    changed = {axis: texts[axis] for axis, text in stated.items() if texts[axis] != text}
    if completed({**stated, **changed}) == wanted:
        return changed
    return {axis: text for axis, text in texts.items() if axis in stated or text != Scenario().axis_text(axis)}


def _less_one(given: Settings) -> Iterator[Settings]:
    """The given axis settings, with a different axis left out in every variant."""
    return ({axis: values for axis, values in given.items() if axis != left_out} for left_out in given)


def _for_walks(given: Settings, chosen: Sequence[Space]) -> Iterator[Settings]:
    """The settings under which a walk keeps at least the scenario nearest to its first values."""
    for walk in (walk for space in chosen for walk in space.walks):
        first = {"system": walk.system, **{axis: texts[0] for axis, texts in walk.axes.items()}}
        yield {**given, **{axis: (text,) for axis, text in _changes(first, nearest(first)).items()}}
