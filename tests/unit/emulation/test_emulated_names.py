"""Packages that are there by name only."""

from __future__ import annotations

import sys
import types

import pytest
from shardproof.emulation import names

NAME = "grouped_gemm_of_nobody"


def test_a_package_by_name_has_its_functions_and_they_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    names.refusing(NAME, ops=("gmm",))
    package = sys.modules[NAME]
    monkeypatch.delitem(sys.modules, NAME)
    with pytest.raises(NotImplementedError, match=rf"{NAME}.ops.gmm is not emulated"):
        package.ops.gmm(1, trans_b=True)
    assert not hasattr(package.ops, "other")


def test_a_package_that_is_installed_stays() -> None:
    names.refusing("numpy", ops=("gmm",))
    assert not hasattr(sys.modules["numpy"], "ops")


def test_kernels_are_not_tuned_inside_and_are_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As triton 3.9 refuses what Automodel 0.7.0 gives it."""

    def autotune(configs: object, key: list[str]) -> object:
        raise ValueError(f"key contains names that are not kernel arguments: {key}")

    triton = types.ModuleType("triton")
    triton.autotune = autotune  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    with names.untuned():
        assert triton.autotune([], key=["S"])(len) is len
    with pytest.raises(ValueError, match="kernel arguments"):
        triton.autotune([], key=["S"])


def test_without_triton_nothing_is_imported_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_installed", lambda package: False)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with names.untuned():
        assert "triton" not in sys.modules
