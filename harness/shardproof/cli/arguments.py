"""What the words of a command line mean: plans, folders, plugins, stored results. Each says what is wrong with a word.

Every function raises UsageError for what a user can cause, before anything has run and without touching what is there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof import __version__
from shardproof.errors import MOST_GIVEN, UsageError
from shardproof.faults.requested import require_faults
from shardproof.versions import split_cures, with_cures

if TYPE_CHECKING:
    from shardproof.issues.known_issues import KnownIssues
    from shardproof.protocol.releases import Package
    from shardproof.result import Result
    from shardproof.run import OnRay
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


PLUGINS = "shardproof.plugins"
"""The entry-point group in which an installed package names its plugin's module."""


def installed_plugins() -> list[str]:
    """The modules of installed plugins.

    `importlib.metadata` takes longer to import than all of this takes, so that it is asked only where a package that
    `sys.path` shows has the group's name in its entry points, or where something else than a folder may hold packages.
    """
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    folders = [Path(entry or ".") for entry in sys.path]
    if len(finders) == 1 and not any(folder.is_file() or _names_plugins(folder) for folder in folders):
        return []
    from importlib.metadata import entry_points

    return [point.module for point in entry_points(group=PLUGINS)]


def _names_plugins(folder: Path) -> bool:
    """Whether the metadata of some package in a folder names the group."""
    files = [*folder.glob("*.dist-info/entry_points.txt"), *folder.glob("*.egg-info/entry_points.txt")]
    return any(PLUGINS.encode() in file.read_bytes() for file in files)


def load_plugins(modules: Sequence[str]) -> tuple[str, ...]:
    """Import installed plugins and those named, which register their systems, models, faults and rules.

    Returns all their modules, for the ranks to import too. A module beside the user is found, here and in the ranks,
    but no other module gives way to one that lies there.
    """
    if modules and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    installed = installed_plugins()
    wanted = tuple(dict.fromkeys((*installed, *modules)))
    for module in wanted:
        try:
            import_module(module)
            _require_whole()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_GIVEN]
            raise UsageError.of(
                "--plugin" if module in modules else f"installed plugin (entry-point group {PLUGINS})",
                module,
                f"a module that imports ({why})",
                "--plugin my_package.my_rules",
            ) from error
    return wanted


def _require_whole() -> None:
    """Check that a plug-in left in the tables that it may add to what belongs there.

    Raises:
        TypeError: it did not.
    """
    from shardproof.models import ZOO, ModelSpec

    for name, model in ZOO.items():
        if not isinstance(model, ModelSpec) or model.name != name:
            raise TypeError(f"it made model {name!r} {model!r}, which is no model of that name")


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
    from shardproof.run import DATABASE

    return [os.path.realpath(out / name) for name in (*PAGES, DATABASE)]


RANKS_NEED = ("torch", "numpy", "ml_dtypes", "tomli_w")


def require_interpreter(python: str | None) -> None:
    """Check that the interpreter of the ranks exists, runs, and has what ranks need.

    Raises:
        UsageError: it does not.
    """
    from shardproof.world.interpreter import interpreter

    if python is None:
        return
    found = interpreter(python)
    missing = [name for name in RANKS_NEED if found.release(name) is None]
    if missing or tuple(map(int, found.python.split(".")[:2])) < (3, 11):
        has = f"Python {found.python} without {', '.join(missing)}" if missing else f"Python {found.python}"
        allowed = f"Python 3.11 or later with {', '.join(RANKS_NEED)} ({has})"
        raise UsageError.of("--python", python, allowed, f"--python {sys.executable}")


def on_device(sets: Sequence[str], device: str | None) -> tuple[str, ...]:
    """The settings of an axis that `--device` stands for, with those of `--set`."""
    return tuple(sets) if device is None else (*sets, f"device={device}")


def require_device(device: str | None, python: str | None) -> None:
    """Check that there is such a device for the ranks.

    Raises:
        UsageError: there is none, and why.
    """
    from shardproof.world.devices import require_gpu

    if device == "cuda":
        require_gpu(python or sys.executable)


