"""What must be ready before scenarios can run, and how long that takes: releases that are not installed yet, and
servers that have to import a library.

A walk of a hundred scenarios of half a second each is done in a minute, but not on a fresh machine: pip installs the
release first, and a server imports it before it forks the first ranks. Which releases are missing is seen in the folder
of overlays (`shardproof.world.overlay`), without the network. For instance, on a machine that has nothing yet

    deepspeed@0.19.7+cured, deepspeed@0.19.8    two releases to install, and two servers
    megatron-core, with and without TransformerEngine's optimizer    one release, and two servers

*What an installation takes*: what the last one of the same distribution took on this machine, which is recorded beside
it. Without a record `LIST_S` for each list of requirements and `TORCH_S` for a torch, as measured on two cores with a
fast index (4 to 36 s, and 14 to 22 s). The library is then imported once, to see that it is whole: as long as a server
needs to start.
*What a server takes*: `START_S`.
*Not counted*: that of more than four servers the one that was idle longest makes room, and may have to start again. A
plan has the scenarios of one server one after another (`shardproof.space.plan`), so that few do. Nor the servers of
single cures, which a failure of a library without cures is run on once more (`shardproof.laboratory.attribution`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from shardproof.loading import as_loaded
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.scenario import Scenario
from shardproof.versions import SOURCES, split_cures

if TYPE_CHECKING:
    from shardproof.world.interpreter import Interpreter

LIST_S = 15.0
"""Seconds to install a list of requirements, where none was installed before."""

START_S = 8.0
"""Seconds until a server has imported torch and a library and has rehearsed what ranks do. Measured are 6 to 7 s of one
core, for Megatron-Bridge 10 and for NeMo Automodel 16."""

TORCH_S = 30.0
"""Seconds to install a torch and to compile what stands in for NVIDIA's libraries, where none was installed before."""

_SYSTEM, _SERVER = attrgetter("system"), attrgetter("system", "version", "device", "load_version")
_VARIANT = attrgetter("optimizer", "options")
"""The axes that decide which variant of a system it is, as far as the systems are concerned that are here."""


@dataclass(frozen=True)
class Preparation:
    """The releases to install and the servers to start before the scenarios of a plan can run.

    * installs_s: release to install, such as `deepspeed 0.19.8` → seconds. servers_s: server to start → seconds.
    """

    installs_s: Mapping[str, float] = field(default_factory=dict)
    servers_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Name of each part → seconds."""
        return {**self.installs_s, **self.servers_s}


NOTHING = Preparation()


def preparation(scenarios: Iterable[Scenario], python: str | None) -> Preparation:
    """The releases and servers that scenarios need and that are not there yet.

    Args:
        python: interpreter of the ranks; None for the parent's.
    """
    releases: dict[str, tuple[System, str]] = {}
    servers: dict[str, float] = {}
    for scenario in _one_of_each(scenarios):
        for each in _loading_too(scenario):
            info = system_named(each.system)
            if server := _server(info, each):
                servers[server] = START_S
            if name := _release(info, each):
                releases[name] = info, name.rpartition(" ")[2]
    return Preparation(_missing_s(releases, python) if releases else {}, servers)


def needs(scenario: Scenario) -> Iterator[str]:
    """The names of a scenario's releases and servers, as `Preparation` has them, whether they are ready or not."""
    for each in _loading_too(scenario):
        info = system_named(each.system)
        yield _release(info, each)
        yield _server(info, each)


def servers_of(scenarios: Sequence[Scenario]) -> list[str]:
    """The name of the server that each scenario's ranks are forked from; empty where a judge simulates them."""
    varied = {name for name in set(map(_SYSTEM, scenarios)) if system_named(name).variant_entry}
    keys = [(*_SERVER(s), *_VARIANT(s)) if s.system in varied else (*_SERVER(s), "", "") for s in scenarios]
    one_of_each = dict(zip(keys, scenarios, strict=True))
    names = {key: _server(system_named(s.system), s) for key, s in one_of_each.items()}
    return [names[key] for key in keys]


def _one_of_each(scenarios: Iterable[Scenario]) -> Iterable[Scenario]:
    """A few scenarios of thousands, which together need every release and every server that all of them need."""
    every = list(scenarios)
    varied = {name: info for name in set(map(_SYSTEM, every)) if (info := system_named(name)).variant_entry}
    found = dict(zip(map(_SERVER, every), every, strict=True))
    alike = {(*_SERVER(s), *_VARIANT(s)): s for s in every if s.system in varied}
    variants = {(*_SERVER(s), varied[s.system].variant(s)): s for s in alike.values()}
    return (*(s for s in found.values() if s.system not in varied), *variants.values())


def _loading_too(scenario: Scenario) -> tuple[Scenario, ...]:
    """The scenario of the first ranks and, where the ranks that load have another release, their scenario too."""
    return (scenario,) if scenario.load_version == "same" else (scenario, as_loaded(scenario))


def _server(info: System, scenario: Scenario) -> str:
    """The server that ranks are forked from; empty for a system whose ranks a judge simulates."""
    if info.world == "lockstep":
        return ""
    return " ".join(filter(None, (info.name, scenario.version, scenario.device, info.variant(scenario))))


def _release(info: System, scenario: Scenario) -> str:
    """The release that a scenario has installed; empty for a library that comes with the interpreter, and for a commit
    or a working tree, which is laid out before a plan or a run is made."""
    release = split_cures(scenario.version)[0]
    if release.startswith(SOURCES) or not (info.package or (info.is_torch and release)):
        return ""
    return f"torch {release}" if info.is_torch else f"{info.package} {package_of(info).release(release).version}"


def _missing_s(releases: Mapping[str, tuple[System, str]], python: str | None) -> dict[str, float]:
    from shardproof.world.interpreter import interpreter

    ranks = interpreter(python)
    found = {name: _install_s(info, release, ranks) for name, (info, release) in releases.items()}
    return {name: seconds for name, seconds in found.items() if seconds}


def _install_s(info: System, release: str, ranks: Interpreter) -> float:
    """Seconds to install a release; 0 where it is there."""
    from shardproof.world.overlay import is_installed, wanted

    if info.is_torch and release == (ranks.release("torch") or "").partition("+")[0]:
        return 0.0
    lists = ((f"torch=={release}",),) if info.is_torch else wanted(package_of(info), release)
    unknown_s = TORCH_S if info.is_torch else LIST_S
    missing = [_recorded_s(each) or unknown_s for each in lists if not is_installed(each, ranks)]
    return sum(missing) + START_S if missing else 0.0


def _recorded_s(requirements: Sequence[str]) -> float | None:
    """Seconds that the last installation here took of a list that begins with the same distribution."""
    from shardproof.world.overlay import TOOK, cache_folder

    name = requirements[0].partition("==")[0]
    files = sorted(cache_folder().glob(f"{name}-[0-9]*/{TOOK}"), key=lambda file: file.stat().st_mtime)
    with suppress(IndexError, OSError, ValueError):
        return float(files[-1].read_text())
    return None
