"""The cures of a system as a table: what each changes, to which releases it applies, and that it does what it says.

A cure is shown three ways, on every regression of its defect: on the plain release the scenario fails, with all cures
it passes, and with all but this one it fails. The third says that it is this cure that does it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from shardproof.errors import CANNOT_IMPORT, HarnessError, NotImportableError, UsageError
from shardproof.issues import cures
from shardproof.issues.cures import Cure
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.tables import text_of
from shardproof.verdict import Verdict
from shardproof.versions import with_cures
from shardproof.world.environments import Environments
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import is_cached

APPLIES, NOT_INSTALLED, NOT_IMPORTED = "applies", "not installed", f"{CANNOT_IMPORT} here"


@dataclass(frozen=True)
class Shown:
    """One regression, three ways. name: of the regression. plain, cured, without: the results on the plain release,
    with all cures, and with all but this one."""

    cure: str
    name: str
    plain: Result
    cured: Result
    without: Result

    @property
    def wrong(self) -> bool:
        """Whether one of the three is not as it must be."""
        fail = self.plain.verdict.is_failure and self.without.verdict.is_failure
        return not fail or self.cured.verdict is not Verdict.PASS

    @property
    def line(self) -> str:
        """What the three came to, for a reader."""
        runs = (("plain", self.plain), ("cured", self.cured), ("all but this one", self.without))
        verdicts = ", ".join(f"{how} {result.verdict.value}" for how, result in runs)
        why = f" ({self.cured.signature or self.cured.reason})" if self.cured.verdict is not Verdict.PASS else ""
        return f"{self.name}: {verdicts}{why}"


def releases(system: System, python: str | None, *, install: bool = False) -> list[str]:
    """The declared releases of a system's package, the newest last; those that are there already unless `install`. Of a
    system whose library came with the interpreter, that one."""
    ranks = interpreter(python)
    if not system.under_test:
        return [ranks.release(name) or "none" for name in system.distributions[:1]]
    package = package_of(system)
    own = (ranks.release("torch") or "").partition("+")[0] if system.is_torch else ""
    return [r.version for r in package.releases if install or r.version == own or is_cached(package, r.version, ranks)]


def applicability(system: System, versions: Sequence[str], python: str | None) -> dict[tuple[str, str], str]:
    """(cure, release) → whether it applies, and why not."""
    places = Environments(python, ())
    found: dict[tuple[str, str], str] = {}
    for version in versions:
        print(f"trying the cures of {system.name} on {version}", file=sys.stderr, flush=True)
        absent = NOT_INSTALLED
        try:
            cured = places.cured(places.resolve(system, with_cures(version, "")))
        except NotImportableError:
            cured, absent = None, NOT_IMPORTED
        except (HarnessError, UsageError):
            cured = None
        for cure in cures.cures_of(system):
            state = absent if cured is None else cured.left.get(cure.id, APPLIES)
            found[cure.id, version] = state
    return found


def scenario_of(system: System, name: str) -> Scenario:
    """The scenario that shows a defect: a regression or, where no plain release can reach it, one beside its cure.

    Args:
        name: as a cure has it; `SYSTEM/NAME` of another system.

    Raises:
        UsageError: there is none.
    """
    owner, _, name = name.rpartition("/")
    system = system_named(owner) if owner else system
    for folder in ("regressions", "cures"):
        file = system.folder.joinpath(folder, f"{name}.toml")
        if file.is_file():
            return Scenario.from_toml(text_of(file, f"{system.name}/{folder}/{name}.toml"), name)
    where = f"{system.name}/regressions/{name}.toml"
    raise UsageError.of(f"scenario of {system.name}", name, f"a file {where}", "Shown-by: 2777, 2777-swap")


def three_ways(system: System, cure: Cure, laboratory: Laboratory) -> Iterator[Shown]:
    """Every regression of a cure's defect, run three ways. The third leaves out the cures that would hide it."""
    but_this = cure.all_but_this
    for name in cure.shown_by:
        scenario = scenario_of(system, name)
        wanted = (None, "", but_this)
        runs = [replace(scenario, version=with_cures(scenario.release, each)) for each in wanted]
        results: dict[Scenario, Result] = {}
        for result in laboratory.examine(runs, lambda scenario, blob: None):
            results[result.scenario] = result
        yield Shown(cure.id, name, *(results[run] for run in runs))


def render(system: System, versions: Sequence[str], found: dict[tuple[str, str], str]) -> str:
    """The table as text: a line a cure, with the releases to which it applies and why it does not apply to others."""
    every = cures.cures_of(system)
    width = max((len(cure.id) for cure in every), default=0)
    lines = [f"{system.name}: {len(every)} cures; releases here: {', '.join(versions) or 'none'}"]
    for cure in every:
        files = ", ".join(PurePosixPath(path).name for path in cure.files)
        lines.append(f"  {cure.id:<{width}}  {cure.changed_lines:>2} lines of {files}, a {cure.kind}")
        versions_by_state: dict[str, list[str]] = {}
        for version in versions:
            versions_by_state.setdefault(found[cure.id, version], []).append(version)
        lines += [f"  {'':<{width}}  {why}: {', '.join(which)}" for why, which in versions_by_state.items()]
    return "\n".join(lines) + "\n"