def on_ray(executor: str, address: str | None, most: int | None) -> OnRay | None:
    """The cluster that `--executor` and `--ray-address` name; none for this machine.

    Raises:
        UsageError: an address without `--executor ray`, or Ray is not installed.
    """
    from shardproof.run import OnRay

    if executor == "local":
        if address is not None:
            form = f"--executor ray --ray-address {address}"
            raise UsageError.of("--ray-address", address, "nothing without --executor ray", form)
        return None
    from shardproof.cluster.on_ray import require_ray

    require_ray()
    return OnRay(address or "", most)


def require_machine(scenarios: Collection[Scenario], python: str | None, at_once: int = 1) -> None:
    """Check that this machine has what scenarios need: `require_device` for every scenario, what its system was told to
    use, worlds within the bound, and room for as many as run at once.

    Raises:
        UsageError: it has not.
    """
    from shardproof.protocol.registry import system_named
    from shardproof.world.bounds import require_room, require_worlds

    require_worlds(scenarios)
    require_room(scenarios, at_once)
    for device, system in sorted({(scenario.device, scenario.system) for scenario in scenarios}):
        require_device(device, python)
        system_named(system).chosen(device)


def use_clones(clones: Sequence[str]) -> None:
    """Name the clones of `--clone NAME=DIR`, for every later `NAME@git:REV` of this process and those that it starts.

    NAME is a system, such as `automodel`, or its package as the index calls it, such as `nemo-automodel`. DIR is a
    repository of git's, with a work tree or bare; what is checked out there does not matter.

    Raises:
        UsageError: not of that form, an unknown name, or no such folder.
    """
    for clone in clones:
        name, equals, folder = clone.partition("=")
        if not equals or not Path(folder).is_dir():
            raise UsageError.of("--clone", clone, "NAME=DIR, a folder", "--clone megatron-core=/src/Megatron-LM")
        os.environ[clone_variable_of(name)] = str(Path(folder).resolve())


def clone_variable_of(name: str) -> str:
    """The environment variable that names the clone of a system's package; name: the system's, or the package's.

    Raises:
        UsageError: there is no such system with a package.
    """
    from shardproof.protocol.registry import all_systems
    from shardproof.protocol.releases import package
    from shardproof.world.overlay import clone_variable

    of_system = {system.name: system.under_test for system in all_systems()}
    return clone_variable(package(of_system.get(name) or name).name)


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


def require_releases(scenarios: Iterable[Scenario], python: str | None) -> dict[str, str]:
    """Every release that was asked for by name is there and imports, before anything runs.

    Returns package → releases that will run, for the record of a run.

    Raises:
        UsageError: one is not; with the last lines of what it said itself.
    """
    from shardproof.issues import cures
    from shardproof.laboratory.laboratory import require_installed
    from shardproof.protocol.registry import system_named
    from shardproof.protocol.releases import package
    from shardproof.world.interpreter import interpreter
    from shardproof.world.overlay import OverlayError, build
    from shardproof.world.torches import with_torch

    found: dict[str, list[str]] = {}
    for system, version in sorted({(scenario.system, scenario.version) for scenario in scenarios}):
        info = system_named(system)
        release, wanted = split_cures(version)
        if wanted is not None:
            cures.chosen(info, wanted)
        if info.is_torch and release:
            try:
                with_torch(release, interpreter(python))
            except (OverlayError, UsageError) as error:
                allowed = "a release of torch that can be installed and imported here"
                raise UsageError(f"--system: given '{system}@{version}'; allowed: {allowed}; {error}") from None
        elif info.package:
            ran = package(info.package).newest.version
            try:
                ran = build(package(info.package), release, interpreter(python)).version if release else ran
            except OverlayError as error:
                allowed = "a release that can be installed and imported here"
                raise UsageError(f"--system: given '{system}@{version}'; allowed: {allowed}; {error}") from None
            found.setdefault(info.package, []).append(with_cures(ran, wanted))
        elif release:
            first = info.distributions[0] if info.distributions else ""
            require_installed(info, release, interpreter(python).release(first) or "")
    return {name: ", ".join(releases) for name, releases in found.items()}


