"""Virtual environments with another release of torch, whose interpreters run ranks.

torch is what everything else here stands on: ranks, the twin, the judge. So another release of it is not laid over the
ranks' path like that of another library (`shardproof.world.overlay`). It is an interpreter of its own, a virtual
environment of two lines: first a folder with that torch, then everything that the interpreter it is made of has.

    <cache>/overlays/torch-2.15.0-<digest>/site-packages    torch as the package index has it
    <cache>/overlays/torch-2.15.0-<digest>/python-<digest>  an interpreter with it

The wheels on the package index are built for CUDA and want 3 GB of NVIDIA's libraries, of which ranks on a CPU call
nothing but "how many devices are there?". In their place stand stand-ins that are compiled here: a library of the same
name for each, with every function that torch asks it for. `cudaGetDeviceCount` finds none, and any other returns an
error. torch itself is not changed in a single byte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from shardproof.errors import UsageError
from shardproof.versions import is_version
from shardproof.world.commands import OverlayError, said
from shardproof.world.interpreter import Interpreter, interpreter
from shardproof.world.overlay import LOCK_S, install, key_of, sizes

OLDEST = "2.10.0"
"""Older ones lack what the server calls: 2.9.1 has no `torch._C._clear_DTensor_sharding_propagator_cache`."""

ASK_S = 180.0
"""How long pip may take to say which releases there are."""

_NVIDIA = re.compile(r"lib(cu|nv|nccl)")
_DRIVER = "libcuda.so.1"  # of the machine, opened when a device is first used
_NEEDED = re.compile(r"\(NEEDED\)\s+Shared library: \[(.+)\]")
_VERSION_NEEDS = re.compile(r"File: (\S+)|Name: (\S+)\s+Flags")
_UNVERSIONED = re.compile(r"(__)?(cuda|cudnn|cu[A-Zs]|nv|nccl)\w*")

_SPECIAL = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *count) { *count = 0; return 100; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int error) { return "no CUDA: a stand-in"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int error) { return "cudaErrorNoDevice"; }',
    "__cudaRegisterFatBinary": "static void *handle; void **__cudaRegisterFatBinary(void *binary) { return &handle; }",
}
"""What torch calls when it is imported, or when it asks for devices. 100 is cudaErrorNoDevice, with which torch counts
none."""


def with_torch(version: str, base: Interpreter) -> Interpreter:
    """An interpreter like `base`, with that release of torch: `base` itself if it has it.

    The first use downloads 0.5 to 0.9 GB, and takes 1.2 to 1.7 GB of the cache.

    Raises:
        UsageError: no release, or one that is older than `OLDEST`. OverlayError: it cannot be installed.
    """
    if version == (base.release("torch") or "").partition("+")[0]:
        return base
    _require_release(version)
    site = install((f"torch=={version}",), base, lambda folder: compile_stand_ins(folder / "torch"), sizes)
    own = site.parent / f"python-{key_of((base.path, base.site), base).rpartition('-')[2]}"
    with FileLock(site.parent.with_name(f"{site.parent.name}.lock"), timeout=LOCK_S):
        if not (own / "bin" / "python").exists():
            _make_interpreter(own, site, base)
    found = interpreter(str(own / "bin" / "python"))
    if (found.release("torch") or "").partition("+")[0] != version:
        raise OverlayError(f"{own} has torch {found.release('torch')}, not {version}: remove {site.parent}")
    return found


def newest_torch(bound: str, base: Interpreter) -> Interpreter:
    """An interpreter with that release of torch or, where pip refuses it here, with the newest older one that it
    installs, which is told on stderr. What configures pip stays in force: an index, a constraint.

    Raises:
        UsageError: no release, or one that is older than `OLDEST`. OverlayError: no torch can be installed.
    """
    try:
        return with_torch(bound, base)
    except OverlayError as error:
        found = _offered(bound, base)
        if found in ("", bound):
            raise
        why = str(error).strip().splitlines()[-1].strip()
        print(f"torch {bound} cannot be installed here ({why}); the newest that can is {found}", file=sys.stderr)
        return with_torch(found, base)


def _offered(bound: str, base: Interpreter) -> str:
    """The newest release of torch up to one that pip would install, as it is configured here; empty where it knows
    none. Nothing but metadata is downloaded."""
    options = ["--dry-run", "--quiet", "--no-input", "--no-deps", "--ignore-installed", "--report", "-"]
    command = [base.path, "-m", "pip", "install", *options, f"torch<={bound}"]
    with suppress(OverlayError, ValueError, LookupError, TypeError):
        report = json.loads(said(command, ASK_S, "pip does not say which torch it has", dict(os.environ)))
        return str(report["install"][0]["metadata"]["version"]).partition("+")[0]
    return ""


def _require_release(version: str) -> None:
    from packaging.version import Version

    if not is_version(version) or Version(version) < Version(OLDEST):
        raise UsageError.of("torch", version, f"a release from {OLDEST} on", "--torch 2.15.0")


def compile_stand_ins(torch: Path) -> None:
    """Compile a stand-in for each of NVIDIA's libraries that a torch asks for and does not bring, beside its own.

    Args:
        torch: its package's folder.

    Raises:
        OverlayError: no C compiler, or no binutils.
    """
    own = sorted([*(torch / "lib").glob("*.so"), *torch.glob("_C*.so")])
    asking = {file: _libraries(file) for file in own}
    absent = {name for names in asking.values() for name in names if _NVIDIA.match(name)} - {_DRIVER}
    absent -= {file.name for file in (torch / "lib").iterdir()}
    if not absent:
        return
    wanted: dict[str, dict[str, set[str]]] = {name: {} for name in absent}
    symbols = {file: list(_symbols(file)) for file in own}
    defined = {symbol.name for found in symbols.values() for symbol in found if not symbol.undefined}
    for symbol in (symbol for found in symbols.values() for symbol in found if symbol.undefined):
        if symbol.library in absent:
            wanted[symbol.library].setdefault(symbol.version, set()).add(symbol.name)
        elif not symbol.version and symbol.name not in defined and _UNVERSIONED.fullmatch(symbol.name):
            for each in wanted.values():  # in place of any of them a library of the environment may be loaded
                each.setdefault("", set()).add(symbol.name)
    with tempfile.TemporaryDirectory() as scratch:
        for name, functions in wanted.items():
            _compile(name, functions, Path(scratch), torch / "lib" / name)


def _libraries(file: Path) -> list[str]:
    return _NEEDED.findall(_readelf("-d", file))


class _Symbol(NamedTuple):
    """A dynamic symbol of a file. library, version: where the file expects it, empty where it does not say."""

    name: str
    undefined: bool
    library: str = ""
    version: str = ""


def _symbols(file: Path) -> Iterator[_Symbol]:
    library_of: dict[str, str] = {}
    library = ""
    for found in _VERSION_NEEDS.finditer(_readelf("-V", file)):
        library = found[1] or library
        if found[2]:
            library_of[found[2]] = library
    for line in _readelf("--dyn-syms", file).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].endswith(":"):
            name, _, version = fields[7].partition("@")
            yield _Symbol(name, fields[6] == "UND", library_of.get(version, ""), version)


def _readelf(option: str, file: Path) -> str:
    return said(["readelf", "-W", option, str(file)], 120.0, f"{file} cannot be read (binutils)", _plain())


def _compile(name: str, symbols: Mapping[str, set[str]], scratch: Path, target: Path) -> None:
    """Compile one library: every symbol a function, under the version that torch asks for."""
    every = sorted({symbol for found in symbols.values() for symbol in found})
    source, versions = scratch / "stand_in.c", scratch / "versions"
    source.write_text("\n".join(_SPECIAL.get(symbol, f"int {symbol}(void) {{ return 100; }}") for symbol in every))
    nodes = [f"{version} {{ global: {'; '.join(sorted(own))}; }};" for version, own in symbols.items() if version]
    versions.write_text("\n".join(nodes))
    script = [f"-Wl,--version-script={versions}"] if nodes else []
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    command = [compiler, "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(target), f"-Wl,-soname,{name}"]
    said([*command, *script, str(source)], 120.0, f"{name} cannot be compiled (a C compiler is needed)", _plain())


def _plain() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}


def _make_interpreter(folder: Path, site: Path, base: Interpreter) -> None:
    """A virtual environment that finds torch in `site`, and everything else where `base` has it."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    said([base.path, "-m", "venv", "--without-pip", str(scratch)], 60.0, f"{base.path} makes no venv", _plain())
    ask = "import site, sysconfig; print(*{sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}, sep='\\n')"
    there = said([base.path, "-c", ask], 60.0, f"{base.path} does not answer", _plain()).split("\n")
    own = next((scratch / "lib").glob("python*/site-packages"))
    rest = [f"import site; site.addsitedir({path!r})" for path in there if path]
    (own / "torch.pth").write_text("\n".join([str(site), *rest]) + "\n")
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
