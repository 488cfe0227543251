"""Checks before anything runs: interpreter, device, machine, clones and the releases that were asked for.

Every function raises UsageError for what a user can cause, with what was given, what is allowed, and a correct form.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardproof.errors import NotImportableError, UsageError
from shardproof.versions import SOURCES, split_cures

if TYPE_CHECKING:
    from shardproof.protocol.releases import Package
    from shardproof.protocol.system import System
    from shardproof.scenario import Scenario
    from shardproof.world.resolved import Resolved

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


def require_device(device: str | None, python: str | None) -> None:
    """Check that the ranks can have a device: a GPU that their interpreter sees, for `cuda`.

    Raises:
        UsageError: no usable GPU, with the reason.
    """
    from shardproof.world.devices import require_gpu

    if device == "cuda":
        require_gpu(python or sys.executable)


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
        system_named(system).device_choices(device)


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


def require_releases(
    scenarios: Iterable[Scenario], python: str | None, places: Mapping[tuple[str, str], str] = MappingProxyType({})
) -> dict[str, str]:
    """Every release that was asked for is there before anything runs, and at least one of them imports.

    Scenarios of a release that does not import here get the verdict `unknown`, and the others run.

    Returns package → releases that will run, for the record of a run.

    Args:
        places: (system, version) → where a file asks for it, such as `bug.toml: scenario 1: version`; the version of a
            `load_version` too. What stands nowhere was asked for with `--system`.

    Raises:
        UsageError: one cannot be installed, or none can be imported; with the last lines of what it said itself.
    """
    from shardproof.world.commands import OverlayError
    from shardproof.world.interpreter import interpreter
    from shardproof.world.overlay import build
    from shardproof.world.resolved import named

    found: dict[str, list[str]] = {}
    refused: list[tuple[str, str, UsageError]] = []
    base = interpreter(python)
    saving = {(scenario.system, scenario.version) for scenario in scenarios}
    for system, version in sorted({*saving, *places}):
        software = named(system, version, base)
        try:
            software = software.under_its_torch()
            if software.package is not None and software.release:
                software = software.on(build(software.package, software.release, base))
        except (OverlayError, UsageError) as error:
            if isinstance(error, UsageError) and not software.system.is_torch:
                raise
            wrong = _without_release(software, version, places.get((system, version), ""), error)
            if not isinstance(error, NotImportableError):
                raise wrong from None
            refused.append((system, version, wrong))
            continue
        if (system, version) not in saving:
            continue
        if software.package is not None:
            found.setdefault(software.package.name, []).append(software.version)
        else:
            require_installed(software.system, software.release, software.installed)
    without = [wrong for system, version, wrong in refused if (system, version) in saving]
    if without and len(without) == len(saving):
        raise without[0]
    return {name: ", ".join(releases) for name, releases in found.items()}


def require_undeclared(
    package: Package, scenario: Scenario, versions: Iterable[str], python: str | None, place: str
) -> None:  # fmt: skip
    """Check that releases which are declared nowhere here can be installed, before anything is tried.

    Args:
        versions: releases, and commits and trees, which are left alone. place: where they were asked for.

    Raises:
        UsageError: one cannot, or cannot be imported.
    """
    for version in versions:
        release, _ = split_cures(version)
        if not version.startswith(SOURCES) and not package.declares(release):
            own = replace(scenario, version=release)
            require_releases([own], python, {(own.system, release): place})


def _without_release(software: Resolved, version: str, place: str, error: Exception) -> UsageError:
    """The error about a release that is not to be had: first those that are known, then what pip or the import said."""
    from shardproof.world.torches import OLDEST

    package, name = software.package, software.system.name
    if package is not None and (software.is_tree or package.declares(software.release)):
        allowed, example = "one that can be installed and imported here", package.newest.version
    elif package is None:
        allowed, example = f"a release of torch from {OLDEST} on that can be installed and imported here", "2.15.0"
    else:
        known = f"{package.releases[0].version} to {package.newest.version}"
        allowed = f"{known}, or another release that can be installed and imported here"
        example = package.newest.version
    given, form = f"{name}@{version}", f"--system {name}@{example}"
    if place:
        word = place.rpartition(" ")[2]
        given, form = version, f"{word} {example}" if word.startswith("--") else f'{word} = "{example}"'
    said = "" if isinstance(error, UsageError) else f"\n{error}"
    return UsageError(f"{UsageError.of(place or '--system', given, allowed, form)}{said}")


def require_installed(info: System, version: str, installed: str) -> None:
    """Check that the release asked for is the one there is: a library that came with the interpreter cannot be
    exchanged.

    Raises:
        UsageError: `version` is another one.
    """
    if version not in ("", installed, installed.partition("+")[0]):
        allowed = f"{installed or 'none'}, which is installed; another one with --python PATH"
        raise UsageError.of(f"version of {info.name}", version, allowed, f"--system {info.name}")
