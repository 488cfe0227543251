"""The software that a scenario runs on, resolved once: system, release, cures, and the torch under them.

A scenario names it in one text, such as `0.16.1+cured` or `git:main`. `resolve` takes that text apart where the
scenario meets a laboratory, and the value is handed on from there.

    software = resolve("megatron-core", "0.16.1+cured:2777", interpreter())
    software.release, software.cures, software.version          # "0.16.1", "2777", "0.16.1+cured:2777"
    software.on(overlay).version                                # what is installed calls itself

The release of torch is not installed into an overlay: another torch is another interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardproof import __version__
from shardproof.issues import cures
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import Package, package_of
from shardproof.protocol.system import System
from shardproof.scenario import Scenario
from shardproof.versions import SOURCES, split_cures, with_cures
from shardproof.world.interpreter import Interpreter
from shardproof.world.overlay import Overlay
from shardproof.world.torches import with_torch


@dataclass(frozen=True)
class Resolved:
    """The software under a scenario.

    * system: whose rank drives the library. package: that it installs into an overlay; None where the library comes
      with the interpreter, such as torch, or is ours.
    * release: as it was asked for, without cures; empty for the newest. cures: those that were asked for, joined by
      commas; empty for all, None for none.
    * interpreter: whose torch the ranks have.
    * overlay: what was installed; None before it is.
    """

    system: System
    package: Package | None
    release: str
    cures: str | None
    interpreter: Interpreter
    overlay: Overlay | None = None

    @property
    def is_tree(self) -> bool:
        """Whether it is a working tree or a commit, which says what it is only once it is laid out."""
        return self.release.startswith(SOURCES)

    @property
    def version(self) -> str:
        """The version in results, with the cures: that of the installed library or, before the installation, the
        release asked for."""
        if self.package is None and not self.system.distributions:
            return __version__
        return with_cures(self._plain, self.cures)

    @property
    def _plain(self) -> str:
        if self.package is None:
            return self.interpreter.release(self.system.distributions[0]) or ""
        return self.overlay.version if self.overlay else self.release or self.package.newest.version

    @property
    def paths(self) -> tuple[Path, ...]:
        """What comes first on the path of ranks; nothing before it is installed."""
        return self.overlay.paths if self.overlay else ()

    @property
    def installed(self) -> str:
        """The version that came with the interpreter, of a system that installs none."""
        return replace(self, cures=None).version

    @property
    def asked_of_limits(self) -> str:
        """The release that a system's limits are asked about.

        A working tree or a commit has none in its name. Its limits are asked about what it calls itself, with the
        features that its source shows (`shardproof.protocol.features`), so that `megatron-core@git:main` gets the
        limits of 0.19 and not those of nothing.
        """
        if self.package is None:
            return self.release
        if self.is_tree and self.overlay:
            return self.overlay.asked
        return self.package.release(self.release).version

    def refusal(self, scenario: Scenario) -> str | None:
        """Why this software does not run a scenario; None where it does."""
        asked = self.asked_of_limits
        return self.system.refusal(scenario if asked == scenario.version else replace(scenario, version=asked))

    def under_its_torch(self) -> Resolved:
        """The same under the torch that was asked for, if the library is torch. It is downloaded if need be.

        Raises:
            UsageError, OverlayError: as `with_torch`.
        """
        if not self.system.is_torch or not self.release:
            return self
        return replace(self, interpreter=with_torch(self.release, self.interpreter))

    def on(self, overlay: Overlay) -> Resolved:
        """The same, once it is installed."""
        return replace(self, overlay=overlay)


def named(system: str | System, version: str, base: Interpreter) -> Resolved:
    """What a version of a system says, with nothing installed: under the interpreter of the ranks.

    Raises:
        UsageError: no such system, or it has no such cure.
    """
    info = system_named(system) if isinstance(system, str) else system
    release, wanted = split_cures(version)
    if wanted is not None:
        cures.cures_asked_for(info, wanted)
    return Resolved(info, package_of(info) if info.package else None, release, wanted, base)


def resolve(system: str | System, version: str, base: Interpreter) -> Resolved:
    """What a version of a system is.

    Args:
        system: its name, or itself. version: a release, `path:DIR`, `git:REV`, or nothing for the newest; behind it
            `+cured` for some or all cures. base: the interpreter of the ranks, unless another torch is asked for.

    Raises:
        UsageError, OverlayError: as `named` and `with_torch`.
    """
    return named(system, version, base).under_its_torch()
