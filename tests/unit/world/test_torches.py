"""Interpreters with another torch: which releases there are, and stand-ins for libraries that a wheel wants and lacks.
A real release is tried by `tests/conformance/torch_fsdp2/test_torch_releases.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from shardproof.cli.main import cli
from shardproof.errors import UsageError
from shardproof.world import torches
from shardproof.world.interpreter import Interpreter, interpreter
from shardproof.world.overlay import OverlayError
from shardproof.world.torches import compile_stand_ins, with_torch

TORCH = """
int cudaGetDeviceCount(int *); int cudaMalloc(void **, int); int ncclSend(void); int own(void) { return 7; }
int devices(void) { int n = -1; cudaGetDeviceCount(&n); return n; }
int allocate(void) { void *p; return cudaMalloc(&p, 1) + 1000 * (ncclSend() != 0); }
"""
NVIDIA = {
    "libcudart.so.99": "int cudaGetDeviceCount(int *n) { *n = 8; return 0; } int cudaMalloc(void) { return 0; }",
    "libnccl.so.2": "int ncclSend(void) { return 0; }",
}
ASKING = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print(library.devices(), library.allocate(), library.own())
"""
needs_compiler = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("readelf")), reason="no C compiler")


def compiled(target: Path, source: str, *options: str) -> None:
    file = target.with_suffix(".c")
    file.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(target), str(file), *options], check=True)


@needs_compiler
def test_absent_libraries_are_stood_in_for(tmp_path: Path) -> None:
    """A library that was linked against NVIDIA's loads without them, finds no device, and gets errors."""
    torch, nvidia = tmp_path / "torch", tmp_path / "nvidia"
    (torch / "lib").mkdir(parents=True)
    nvidia.mkdir()
    script = tmp_path / "versions"
    script.write_text("libcudart.so.99 { global: cudaGetDeviceCount; cudaMalloc; };")
    for name, source in NVIDIA.items():
        versions = [f"-Wl,--version-script={script}"] if "cudart" in name else []
        compiled(nvidia / name, source, f"-Wl,-soname,{name}", *versions)
    library = torch / "lib" / "libtorch_cuda.so"
    linked = [str(nvidia / name) for name in NVIDIA]
    compiled(library, TORCH, *linked, "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags")
    before = library.read_bytes()
    shutil.rmtree(nvidia)

    compile_stand_ins(torch)

    assert library.read_bytes() == before
    said = subprocess.run([sys.executable, "-c", ASKING, str(library)], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["0", "1100", "7"]


@needs_compiler
def test_a_wheel_without_cuda_needs_none(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    compiled(tmp_path / "lib" / "libtorch.so", "int own(void) { return 7; }")
    compile_stand_ins(tmp_path)
    assert [file.name for file in (tmp_path / "lib").glob("*.so*")] == ["libtorch.so"]


def test_the_installed_release_is_the_interpreter_itself() -> None:
    own = interpreter()
    assert with_torch((own.release("torch") or "").partition("+")[0], own) is own


@pytest.mark.parametrize("version", ["2.9.1", "newest", "", "path:../pytorch", "2.15.0; import os"])
def test_what_is_no_release_is_refused(version: str) -> None:
    with pytest.raises(UsageError, match=r"a release from 2\.10\.0 on"):
        with_torch(version, interpreter())


def test_the_option_names_what_it_takes() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--torch", "1.0"])
    assert isinstance(done.exception, UsageError)
    assert "--torch 2.15.0" in str(done.exception)


def test_where_pip_refuses_the_newest_torch_the_walk_says_so_and_takes_the_newest_that_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def with_torch(version: str, base: Interpreter) -> Interpreter:
        asked.append(version)
        if version == "2.15.0":
            raise OverlayError(
                "torch==2.15.0 cannot be installed\nERROR: The user requested (constraint) torch<=2.14.1"
            )
        return base

    report = '{"install": [{"metadata": {"name": "torch", "version": "2.14.1+cpu"}}]}'
    monkeypatch.setattr(torches, "with_torch", with_torch)
    monkeypatch.setattr(torches, "said", lambda *_: report)
    assert torches.newest_torch("2.15.0", interpreter()) == interpreter()
    assert asked == ["2.15.0", "2.14.1"]
    assert capsys.readouterr().err == (
        "torch 2.15.0 cannot be installed here (ERROR: The user requested (constraint) torch<=2.14.1); the newest that"
        " can is 2.14.1\n"
    )


@pytest.mark.parametrize("report", ["", "[]", '{"install": []}', '{"install": [{"metadata": {"version": "2.15.0"}}]}'])
def test_where_pip_offers_no_other_torch_its_refusal_is_the_error(report: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_torch(version: str, base: Interpreter) -> Interpreter:
        raise OverlayError("no space left")

    monkeypatch.setattr(torches, "with_torch", with_torch)
    monkeypatch.setattr(torches, "said", lambda *_: report)
    with pytest.raises(OverlayError, match="no space left"):
        torches.newest_torch("2.15.0", interpreter())
