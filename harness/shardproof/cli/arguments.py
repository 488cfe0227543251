"""What the words of a command line mean: plans, folders, plugins, stored results. Each says what is wrong with a word.

Every function raises UsageError for what a user can cause, before anything has run and without touching what is there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardproof.errors import UsageError
from shardproof.faults.requested import require_faults
from shardproof.versions import split_cures, with_cures

if TYPE_CHECKING:
    from shardproof.issues.known_issues import KnownIssues
    from shardproof.protocol.releases import Package
    from shardproof.protocol.system import System
    from shardproof.request import OnRay
    from shardproof.result import Result
    from shardproof.scenario import Scenario
    from shardproof.space.plan import Plan


def planned(
    names: tuple[str, ...], systems: tuple[str, ...], sets: tuple[str, ...], strength: str | None, sample: int | None,
    seed: int, faults: tuple[str, ...], shard: str | None,
) -> Plan:  # fmt: skip
    """The plan of a selection given on the command line."""
    from shardproof.space.files import load_space, parse_settings, parse_strength
    from shardproof.space.plan import Selection, make_plan, parse_shard
    from shardproof.world.bounds import require_worlds

    axes = parse_settings(sets)
    if faults:
        axes = {**axes, "faults": (",".join(faults),)}
    require_faults({fault for value in axes.get("faults", ()) for fault in value.split(",") if fault})
    selection = Selection(
        tuple(map(placed, systems)),
        axes,
        parse_strength(strength) if strength else None,
        sample,
        seed,
        parse_shard(shard) if shard else (1, 1),
    )
    made = make_plan([load_space(name) for name in names or ("smoke",)], selection)
    require_faults({fault for scenario in made.scenarios for fault in scenario.faults})
    require_worlds(made.supported)
    return made


def places_of_releases(names: Sequence[str], systems: Sequence[str]) -> dict[tuple[str, str], str]:
    """(system, version) → where a scenario file asks for that release, of those that save and of those that load.

    A walk's release has no place: shardproof's own walks name releases that a user has never read of.

    Args:
        names, systems: as on the command line; `--system` takes the place of what files say.
    """
    from shardproof.scenario import Scenario
    from shardproof.space.files import load_space

    found: dict[tuple[str, str], str] = {}
    for name in () if systems else names:
        space = load_space(name)
        for number, stated in enumerate(space.stated, 1):
            scenario, where = Scenario.from_axes(stated), f"{name}: scenario {number}"
            if stated.get("version"):
                found[scenario.system, scenario.version] = f"{where}: version"
            if stated.get("load_version", "same") not in ("same", "newest"):
                loading = with_cures(scenario.load_version, scenario.cures)
                found.setdefault((scenario.system, loading), f"{where}: load_version")
    return found


def writable_folder(path: Path) -> Path:
    """The folder of a run's results, created and writable. A report page that is there already must be one of ours.

    Raises:
        UsageError: it cannot be.
    """
    from shardproof.report.files import PAGES
    from shardproof.report.publish import require_publishable, require_writable

    form = "--out reports/mine"
    try:
        require_writable(path)
    except OSError as error:
        allowed = f"a folder that can be written ({error.strerror})"
        raise UsageError.of("--out", str(path), allowed, form) from None
    for name in PAGES:
        require_publishable(path / name, "--out", form)
    return path


def require_output_files(out: Path | None, **options: Path | None) -> None:
    """Check that every output file can be written, and that no two are one. They are written after hours of work, and
    it is better to know before.

    Args:
        out: the folder of the run's own files, with which they must not be one either.
        options: option → the file that it names.

    Raises:
        UsageError: one cannot be written, would replace what is not ours, or is named twice.
    """
    from shardproof.report.publish import require_publishable

    taken = dict.fromkeys(_run_files(out), "the run") if out else {}
    for option, path in options.items():
        if path is None:
            continue
        name = f"--{option}"
        form = f"{name} run.{'xml' if option == 'junit' else option}"
        require_publishable(path, name, form)
        if path.exists() and not path.is_file():
            continue  # several may go to one device
        place = os.path.realpath(path)
        if place in taken:
            raise UsageError.of(name, str(path), f"another file than that of {taken[place]}", form)
        taken[place] = name


def _run_files(out: Path) -> list[str]:
    from shardproof.report.files import PAGES
    from shardproof.store import DATABASE

    return [os.path.realpath(out / name) for name in (*PAGES, DATABASE)]


def on_device(sets: Sequence[str], device: str | None) -> tuple[str, ...]:
    """The settings of an axis that `--device` stands for, with those of `--set`."""
    return tuple(sets) if device is None else (*sets, f"device={device}")


def on_ray(executor: str, address: str | None, most: int | None) -> OnRay | None:
    """The cluster that `--executor` and `--ray-address` name; none for this machine.

    Raises:
        UsageError: an address without `--executor ray`, or Ray is not installed.
    """
    from shardproof.request import OnRay

    if executor == "local":
        if address is not None:
            form = f"--executor ray --ray-address {address}"
            raise UsageError.of("--ray-address", address, "nothing without --executor ray", form)
        return None
    from shardproof.cluster.on_ray import require_ray

    require_ray()
    return OnRay(address or "", most)


def placed(text: str, start: Path = Path()) -> str:
    """A version, or `NAME@VERSION`, with the folder of `path:DIR` absolute, so that it can be replayed anywhere.

    Args:
        start: from where a relative folder is meant; the current folder.
    """
    text, wanted = split_cures(text)
    before, path, folder = text.partition("path:")
    if path and (not before or before.endswith("@")):
        text = f"{before}path:{(start / Path(folder).expanduser()).resolve()}"
    return with_cures(text, wanted)


def one_scenario(name: str, system: str | None, out: Path | None, *, keep_version: bool = False) -> Scenario:
    """The scenario that a file, a regression or the id of a stored result names; on another system, if one is given.

    Args:
        keep_version: on the release that it names; otherwise on none, for a caller that chooses one.

    Raises:
        UsageError: there is none, or several.
    """
    from dataclasses import replace

    from shardproof.space.defaults import completed
    from shardproof.space.files import load_space, split_system

    if _names_a_scenario(name):
        space = load_space(name)
        found = space.on_systems([system] if system else []).scenarios
        if len(found) != 1 or space.walks:
            form = "regressions/torch-fsdp2-164929"
            raise UsageError.of("SCENARIO", name, f"a file with one [scenario]; this one has {len(found)}", form)
        scenario = found[0]
    else:
        scenario = stored(name, out).scenario
        if system:
            given = {**scenario.axis_values(only_changed=True), "system": split_system(system)[0]}
            scenario = completed(given)
    return scenario if keep_version else replace(scenario, version="")


def package_of(scenario: Scenario) -> Package:
    """The package whose releases a scenario can run on.

    Raises:
        UsageError: its system has none.
    """
    from shardproof.protocol import releases
    from shardproof.protocol.registry import all_systems, system_named

    system = system_named(scenario.system)
    if not system.under_test:
        systems = [info.name for info in all_systems() if info.under_test]
        raise UsageError.of("--system", scenario.system, systems or "none here", "--system megatron-core")
    return releases.package_of(system)


def one_package(scenarios: Sequence[Scenario]) -> Package:
    """The package whose releases all of the scenarios can run on.

    Raises:
        UsageError: a system has none, or they have several.
    """
    found = {scenario.system: package_of(scenario) for scenario in scenarios}
    if len(found) > 1:
        raise UsageError(f"scenarios of several systems: {', '.join(sorted(found))}; one system at a time")
    return next(iter(found.values()))


def columns() -> int:
    """The width of the terminal; 120 where output goes elsewhere."""
    import shutil

    return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120


def that_count(issues: KnownIssues, plan: Plan, faults: Sequence[str], asked: bool) -> KnownIssues:
    """Those of known issues that count as known: all in walks, and where it is asked for. Else none for scenario files
    and planted faults, which report their plain verdicts."""
    from shardproof.issues.known_issues import KnownIssues

    return issues if asked or (plan.is_walk and not faults) else KnownIssues()


def shipped_issues() -> KnownIssues:
    """The known issues that ship with shardproof."""
    from shardproof.protocol.registry import all_systems

    return issues_of(all_systems())


def issues_of(systems: Sequence[System]) -> KnownIssues:
    """The known issues of some systems."""
    from shardproof.issues.known_issues import KnownIssues, known_issues_of

    return KnownIssues(
        tuple(issue for system in systems for issue in known_issues_of(system)),
        tuple(issue for system in systems for issue in known_issues_of(system, hidden=True)),
    )


def result_of(name: str, out: Path | None, run: Callable[[Scenario], Result]) -> Result:
    """The stored result that an id names; of a file or a regression, what `run` says of its scenario.

    Raises:
        UsageError: there is none, or several.
    """
    if _names_a_scenario(name):
        return run(one_scenario(name, None, out, keep_version=True))
    return stored(name, out)


def _names_a_scenario(name: str) -> bool:
    """Whether a word means a scenario by its file or name and no stored result: no id has a slash, so that a mistyped
    `regressions/NAME` is refused as a name of scenarios."""
    from shardproof.space.files import names_a_file, space_names

    return "/" in name or name in space_names() or names_a_file(name)


def with_pasted(error: UsageError, result: Result, name: str) -> UsageError:
    """An error that names commands which replay or shrink a result, with those of a user's command line in their place.

    Args:
        name: of the scenario, as it was given: an id of a stored result, or what `run` takes.
    """
    import shlex

    from shardproof.export.case import shrink_of
    from shardproof.report.model import again_of, place_of

    command = tuple(sys.argv[1:])
    options = f"{place_of(command)}{again_of(command)}"
    shown = f"{result.replay}{options}" if result.id.startswith(name) else run_again(name)
    text = str(error).replace(shrink_of(result.id), shrink_of(f"{shlex.quote(name)}{options}"))
    return UsageError(text.replace(result.replay, shown))


def run_again(name: str) -> str:
    """The command that runs a scenario file, with the options of this command that it needs."""
    import shlex

    from shardproof.report.model import again_of

    return f"shardproof run {shlex.quote(name)}{again_of(tuple(sys.argv[1:]))}"


def stored(scenario_id: str, out: Path | None) -> Result:
    """The newest result of a scenario, from one folder's database or from any under `reports/`, for a command that runs
    it again.

    Raises:
        UsageError: there is none, or several; or it is of a trainer whose file the command does not name.
    """
    database, result = database_and_result(scenario_id, out)
    _require_file(result, database)
    return result


def _require_file(result: Result, database: Path) -> None:
    """Check that the system of a result is known; of a trainer, the run that made it says where the file was."""
    from shardproof.protocol.registry import system_named
    from shardproof.report.model import again_of
    from shardproof.store import Store

    try:
        system_named(result.system)
    except UsageError:
        with Store(database) as store:
            again = again_of(store.runs()[-1].command).strip()
        if "--plugin" not in again:
            raise
        allowed = "a trainer whose file the command names, as the run did"
        raise UsageError.of("trainer", result.system, allowed, again) from None


def database_and_result(scenario_id: str, out: Path | None) -> tuple[Path, Result]:
    """The database that holds a scenario's newest result, and that result."""
    from shardproof.store import DATABASE, Store

    _require_id(scenario_id)
    if out and not databases(out):
        raise UsageError.of("--out", str(out), f"a folder with a {DATABASE}", "--out reports/nightly")
    errors: list[UsageError] = []
    for database in databases(out) if out else _all_databases():
        try:
            with Store(database) as store:
                return database, store.result(scenario_id, _with_an_id())
        except UsageError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    raise UsageError.of("ID", scenario_id, "a result of a run under reports/, or --out DIR", _with_an_id())


def _require_id(text: str) -> None:
    """Check that a text can be the beginning of an id.

    Raises:
        UsageError: it cannot, such as the empty text, which every id begins with.
    """
    if not re.fullmatch("[0-9a-f]{1,12}", text):
        raise UsageError.of("ID", text, "1 to 12 hex digits, as reports show them", _with_an_id())


def _with_an_id() -> str:
    """A correct line of the command that is running, with the id of a result."""
    context = click.get_current_context(silent=True)
    return f"shardproof {context.info_name if context else 'explain'} 1a2b3c4d5e6f"


def databases(folder: Path) -> list[Path]:
    """The databases of runs and of sweeps that a folder holds."""
    from shardproof.investigate import sweep_folder
    from shardproof.store import DATABASE

    return [path for name in (DATABASE, sweep_folder.DATABASE) if (path := folder / name).is_file()]


def _all_databases() -> list[Path]:
    """The databases under `reports/`, the newest first, each once: `reports/latest` leads to one of them."""
    from shardproof.folders import REPORTS

    every = [path for folder in sorted(REPORTS.glob("*"), reverse=True) for path in databases(folder)]
    found = {path.resolve(): path for path in every}
    return sorted(found.values(), key=lambda path: -path.stat().st_mtime)
