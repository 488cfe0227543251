"""Packages that are there by name only."""

from __future__ import annotations

import sys

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