def one_scenario(name: str, system: str | None, out: Path | None, *, keep_version: bool = False) -> Scenario:
    """The scenario that a file, a regression or the id of a stored result names; on another system, if one is given.

    Args:
        keep_version: on the release that it names; otherwise on none, for a caller that chooses one.

    Raises:
        UsageError: there is none, or several.
    """
    from dataclasses import replace

    from shardproof.space.defaults import completed
    from shardproof.space.files import load_space, names_a_file, space_names, split_system

    if name in space_names() or names_a_file(name):
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
    from shardproof.protocol.registry import all_systems, system_named
    from shardproof.protocol.releases import package

    name = system_named(scenario.system).under_test
    if not name:
        systems = [info.name for info in all_systems() if info.under_test]
        raise UsageError.of("--system", scenario.system, systems or "none here", "--system megatron-core")
    return package(name)


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


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write a document to a file that was found to be writable; nothing without one."""
    from shardproof.report.publish import publish

    if path is not None:
        publish(path, json_text(document))


def json_text(document: Mapping[str, Any]) -> str:
    """A document as text that begins with who wrote it, so that a later command may replace it."""
    return json.dumps({"written_by": f"shardproof {__version__}", **document}, indent=1, allow_nan=False) + "\n"


def that_count(issues: KnownIssues, plan: Plan, faults: Sequence[str]) -> KnownIssues:
    """Those of known issues that count as known: all in walks, none for scenario files and planted faults, which report
    their plain verdicts."""
    from shardproof.issues.known_issues import KnownIssues

    return KnownIssues() if faults or not plan.is_walk else issues


def shipped_issues() -> KnownIssues:
    """The known issues that ship with shardproof."""
    from shardproof.issues.known_issues import KnownIssues, known_issues_of
    from shardproof.protocol.registry import all_systems

    systems = all_systems()
    return KnownIssues(
        tuple(issue for system in systems for issue in known_issues_of(system)),
        tuple(issue for system in systems for issue in known_issues_of(system, hidden=True)),
    )


def result_of(name: str, out: Path | None, run: Callable[[Scenario], Result]) -> Result:
    """The stored result that an id names; of a file or a regression, what `run` says of its scenario.

    Raises:
        UsageError: there is none, or several.
    """
    from shardproof.space.files import names_a_file, space_names

    if name in space_names() or names_a_file(name):
        return run(one_scenario(name, None, out, keep_version=True))
    return stored(name, out)


def stored(scenario_id: str, out: Path | None) -> Result:
    """The newest result of a scenario, from one folder's database or from any under `reports/`."""
    return kept(scenario_id, out)[1]


def kept(scenario_id: str, out: Path | None) -> tuple[Path, Result]:
    """The database that holds a scenario's newest result, and that result."""
    from shardproof.run import DATABASE
    from shardproof.store import Store

    _require_id(scenario_id)
    if out and not databases(out):
        raise UsageError.of("--out", str(out), f"a folder with a {DATABASE}", "--out reports/nightly")
    errors: list[UsageError] = []
    for database in databases(out) if out else _all_databases():
        try:
            with Store(database) as store:
                return database, store.result(scenario_id)
        except UsageError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    raise UsageError.of("ID", scenario_id, "a result of a run under reports/, or --out DIR", "shardproof explain 1a2b")


def _require_id(text: str) -> None:
    """Check that a text can be the beginning of an id.

    Raises:
        UsageError: it cannot, such as the empty text, which every id begins with.
    """
    if not re.fullmatch("[0-9a-f]{1,12}", text):
        raise UsageError.of("ID", text, "1 to 12 hex digits, as reports show them", "shardproof explain 1a2b3c4d5e6f")


def databases(folder: Path) -> list[Path]:
    """The databases of a folder: that of its runs, and that of its sweeps."""
    from shardproof.investigate import sweep_folder
    from shardproof.run import DATABASE

    return [path for name in (DATABASE, sweep_folder.DATABASE) if (path := folder / name).is_file()]


def _all_databases() -> list[Path]:
    """The databases under `reports/`, the newest first, each once: `reports/latest` leads to one of them."""
    from shardproof.folders import REPORTS

    every = [path for folder in sorted(REPORTS.glob("*"), reverse=True) for path in databases(folder)]
    found = {path.resolve(): path for path in every}
    return sorted(found.values(), key=lambda path: -path.stat().st_mtime)
