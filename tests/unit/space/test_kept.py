"""What walks came to is kept, and nothing that is kept is stale.

*Verifies*: that a walk that is recalled is the walk that was followed; that all that a search reads is in the name
under which it is kept; that what cannot be read or written is searched for again. *Does not verify*: how much time it
saves (tests/golden/test_work.py counts the calls).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.folders import CACHE_VARIABLE
from shardproof.space import kept
from shardproof.space import walk as walks
from shardproof.space.files import LeaveOut, Walk, load_space
from shardproof.space.walk import Walked, follow

AXES = {"mesh": ("1x1x1", "1x2x1", "1x1x2"), "program": ("resume", "train"), "model": ("dense", "groups", "tied")}
SMALL = Walk("reference", axes=AXES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path / "walks"


def in_numbers(walked: Walked) -> tuple[object, ...]:
    """All of a walk but the tables of what it excludes, which are made anew."""
    return walked.walk, walked.supported, walked.refused, walked.cells, walked.valid, walked.coverages


def test_what_is_recalled_is_what_was_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = load_space("smoke").on_systems(["reference", "torch-fsdp2"]).walks
    found = [in_numbers(follow(each, seed=3)) for each in every]
    assert len(list(folder.iterdir())) == len(every)
    monkeypatch.setattr(walks, "Cover", None)  # nothing is searched for again
    assert [in_numbers(follow(each, seed=3)) for each in every] == found


@pytest.mark.parametrize(
    "other",
    [
        replace(SMALL, strength=1),
        replace(SMALL, exhaustive=("mesh",)),
        replace(SMALL, three_way=("mesh", "program", "model")),
        replace(SMALL, axes={**AXES, "model": ("dense", "groups")}),
        replace(SMALL, leave_out=(LeaveOut("too slow", {"mesh": ("1x2x1",), "model": ("tied",)}),)),
    ],
)
def test_another_question_has_another_answer(other: Walk, folder: Path) -> None:
    first = follow(SMALL)
    assert follow(SMALL, seed=1).walk == first.walk
    follow(other)
    assert len(list(folder.iterdir())) == 3
    assert in_numbers(follow(SMALL)) == in_numbers(first)


def test_another_source_is_another_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(SMALL)
    monkeypatch.setattr(kept, "_source", lambda: b"searches otherwise")
    follow(SMALL)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "null", "negative", "beyond", "short"])
def test_what_is_damaged_is_searched_for_again(damage: str, folder: Path) -> None:
    found = in_numbers(follow(SMALL))
    (file,) = folder.iterdir()
    whole = file.read_text("utf-8")
    told = json.loads(whole)
    wrong = {"negative": [[0, 0, -1]], "beyond": [[0, 0, 9]], "short": [[0, 0]]}
    file.write_text(json.dumps({**told, "supported": wrong[damage]}) if damage in wrong else damage, "utf-8")
    assert in_numbers(follow(SMALL)) == found
    assert file.read_text("utf-8") == whole


def test_a_row_that_the_tables_exclude_is_not_recalled(folder: Path) -> None:
    """Within bounds, and under the right name: what is allowed is asked again."""
    walk = replace(SMALL, leave_out=(LeaveOut("too slow", {"mesh": ("1x2x1",), "model": ("tied",)}),))
    found = in_numbers(follow(walk))
    (file,) = folder.iterdir()
    told = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**told, "supported": [[1, 0, 2], *told["supported"]]}), "utf-8")
    assert in_numbers(follow(walk)) == found


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_numbers(follow(SMALL))
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "a file"))
    assert in_numbers(follow(SMALL)) == found


def test_no_more_is_kept_than_so_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 2)
    for seed in range(4):
        follow(SMALL, seed)
    assert len(list(folder.iterdir())) == 2
