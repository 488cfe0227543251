"""What is asked of a tree of Megatron-Core, and not looked up by its release."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shardproof.emulation import names
from shardproof.mechanisms.megatron.rank import importing
from shardproof.scenario import Scenario
from shardproof.systems.megatron_core import SYSTEM

NEEDS_TRITON = """
try:
    import triton

    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False
"""
RELOAD = {
    "system": "megatron-core", "sharding": "zero1", "optimizer": "adamw/impl=multi_tensor", "dtype": "bf16/master=fp32",
    "options": "fsdp_optim_grads_params", "checkpoint": "fsdp_dtensor", "program": "build step reload_params",
}  # fmt: skip


def test_a_module_that_needs_triton_is_imported_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds by itself that triton is missing goes on without; what cannot gets its name."""
    package = tmp_path / "a_library"
    package.mkdir()
    (package / "__init__.py").write_text("from . import careful, kernels\n")
    (package / "careful.py").write_text(NEEDS_TRITON)
    (package / "kernels.py").write_text("import triton\n\n\n@triton.jit\ndef kernel(x): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(names, "_installed", lambda package: False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(sys, "meta_path", [_WithoutTriton(), *sys.meta_path])
    importing.imported("a_library")
    library = sys.modules["a_library"]
    for name in ("a_library", "a_library.careful", "a_library.kernels"):
        monkeypatch.delitem(sys.modules, name)
    assert library.careful.HAVE_TRITON is False
    with pytest.raises(NotImplementedError, match=r"kernel is compiled by triton\.jit"):
        library.kernels.kernel[(1,)](0)
    assert "triton" not in sys.modules


def test_another_package_that_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "another_library.py").write_text("import a_package_of_nobody\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_of_nobody"):
        importing.imported("another_library")


@pytest.mark.parametrize(
    ("version", "offload", "refused"),
    [("0.18.0", "none", True), ("0.20.0", "none", True), ("0.18.0", "cpu", False), ("0.17.1", "none", False),
     ("", "none", False), ("git:main", "none", False)],
)  # fmt: skip
def test_megatron_fsdp_refuses_to_reload_from_018_on(version: str, offload: str, refused: bool) -> None:
    """A tree is asked what it calls itself before it runs; until then nothing is refused."""
    scenario = Scenario().with_axes({**RELOAD, "version": version, "offload": offload})
    limit = next(limit for limit in SYSTEM.accepts.limits if limit.id == "fsdp-reload")
    assert limit.refuses(scenario) is refused


class _WithoutTriton:
    """Hides a triton that is installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
