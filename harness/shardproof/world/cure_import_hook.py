"""The import hook of a cured library: its modules are compiled from other text than their files hold.

It is installed in a server before anything of the library is imported, so that every rank forked from the server has
the cured modules. Nothing on disk changes: neither the library's files nor its compiled bytecode, which the hook
neither reads nor writes. Tracebacks name the library's file and show the cured lines.
"""

from __future__ import annotations

import json
import linecache
import sys
from collections.abc import ItemsView, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

VARIABLE = "SHARDPROOF_CURES"
"""Of a server: the file with the cured sources, JSON, path below `site-packages` → text. Empty or absent: none."""


def install(file: str) -> None:
    """Import the modules whose text `file` holds from that text; nothing for an empty name.

    Raises:
        ImportError: one of them was imported already, uncured.
    """
    if not file:
        return
    sources = {module_of(path): text for path, text in json.loads(Path(file).read_text("utf-8")).items()}
    early = sorted(sources.keys() & sys.modules.keys())
    if early:
        raise ImportError(f"{', '.join(early)} was imported before its cure")
    sys.meta_path.insert(0, _Finder(sources))


def cured() -> dict[str, str]:
    """Module → its text, of all modules that are cured in this process, whether they are imported yet or not."""
    return {name: text for finder in sys.meta_path if isinstance(finder, _Finder) for name, text in finder.texts()}


def module_of(path: str) -> str:
    """The module that a file below `site-packages` holds."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _Finder(MetaPathFinder):
    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def texts(self) -> ItemsView[str, str]:
        return self._sources.items()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._sources:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._sources[fullname])
        return spec


class _Loader(SourceFileLoader):
    """Loads a module from a text, under the name of its file."""

    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        linecache.cache[self.path] = (len(self._text), None, self._text.splitlines(keepends=True), self.path)
        code: CodeType = self.source_to_code(self._text.encode(), self.path)
        return code

    def get_source(self, fullname: str) -> str:
        return self._text
