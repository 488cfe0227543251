"""Texts that lie in the folder of a session or a checkpoint are compared without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shardproof.trainer.rank.found import State
from shardproof.trainer.values.checkpoints import differing
from shardproof.trainer.values.own_folders import own_folders, without_folders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/b/session0", "{folder}"),
        ("str '/a/b/session12/logs'", "str '{folder}/logs'"),
        ("/a/b/checkpoint1/last.ckpt:/a/b/x", "{folder}/last.ckpt:{folder}/x"),
        ("/a/bc/session0", "/a/bc/session0"),
        ("/a/b.c", "/a/b.c"),
    ],
)
def test_a_folder_is_taken_out_of_a_text(text: str, expected: str) -> None:
    assert without_folders(text, ("/a/b",)) == expected


def test_a_folder_behind_a_link_is_one_too(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "real")
    folders = own_folders(link)
    assert {without_folders(f"{tmp_path}/{name}/session0/x", folders) for name in ("real", "link")} == {"{folder}/x"}


def records(folder: Path, session: int) -> set[bytes]:
    roots: dict[str, Any] = {"where": str(folder / f"session{session}/logs")}
    found = State(roots, 0, 1, named=["where"], folders=own_folders(folder)).records(1)
    return {record.data for record in found if record.role == "extra_state"}


def test_two_sessions_have_the_same_text(tmp_path: Path) -> None:
    assert records(tmp_path, 0) == records(tmp_path, 3) == {b"str '{folder}/logs'"}


def test_two_checkpoints_of_their_folders_are_the_same(tmp_path: Path) -> None:
    for number, session, steps in ((0, 0, 2), (1, 4, 2), (2, 4, 3)):
        (folder := tmp_path / f"checkpoint{number}").mkdir()
        kept = {"w": torch.ones(2), "logs": str(tmp_path / f"session{session}/logs"), "steps": steps}
        torch.save(kept, folder / "last.pt")
    first, second, third = (tmp_path / f"checkpoint{number}" for number in range(3))
    assert differing(first, second) == ()
    assert [one.name for one in differing(first, third)] == ["steps"]
