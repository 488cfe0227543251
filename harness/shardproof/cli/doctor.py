"""What is installed here, what each system and each release can run, and why not. Imports no library under test.

*Verifies*: what is there, by its metadata; what upstream's declarations say about the pairs.
*Does not verify*: that a release works: that is what scenarios are for.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from packaging.version import InvalidVersion, Version

from shardproof import __version__
from shardproof.errors import HarnessError, UsageError
from shardproof.laboratory.laboratory import scratch_folder
from shardproof.protocol.registry import all_systems
from shardproof.protocol.releases import Package, package_of
from shardproof.protocol.system import System
from shardproof.scenario import Scenario
from shardproof.space.files import load_space
from shardproof.world.devices import Gpus, gpus
from shardproof.world.interpreter import SAFE_PATH, Interpreter, interpreter
from shardproof.world.overlay import cache_folder, clone_variable, is_cached, is_imported
from shardproof.world.server import ForkServer

_OURS = ("torch", "numpy", "ml_dtypes", "click", "filelock", "jinja2", "packaging", "rich", "tomli_w")
_INDENT = " " * 24
REHEARSAL_S = 180.0
INDEX_S = 60.0


def examine(python: str | None = None, *, newer: bool = False) -> str:
    """The whole examination as text.

    Args:
        python: interpreter of the ranks; None for ours. newer: whether to ask the package index for newer releases.

    Raises:
        UsageError: it cannot be run.
    """
    ranks = interpreter(python)
    lines = [
        f"shardproof {__version__}, Python {platform.python_version()} ({sys.executable}), {platform.system()}",
        f"cores {os.cpu_count()}, memory {_memory_gib():.1f} GiB, scratch {_scratch()}",
        f"overlays {cache_folder()}",
        *([f"ranks: Python {ranks.python} ({ranks.path})"] if python else []),
        "",
        "packages",
        *(f"  {name:<10} {ranks.release(name) or 'not installed'}" for name in _OURS),
        "",
        "torch",
        *(f"  {line}" for line in _torch(ranks, gpus(ranks.path))),
        "",
        "ranks",
        *(f"  {line}" for line in _rehearsed(ranks)),
        "",
        "gpu (--device cuda)",
        *(f"  {line}" for line in _gpu(gpus(ranks.path), ranks)),
        "",
        "systems",
    ]
    for info in all_systems():
        lines += [f"  {info.name:<22}{_state(info, ranks)}", f"{_INDENT}{info.doc}"]
        if info.emulated:
            lines.append(f"{_INDENT}emulated: {', '.join(info.emulated)}")
        lines += [
            f"{_INDENT}{what}, {device}: {how}"
            for device in info.accepts.devices
            for what, how in _device_choices(info, device)
        ]
        if info.under_test:
            lines += [_INDENT + line for line in _releases(info, package_of(info), ranks)]
            if newer:
                lines += [_INDENT + line for line in _newer(package_of(info), ranks)]
    return "\n".join(lines) + "\n"


def _device_choices(info: System, device: str) -> list[tuple[str, str]]:
    """What ranks on a device get where there is a choice; or what is wrong with the choice that the environment asks
    for."""
    try:
        return list(info.device_choices(device).items())
    except UsageError as error:
        return [("error", str(error).split("\n", 1)[0])]


def _torch(ranks: Interpreter, found: Gpus) -> list[str]:
    """Which build of torch the ranks have, and what that means for a run."""
    build = ranks.torch_build
    if not build:
        return ["not installed: nothing but `plan`, `list` and the like can run (pip install torch)"]
    release = build.get("__version__", ranks.release("torch") or "")
    if "hip" in build:
        return [
            f"{release}, built for ROCm {build['hip']}",
            "ranks run on the CPU; --device cuda was never tried on ROCm",
        ]
    if "cuda" not in build:
        return [f"{release}, a CPU build", "ranks run on the CPU; --device cuda needs PyPI's build (pip install torch)"]
    if found.names:
        return [
            f"{release}, built for CUDA {build['cuda']}",
            "ranks run on the CPU, or with --device cuda on the GPUs below",
        ]
    return [
        f"{release}, built for CUDA {build['cuda']}; no GPU here",
        "ranks run on the CPU and give the same bits as with a CPU build, which is 4 GB smaller (pip install torch "
        "--index-url https://download.pytorch.org/whl/cpu)",
    ]


def _rehearsed(ranks: Interpreter) -> list[str]:
    """Whether forked ranks can run here. It is tried, with the warm server that a run would start."""
    if not ranks.torch_build:
        return ["cannot run: no torch"]
    try:
        with ForkServer(python=ranks.path, workers=1) as server:
            return [server.call("shardproof.world.rehearsal:summary", b"", REHEARSAL_S).decode()]
    except HarnessError as error:
        return str(error).splitlines()


def _gpu(found: Gpus, ranks: Interpreter) -> list[str]:
    """What CUDA ranks would find."""
    needed = dict.fromkeys(name for info in all_systems() for name in info.gpu_distributions)
    extensions = [f"{name} {ranks.release(name) or 'not installed'}" for name in needed]
    if not found.names:
        driver = f", driver for CUDA {found.driver}" if found.driver else ""
        return [f"none: {found.reason}{driver}", *extensions]
    nccl = f"NCCL {found.nccl}" if found.nccl else "no NCCL"
    return [
        f"{len(found.names)} x {', '.join(dict.fromkeys(found.names))}, driver for CUDA {found.driver}",
        f"torch {found.torch}, built for CUDA {found.cuda}, {nccl}",
        f"worlds up to {len(found.names)} ranks: a GPU a rank, NCCL; larger ones share GPUs, gloo",
        *extensions,
    ]


def _state(info: System, ranks: Interpreter) -> str:
    needed = [name for name in info.distributions if name != info.package]
    missing = [name for name in needed if ranks.release(name) is None]
    if missing:
        return f"cannot run: {', '.join(missing)} not installed"
    module = info.entry(info.rank).partition(":")[0] if info.rank else info.home
    if not _exists(module):
        return f"cannot run: its module {module} does not exist"
    releases = ", ".join(f"{name} {ranks.release(name)}" for name in needed)
    where = "lockstep, one process" if info.world == "lockstep" else "forked gloo ranks, CPU"
    where += " or CUDA" if "cuda" in info.accepts.devices else ""
    return f"ready: {where}{', ' + releases if releases else ''}"


def _releases(info: System, declared: Package, ranks: Interpreter) -> list[str]:
    """Lines about each declared release of a library: whether it is installed, which scenarios it alone refuses, and
    which interpreters or torch versions upstream never supported it on."""
    clone = os.environ.get(clone_variable(declared.name))
    lines = [f"commits (git:REV) of the clone {clone}" if clone else f"no clone: --clone {declared.name}=DIR"]
    default = declared.newest.version
    if info.is_torch:
        default = (ranks.release(declared.name) or "").partition("+")[0]
        lines = ["each release in an interpreter of its own; for other systems --torch VERSION"]
    refused = _refused(info, [release.version for release in declared.releases])
    for release in declared.releases:
        there = (info.is_torch and release.version == default) or is_cached(declared, release.version, ranks)
        state = "installed" if there else "installed at its first use"
        if there and not info.is_torch:
            state += ", imported here" if is_imported(declared, release.version, ranks) else ", not imported here yet"
        lines.append(f"{release.version:<9}{state}{', the default' if release.version == default else ''}")
        lines += [f"{'':<9}the oldest that users still run (@oldest): {release.users}"] if release.users else []
        lines += [f"{'':<9}refuses: {reason}" for reason in refused[release.version]]
        if outside := release.outside(ranks.installed):
            lines.append(f"{'':<9}outside what upstream supports or tested: {'; '.join(outside)}")
    return lines


def _newer(declared: Package, ranks: Interpreter) -> list[str]:
    """Whether the package index has a newer release than the newest one that is declared."""
    command = [ranks.path, "-m", "pip", "index", "versions", "--disable-pip-version-check", declared.name]
    try:
        said = subprocess.run(
            command, env={**os.environ, **SAFE_PATH}, capture_output=True, text=True, timeout=INDEX_S, check=True
        ).stdout
        newest = Version(said.split("(", 1)[1].split(")", 1)[0])
    except (OSError, subprocess.SubprocessError, IndexError, InvalidVersion):
        return ["the package index does not say which release is the newest"]
    if newest.release <= Version(declared.newest.version).release:
        return []
    return [f"{newest} is on the package index: newer than all that were tried here"]


def _refused(info: System, versions: Sequence[str]) -> dict[str, list[str]]:
    """Version → why it refuses what another takes, each axis value of the nightly by itself."""
    walks = [walk for walk in load_space("nightly").walks if walk.system == info.name]
    settings = [{axis: text} for walk in walks for axis, texts in walk.axes.items() for text in texts]
    found: dict[str, list[str]] = {version: [] for version in versions}
    for setting in [{}, *filter(_possible, settings)]:
        samples = {version: Scenario(system=info.name, version=version).with_axes(setting) for version in versions}
        reasons = {
            version: [limit.reason for limit in info.accepts.limits if limit.refuses(sample)]
            for version, sample in samples.items()
        }
        common = set.intersection(*map(set, reasons.values()))
        own = {version: [reason for reason in given if reason not in common] for version, given in reasons.items()}
        if not all(own.values()):  # else every release refuses it, with whatever words
            for version, given in own.items():
                found[version] += given
    return {version: list(dict.fromkeys(reasons)) for version, reasons in found.items()}


def _possible(setting: dict[str, str]) -> bool:
    """Whether an axis value can stand beside the defaults of the others."""
    try:
        Scenario.from_axes(setting)
    except UsageError:
        return False
    return True


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above the module is missing
        return False


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _scratch() -> str:
    folder = scratch_folder()
    return f"{folder} ({shutil.disk_usage(folder).free / 2**30:.1f} GiB free)"
