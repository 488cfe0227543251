"""Servers of the libraries under test: one warm server a release and variant, started when first needed.

A few are alive at a time: the one that has been idle longest makes room. A release that could not be installed or
imported is remembered, so that a walk does not try it once a scenario.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardproof.errors import HarnessError, UsageError
from shardproof.issues import cures
from shardproof.issues.cures import Cured
from shardproof.protocol.system import System
from shardproof.scenario import Scenario
from shardproof.versions import with_cures
from shardproof.world import cure_import_hook
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import Overlay, build
from shardproof.world.resolved import Resolved, resolve
from shardproof.world.server import ForkServer

ALIVE = 4
VARIANT = "SHARDPROOF_VARIANT"

_Key = tuple[tuple[Path, ...], tuple[str, ...] | None, str, str, str]
"""What a server is made of: the overlay's paths, whose cures it has and which, the warm-up, the variant, the device.
Systems that agree in all of them share one, such as a library and the same with a defect planted in its ranks."""


@dataclass
class _Place:
    """A server, and how many scenarios are using it now."""

    server: ForkServer
    users: int = 0


class Environments:
    """Overlays and their servers. All methods may be called from several threads.

    Args:
        python: interpreter of the ranks; None for the parent's. plugins: modules that servers import first. scratch:
            folder that servers remove when this process is killed.
    """

    def __init__(self, python: str | None, plugins: Sequence[str], scratch: Path | None = None) -> None:
        self._python, self._plugins, self._scratch = python, tuple(plugins), scratch
        self._resolving, self._building = threading.Lock(), threading.Lock()
        self._resolved: dict[tuple[str, str], Resolved] = {}
        self._overlays: dict[tuple[object, ...], Overlay | HarnessError | UsageError] = {}
        self._cured: dict[tuple[str, str], Cured] = {}
        self._changed = threading.Condition()
        self._places: dict[_Key, _Place] = {}  # in the order of last use, the oldest first
        self._closed = False

    def resolve(self, system: str | System, version: str) -> Resolved:
        """What a version of a system is, worked out once.

        Raises:
            UsageError, OverlayError: as `shardproof.world.resolved.resolve`.
        """
        key = (system if isinstance(system, str) else system.name, version)
        with self._resolving:  # that a torch of a gigabyte is whole takes a moment
            if key not in self._resolved:
                self._resolved[key] = resolve(system, version, interpreter(self._python))
            return self._resolved[key]

    def install(self, software: Resolved) -> Resolved:
        """The same software, with its library installed.

        Raises:
            UsageError, OverlayError: as `overlay`.
        """
        return software if software.overlay is not None else software.on(self.overlay(software))

    def overlay(self, software: Resolved) -> Overlay:
        """The overlay of the library, which is installed if need be. Cures change nothing of it; a library that came
        with the interpreter has one that adds nothing.

        Raises:
            UsageError, OverlayError: as `shardproof.world.overlay.build`.
        """
        if software.overlay is not None:
            return software.overlay
        if software.package is None:
            return Overlay(software.installed, ())
        key = (software.package.name, software.release, software.system.accepts.features)
        with self._building:
            if key not in self._overlays:
                try:
                    self._overlays[key] = build(
                        software.package, software.release, interpreter(self._python), software.system.accepts.features
                    )
                except (HarnessError, UsageError) as error:
                    self._overlays[key] = error
            found = self._overlays[key]
        if isinstance(found, Exception):
            raise found
        return found

    def cured(self, software: Resolved) -> Cured | None:
        """What the cures that were asked for came to on the library; None where none was.

        Raises:
            UsageError: the system has no such cure. OverlayError: the library is not to be had.
        """
        if software.cures is None:
            return None
        system, overlay = software.system, self.overlay(software)
        paths = (*overlay.paths, Path(software.interpreter.site))

        def source(name: str) -> str | None:
            file = next((path / name for path in paths if (path / name).is_file()), None)
            return file.read_text("utf-8") if file else None

        key = (system.name, with_cures(software.release, software.cures))
        with self._building:
            if key not in self._cured:
                chosen = cures.cures_asked_for(system, software.cures)
                self._cured[key] = cures.apply(chosen, source, unseen=not overlay.walked)
            return self._cured[key]

    @contextmanager
    def server(self, software: Resolved, scenario: Scenario) -> Iterator[ForkServer]:
        """The warm server that a scenario's ranks are forked from; it stays alive inside the context."""
        info, overlay = software.system, self.overlay(software)
        variant = info.variant(scenario)
        warm_up = info.entry(info.warm_up) if info.warm_up and scenario.device == "cpu" else ""
        cured = self.cured(software)
        key = (overlay.paths, (info.name, *cured.applied) if cured else None, warm_up, variant, scenario.device)
        place = self._enter(key, overlay, cured)
        try:
            yield place.server
        finally:
            with self._changed:
                place.users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End every server; whoever waits for one gets an error."""
        with ExitStack() as stack, self._changed:
            self._closed = True
            self._changed.notify_all()
            for place in self._places.values():
                stack.callback(place.server.close)  # outside of the lock, since it may take seconds
            self._places.clear()

    def _enter(self, key: _Key, overlay: Overlay, cured: Cured | None) -> _Place:
        with ExitStack() as stack, self._changed:
            while key not in self._places and len(self._places) >= ALIVE and not self._closed:
                idle = next((name for name, place in self._places.items() if not place.users), None)
                if idle is None:
                    self._changed.wait()
                else:
                    stack.callback(self._places.pop(idle).server.close)
            if self._closed:
                raise HarnessError("the laboratory is closed")
            place = self._places.pop(key, None) or _Place(self._start(overlay, cured, *key[2:]))
            place.users += 1
            self._places[key] = place
            return place

    def _start(self, overlay: Overlay, cured: Cured | None, warm_up: str, variant: str, device: str) -> ForkServer:
        return ForkServer(
            python=interpreter(self._python).path,
            # plugins may lie in the current folder, after everything of the library
            path_prefix=[*overlay.paths, Path.cwd()],
            warm_up=[warm_up] if warm_up else [],
            plugins=self._plugins,
            env={**overlay.environment, VARIANT: variant, cure_import_hook.VARIABLE: self._kept(cured)},
            workers=0,
            scratch=self._scratch,
            device=device,
        )

    def _kept(self, cured: Cured | None) -> str:
        """The file that a server reads its cured sources from; empty where there are none."""
        if cured is None:
            return ""
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=self._scratch, prefix="cured-", suffix=".json", delete=False
        ) as file:
            json.dump(dict(cured.sources), file)
        return file.name
