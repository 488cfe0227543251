"""Locks that killed builds of torch's extensions leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from shardproof.world.extension_locks import clear_since, clear_stale


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Locks of three ages, with what a build keeps beside them."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    made = {}
    for name, age_s in {"py311_cpu/old": 7200.0, "py311_cpu/busy": 300.0, "new": 0.0}.items():
        made[name.rpartition("/")[2]] = lock = tmp_path / name / "lock"
        lock.parent.mkdir(parents=True)
        for file in (lock, lock.with_name("build.ninja")):
            file.touch()
            os.utime(file, (time.time() - age_s,) * 2)
    return made


def there(locks: dict[str, Path]) -> set[str]:
    assert all(lock.with_name("build.ninja").exists() for lock in locks.values())
    return {name for name, lock in locks.items() if lock.exists()}


def test_a_lock_that_is_older_than_any_build_is_removed(
    locks: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    clear_stale()
    assert there(locks) == {"busy", "new"}
    assert capsys.readouterr().err == f"removed {locks['old']}, which a killed build left 2.0 h ago\n"


def test_a_build_that_was_killed_here_leaves_no_lock(locks: dict[str, Path]) -> None:
    clear_since(time.time() - 10)
    assert there(locks) == {"old", "busy"}


def test_without_a_build_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    clear_stale()
