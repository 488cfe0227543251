"""Stand-ins for the CUDA libraries that a CUDA build of torch is linked against, for a machine that will not use a GPU.

PyPI's torch for Linux needs `nvidia-*` packages of 2.7 GB to be imported at all, though nothing of them runs on a CPU.
This module makes small libraries with the same names, symbols and symbol versions, which count no devices and return
an error from everything else. torch itself stays as it is. It is how many releases of torch fit on one disk.

Needs `readelf` and `gcc`.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

_SPECIAL = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *count) { *count = 0; return 100; }  /* cudaErrorNoDevice */",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { (void)e; return "a stand-in, no CUDA"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { (void)e; return "cudaErrorNoDevice"; }',
    "cudaGetLastError": "int cudaGetLastError(void) { return 0; }",
    "cudaPeekAtLastError": "int cudaPeekAtLastError(void) { return 0; }",
}
_NO_DEVICE = 100
_ORDINARY = re.compile(r"(ld-linux.*|lib(c|m|dl|pthread|rt|gcc_s|stdc\+\+|z|quadmath|gomp))\.so\.\d+$")
"""What every Linux machine has."""
_OF_CUDA = re.compile(r"cu|nv|nccl|__cuda")
"""What symbols without a version begin with where they are CUDA's, and not libstdc++'s or the interpreter's own."""


def write_stubs(torch: Path, into: Path) -> list[str]:
    """Compile a stand-in for every library that `torch/lib` needs and not every Linux machine has; their names.

    Args:
        torch: the installed package. into: a folder on the RUNPATH of its libraries, such as
            `nvidia/cu13/lib` beside it.
    """
    binaries = [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]
    missing = _needed(binaries) - {path.name for path in binaries}
    missing = {name for name in missing if not _ORDINARY.match(name)}
    symbols = _undefined(binaries, missing)
    into.mkdir(parents=True, exist_ok=True)
    for library in missing:
        _compile(library, symbols[library], into)
    return sorted(missing)


def _needed(binaries: list[Path]) -> set[str]:
    return {name for path in binaries for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("-d", path))}


def _undefined(binaries: list[Path], missing: set[str]) -> dict[str, dict[str, str]]:
    """Library → symbol → its version. A symbol without a version may be any library's that its file needs."""
    defined: set[str] = set()
    wanted: dict[str, dict[str, str]] = defaultdict(dict)
    loose: dict[str, set[str]] = defaultdict(set)
    for path in binaries:
        provider = _providers(path)
        for index, name, version in re.findall(
            r"^\s*\d+: \w+\s+\w+ \w+\s+\w+\s+\w+\s+(\w+) ([^\s@]+)(?:@+(\S+))?", _readelf("--dyn-syms", path), re.M
        ):
            if index != "UND":
                defined.add(name)
            elif version and provider.get(version) in missing:
                wanted[provider[version]][name] = version
            elif not version and _OF_CUDA.match(name):
                loose[name] |= _needed([path]) & missing
    for name in loose.keys() - defined:
        for library in loose[name]:
            wanted[library].setdefault(name, "")
    return wanted


def _providers(path: Path) -> dict[str, str]:
    """Symbol version → the library that a binary expects it from."""
    found, library = {}, ""
    for line in _readelf("-V", path).splitlines():
        if file := re.search(r"File: (\S+)", line):
            library = file[1]
        elif name := re.search(r"Name: (\S+)", line):
            found[name[1]] = library
    return found


def _compile(library: str, symbols: dict[str, str], into: Path) -> None:
    versions: dict[str, list[str]] = defaultdict(list)
    for name, version in symbols.items():
        versions[version].append(name)
    script = "".join(
        f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items() if version
    )
    source = "\n".join(_SPECIAL.get(name, _function(name)) for name in symbols)
    (into / "stub.c").write_text(source or "int shardproof_stub;")
    (into / "stub.map").write_text(script)
    options = ["-Wl,--version-script=stub.map"] if script else []
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", *options, "-o", library, "stub.c"],
        cwd=into, check=True,
    )  # fmt: skip


def _function(name: str) -> str:
    if name.startswith("__cudaRegister"):
        return f"void *{name}(void) {{ static void *handle; return &handle; }}"
    return f"int {name}(void) {{ return {_NO_DEVICE}; }}"


def _readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout
