"""What is installed here, and what each system can run and why not. Imports no library under test."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from harness import __version__
from harness.laboratory import RAM_DISK
from harness.systems.protocol import SystemInfo
from harness.systems.registry import all_systems

_OURS = ("torch", "numpy", "ml_dtypes", "click", "rich", "jinja2", "tomli_w")


def examine() -> str:
    """The whole examination as text."""
    lines = [
        f"shardproof {__version__}, Python {platform.python_version()} ({sys.executable}), {platform.system()}",
        f"cores {os.cpu_count()}, memory {_memory_gib():.1f} GiB, scratch {_scratch()}",
        "",
        "packages",
        *(f"  {name:<10} {_release(name)}" for name in _OURS),
        "",
        "systems",
    ]
    for info in all_systems():
        lines += [f"  {info.name:<22} {_state(info)}", f"  {'':<22} {info.doc}"]
        if info.emulated:
            lines.append(f"  {'':<22} emulated: {', '.join(info.emulated)}")
    return "\n".join(lines) + "\n"


def _state(info: SystemInfo) -> str:
    missing = [name for name in info.distributions if _release(name) == "not installed"]
    if missing:
        return f"cannot run: {', '.join(missing)} not installed"
    module = info.entry.partition(":")[0]
    if not _exists(module):
        return f"cannot run: its module {module} does not exist"
    releases = ", ".join(f"{name} {_release(name)}" for name in info.distributions)
    where = "lockstep, one process" if info.world == "lockstep" else "forked gloo ranks, CPU"
    return f"ready: {where}{', ' + releases if releases else ''}"


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package on the way
        return False


def _release(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _scratch() -> str:
    folder = RAM_DISK if RAM_DISK.is_dir() else Path(tempfile.gettempdir())
    return f"{folder} ({shutil.disk_usage(folder).free / 2**30:.1f} GiB free)"
