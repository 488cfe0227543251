"""Plans: what `run` will run, in which order, how long it takes, what was left out and why.

A plan joins the walks and the explicit scenarios of several space files, orders them by the servers that their ranks
are forked from, so that each of these starts once, and under a server so that the cells which expose most come first
(offload × low precision × resume, as public bug reports have it) and the cheap before the dear, takes the shard asked
for, and refuses a budget that it would exceed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import chain
from math import inf
from operator import attrgetter
from random import Random
from typing import Any

from shardproof.errors import UsageError
from shardproof.protocol.registry import system_named
from shardproof.scenario import AXES, DTypePolicy, Scenario, value_text
from shardproof.space import proposals
from shardproof.space.constraints import impossible
from shardproof.space.cost import cost_model
from shardproof.space.defaults import nearest
from shardproof.space.files import Space, Walk
from shardproof.space.preparation import servers_of
from shardproof.space.walk import Walked, follow, plain_sample
from shardproof.versions import CURED

PLAIN = DTypePolicy()

_COUNT = re.compile("[0-9]{1,9}")

TONIGHT = "tonight"


@dataclass(frozen=True)
class Selection:
    """What the command line asks of a plan, beside the names of spaces.

    * systems: each `NAME[@VERSION]`; empty = the space's own.
    * axes: `--set`, axis → values. given_by: how errors call what gave them.
    * strength: replaces the space's.
    * sample: this many random scenarios in all, spread evenly over the walks.
    * seed: of covering arrays and samples.
    * shard: (i, n) = the i-th of n parts, from 1.
    """

    systems: tuple[str, ...] = ()
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    strength: int | None = None
    sample: int | None = None
    seed: int = 0
    shard: tuple[int, int] = (1, 1)
    given_by: str = "--set"


@dataclass(frozen=True)
class Plan:
    """The scenarios to run, in order, and the account of how they were chosen.

    * supported: what their systems run.
    * refused: what their systems refuse, each with the reason; they come last, since they cost nothing.
    * walked: one entry a walk, before sharding.
    * budgets: system → seconds that its scenarios may take.
    """

    supported: tuple[Scenario, ...]
    refused: Mapping[Scenario, str] = field(default_factory=dict)
    walked: tuple[Walked, ...] = ()
    budgets: Mapping[str, float] = field(default_factory=dict)
    shard: tuple[int, int] = (1, 1)

    @cached_property
    def scenarios(self) -> tuple[Scenario, ...]:
        return (*self.supported, *self.refused)

    def estimate_s(self, scenario: Scenario) -> float:
        """Seconds the scenario takes with two at once on two cores; nothing where its system refuses it."""
        return 0.0 if scenario in self.refused else cost_model().estimate_s(scenario)

    def estimate_all_s(self, scenarios: Iterable[Scenario]) -> float:
        """Seconds that scenarios take together."""
        return sum(cost_model().estimates_s([s for s in scenarios if s not in self.refused]))

    @property
    def is_walk(self) -> bool:
        """Whether spaces were walked; False for scenario files alone, which report their plain verdicts."""
        return bool(self.walked)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Expected seconds of each system's scenarios."""
        total = dict.fromkeys(map(attrgetter("system"), self.scenarios), 0.0)
        for scenario, seconds in zip(self.supported, cost_model().estimates_s(self.supported), strict=True):
            total[scenario.system] += seconds
        return total

    @property
    def excluded(self) -> dict[str, int]:
        """Reason → how many combinations of axis values it takes out, over all walks."""
        total: Counter[str] = Counter()
        for table in chain.from_iterable(walked.exclusions for walked in self.walked):
            total[table.reason] += table.excluded
        return dict(total)

    @cached_property
    def unsupported(self) -> dict[tuple[str, str], int]:
        """(system, reason) → how many planned scenarios the system refuses for it."""
        return dict(Counter((scenario.system, reason) for scenario, reason in self.refused.items()))

    @cached_property
    def shrink_s(self) -> dict[str, float]:
        """System → seconds to search for the simplest scenario of each new cause."""
        return {entry.walk.system: entry.walk.shrink_s for entry in self.walked}

    def counts(self, axis: str) -> dict[str, int]:
        """Value → number of planned scenarios that have it."""
        total: Counter[str] = Counter()
        for value, number in self._values[axis]:
            total[value_text(axis, value)] += number
        return dict(total)

    @property
    def varied_axes(self) -> list[str]:
        """The axes on which the scenarios differ."""
        return [axis for axis, values in self._values.items() if len({value for value, _ in values}) > 1]

    @cached_property
    def _values(self) -> dict[str, list[tuple[Any, int]]]:
        """Axis → the objects that are its values, and how many scenarios have each. Thousands share a few, so that what
        is asked of a value is asked a few times."""
        found = {}
        columns = list(zip(*map(attrgetter(*AXES), self.scenarios), strict=True)) or [()] * len(AXES)
        for axis, values in zip(AXES, columns, strict=True):
            objects = dict(zip(map(id, values), values, strict=True))
            found[axis] = [(objects[key], number) for key, number in Counter(map(id, values)).items()]
        return found

    def require_budget(self) -> None:
        """Refuse a plan that takes longer than a space allows.

        Raises:
            UsageError: it would, with what to relax.
        """
        for system, budget in self.budgets.items():
            estimate = self.seconds.get(system, 0.0)
            if estimate > budget:
                parts = int(-(-estimate * self.shard[1] // budget))
                raise UsageError.of(
                    f"time of {system}",
                    f"{estimate:.0f} s",
                    f"up to {budget:.0f} s, the budget of the space",
                    f"--strength 2, fewer values (--set mesh=1x2x1,1x4x1), --sample N, or --shard 1/{parts}",
                )


def make_plan(spaces: Sequence[Space], selection: Selection = Selection()) -> Plan:
    """The plan of several spaces under one selection.

    Raises:
        UsageError: an unknown system, axis or value; an explicit scenario that is impossible; nothing that
            any system supports.
    """
    explicit, walked, supported, refused = _sorted_out(spaces, selection)
    error = proposals.impossible_scenario(explicit, lambda: _nearest_line(spaces, selection))
    if error:
        raise error
    if not supported:
        raise proposals.nothing_supported(refused, walked, _nearest_line(spaces, selection))
    budgets: dict[str, float] = defaultdict(float)
    for walk in (entry.walk for entry in walked if not entry.walk.sample):
        budgets[walk.system] += walk.budget_s or inf
    first, last = (_ordered(_in_shard(part, selection.shard)) for part in (supported, refused))
    return Plan(tuple(first), {s: refused[s] for s in last}, walked, dict(budgets), selection.shard)


_SortedOut = tuple[list[Scenario], tuple[Walked, ...], dict[Scenario, None], dict[Scenario, str]]


def _sorted_out(spaces: Sequence[Space], selection: Selection) -> _SortedOut:
    """The scenarios that files state, what each walk came to, and of all of them those that their systems run, and
    those that they refuse with the reason."""
    chosen = [_selected(space, selection) for space in spaces]
    walks = [walk for space in chosen for walk in space.walks]
    if selection.sample is None:
        walked = tuple(chain.from_iterable(_followed(walk, selection) for walk in walks))
    else:
        walked = tuple(_drawn(walks, selection.sample, selection.seed))
    explicit = [scenario for space in chosen for scenario in space.scenarios]
    refused = _refused(chain(explicit, *(entry.refused for entry in walked)))
    supported = dict.fromkeys(chain(explicit, *(entry.supported for entry in walked)))
    for scenario in refused:
        supported.pop(scenario, None)
    return explicit, walked, supported, refused


def _nearest_line(spaces: Sequence[Space], selection: Selection) -> str:
    """The command line nearest to a selection that runs."""

    def runs(settings: Mapping[str, Sequence[str]]) -> bool:
        axes = {axis: tuple(values) for axis, values in settings.items()}
        explicit, _, supported, _ = _sorted_out(spaces, replace(selection, axes=axes))
        return bool(supported) and not any(map(impossible, explicit))

    chosen = [_selected(space, selection) for space in spaces]
    names = [space.name for space in spaces]
    return proposals.nearest_line(names, selection.systems, selection.axes, chosen, runs)


def _followed(walk: Walk, selection: Selection) -> Iterator[Walked]:
    """What a walk came to and, after one over a cured library, its plain sample."""
    walked = _or_with_own_defaults(walk, selection.seed)
    yield walked
    if walk.version == CURED:
        yield plain_sample(walked)


def _drawn(walks: Sequence[Walk], number: int, seed: int) -> list[Walked]:
    """What walks came to of which so many scenarios in all are drawn, from each walk as many as from the others. What a
    walk does not have is drawn from those that have more; where there are more walks than scenarios, some have none."""
    order = Random(seed).sample(range(len(walks)), len(walks))
    found: dict[int, Walked] = {}
    left = number
    for place, index in enumerate(order):
        found[index] = _or_with_own_defaults(walks[index], seed, -(-left // (len(order) - place)))
        left -= len(found[index].supported)
        if not left:
            break
    more = [index for index, walked in found.items() if left and walked.valid > len(walked.supported)]
    for place, index in enumerate(more):
        share = len(found[index].supported) + -(-left // (len(more) - place))
        left += len(found[index].supported)
        found[index] = _or_with_own_defaults(walks[index], seed, share)
        left -= len(found[index].supported)
    return [found[index] for index in sorted(found)]


def _or_with_own_defaults(walk: Walk, seed: int, sample: int | None = None) -> Walked:
    """What a walk came to; where nothing is left of it, with defaults of its system's on the axes that it does not
    walk."""
    walked = follow(walk, seed, sample)
    if walked.supported:
        return walked
    first = nearest({"system": walk.system, **{axis: texts[0] for axis, texts in walk.axes.items()}})
    own = {axis: (text,) for axis, text in first.axis_values(only_changed=True).items() if axis != "system"}
    with_own = follow(replace(walk, axes={**own, **walk.axes}), seed, sample)
    return with_own if with_own.supported else walked


def _refused(scenarios: Iterable[Scenario]) -> dict[Scenario, str]:
    """The reason for each scenario that the scenario's system refuses; accepted scenarios are left out."""
    reasons = ((scenario, system_named(scenario.system).refusal(scenario)) for scenario in scenarios)
    return {scenario: reason for scenario, reason in reasons if reason is not None}


def parse_shard(text: str, today: date | None = None) -> tuple[int, int]:
    """`I/N`: the I-th of N parts. `tonight/N`: the part of this date, so that N nights in a row walk all of them.

    Raises:
        UsageError: not of that form, or I is not from 1 to N.
    """
    part, _, parts = text.partition("/")
    if part == TONIGHT and _COUNT.fullmatch(parts) and int(parts):
        return (today or date.today()).toordinal() % int(parts) + 1, int(parts)
    if not (_COUNT.fullmatch(part) and _COUNT.fullmatch(parts) and 1 <= int(part) <= int(parts)):
        raise UsageError.of("--shard", text, "I/N with I from 1 to N, or tonight/N", "--shard 2/4")
    return int(part), int(parts)


def in_shard(scenario: Scenario, shard: tuple[int, int]) -> bool:
    """Whether a scenario belongs to a part: decided by its id alone, so that shards of any walk agree."""
    part, parts = shard
    return parts == 1 or int(scenario.id, 16) % parts == part - 1


def _in_shard(scenarios: Iterable[Scenario], shard: tuple[int, int]) -> list[Scenario]:
    return list(scenarios) if shard[1] == 1 else [s for s in scenarios if in_shard(s, shard)]


def _selected(space: Space, selection: Selection) -> Space:
    space = space.on_systems(selection.systems).with_axes(selection.axes, selection.given_by)
    return space.at_strength(selection.strength) if selection.strength else space


def _ordered(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """One server after another, since only a few are alive at a time and each takes seconds to start; of the servers
    those first that have least to do, of a server's scenarios what exposes most, and then the cheap before the dear."""
    exposed = [s.offload.fraction > 0 and s.dtype != PLAIN and s.program != "train" for s in scenarios]
    servers, costs_s = servers_of(scenarios), cost_model().estimates_s(scenarios)
    in_all: dict[str, float] = defaultdict(float)
    for server, cost_s in zip(servers, costs_s, strict=True):
        in_all[server] += cost_s
    turns = {server: turn for turn, server in enumerate(sorted(in_all, key=lambda name: (in_all[name], name)))}
    keys = zip([turns[each] for each in servers], [not each for each in exposed], costs_s, range(len(scenarios)),
               strict=True)  # fmt: skip
    return [scenarios[place] for *_, place in sorted(keys)]
