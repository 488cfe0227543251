"""The parts of a plan that need a look at a head: the release that a source tree states, and the scenarios refused for
it.

A plan decides about a release by its number. A commit (`git:REV`) and a working tree (`path:DIR`) have none in their
name, so that their limits are asked about what the tree calls itself, as a run does before each scenario. For that the
tree must lie in the cache with what it needs beside it. `shardproof plan` therefore does for a head what `run` would do
first, exports and installs it, and says how long that took: nothing about it is guessed.

*Verifies*: that the head is there, imports, and what its version makes the system refuse.
*Does not verify*: what the library itself refuses when ranks ask it, which only a run shows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from shardproof.errors import HarnessError, UsageError
from shardproof.protocol.registry import system_named
from shardproof.scenario import Scenario
from shardproof.space.plan import Plan
from shardproof.versions import SOURCES, split_cures


@dataclass(frozen=True)
class Head:
    """A commit or a working tree that scenarios of a plan run on.

    * name: as it was asked for, such as `megatron-core@git:main`. called: the version that the tree gives itself, with
      its commit or digest.
    * planned: how many scenarios of the plan run on it. refused: reason → how many of them its version refuses beyond
      those that the plan refuses on any release.
    * ready_s: how long it took to have it ready: exported, installed and imported, or found in the cache.
    """

    name: str
    called: str
    planned: int
    refused: Mapping[str, int]
    ready_s: float


def at_heads(plan: Plan, python: str | None) -> tuple[Plan, tuple[Head, ...]]:
    """A plan in which the heads among its versions refuse what they will refuse, and these heads.

    Args:
        python: interpreter of the ranks; None for the parent's.

    Raises:
        UsageError: no such clone, commit or folder, or it cannot be installed or imported here.
    """
    named = dict.fromkeys(map(attrgetter("system", "version"), plan.supported))
    versions = dict.fromkeys((system, split_cures(version)[0]) for system, version in named)
    wanted = [(s, v) for s, v in versions if v.startswith(SOURCES) and system_named(s).package]
    if not wanted:
        return plan, ()
    from shardproof.world.environments import Environments

    environments = Environments(python, ())
    refused: dict[Scenario, str] = {}
    heads: list[Head] = []
    for system, version in wanted:
        info = system_named(system)
        started = time.monotonic()
        try:
            head = environments.install(environments.resolve(info, version))
        except HarnessError as error:
            allowed = "a head that can be installed and imported here"
            raise UsageError(f"--system: given '{system}@{version}'; allowed: {allowed}; {error}") from None
        ready_s = time.monotonic() - started
        asked = head.asked_of_limits
        own = [s for s in plan.supported if (s.system, s.release) == (system, version)]
        reasons = {s: reason for s in own if (reason := info.refusal(replace(s, version=asked))) is not None}
        refused |= reasons
        heads.append(
            Head(f"{system}@{version}", head.version, len(own), Counter(reasons.values()), ready_s)
        )  # fmt: skip
    supported = tuple(scenario for scenario in plan.supported if scenario not in refused)
    return replace(plan, supported=supported, refused={**plan.refused, **refused}), tuple(heads)
