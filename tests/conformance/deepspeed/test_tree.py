"""A tree of DeepSpeed that nothing has installed reads its version from the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.systems.deepspeed.rank import beside_its_version
from shardproof.versions import TREE_VERSION


@pytest.mark.parametrize("version", ["0.19.6", ""])
def test_a_tree_finds_its_version_where_it_looks_and_a_release_looks_where_it_did(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TREE_VERSION, version)
    with beside_its_version():
        assert Path("version.txt").is_file() is bool(version)
        if version:
            assert Path("version.txt").read_text().strip() == version
    assert Path.cwd() == tmp_path
    assert not Path("version.txt").exists()
