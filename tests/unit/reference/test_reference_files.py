"""The reference's checkpoints on disk: what is read is what was written, and everything else is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from shardproof.reference import files
from shardproof.reference.files import DamagedError, generations, read, write
from shardproof.reference.kernels import Hyper
from shardproof.systems.reference.rank.trial_checkpoints import Kept, contents

KEPT = Kept()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two generations of one run."""
    for generation in (1, 2):
        write(tmp_path / "ck", contents(1)[generation], generation, "run 1")
    return tmp_path / "ck"


def test_what_is_read_is_what_was_written(folder: Path) -> None:
    number, content = read(folder)
    assert number == 2
    assert KEPT.digests(content) == KEPT.digests(contents(1)[2])
    assert KEPT.digests(read(folder, generation=1)[1]) == KEPT.digests(contents(1)[1])
    assert isinstance(content["common"]["groups"][0]["hyper"], Hyper)


def test_two_generations_stay(folder: Path) -> None:
    write(folder, contents(1)[3], 3, "run 1")
    assert generations(folder) == [2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["RUN", "gen-00000002", "gen-00000003"]


def test_leftovers_of_a_crash_are_ignored_and_removed(folder: Path) -> None:
    shutil.copytree(folder / "gen-00000001", folder / "new-00000003")
    assert read(folder)[0] == 2
    write(folder, contents(1)[3], 3, "run 1")
    assert not list(folder.glob("new-*"))


def test_a_generation_under_another_ones_name_is_refused(folder: Path) -> None:
    shutil.copytree(folder / "gen-00000001", folder / "gen-00000007")
    with pytest.raises(DamagedError, match="generation 1, not 7; others there: 1, 2"):
        read(folder)


def test_a_checkpoint_of_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", contents(2)[3], 3, "run 2")
    shutil.copytree(tmp_path / "other" / "gen-00000003", folder / "gen-00000003")
    with pytest.raises(DamagedError, match="run 'run 2', not 'run 1'"):
        read(folder)
    with pytest.raises(DamagedError, match="holds checkpoints of run 'run 1'"):
        write(folder, contents(2)[3], 3, "run 2")


def test_an_older_generation_is_not_written_over_a_newer_one(folder: Path) -> None:
    with pytest.raises(DamagedError, match="has generation 2; 2 is not newer"):
        write(folder, contents(1)[2], 2, "run 1")


def test_a_file_too_many_is_refused(folder: Path) -> None:
    shutil.copy(folder / "gen-00000002" / "rank_0.bin", folder / "gen-00000002" / "rank_9.bin")
    with pytest.raises(DamagedError, match=r"too many: rank_9\.bin"):
        read(folder)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot hold a set"):
        write(tmp_path / "ck", {"format": "gathered", "common": {1, 2}}, 1, "run")


def test_what_the_disk_lost_is_seen_before_the_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = files._sync

    def losing(synced: Path) -> None:
        sync(synced)
        if synced.name.startswith("new-"):
            (synced / "rank_0.bin").write_bytes(bytes((synced / "rank_0.bin").stat().st_size))

    monkeypatch.setattr(files, "_sync", losing)
    with pytest.raises(DamagedError, match="does not have the digest"):
        write(folder, contents(1)[3], 3, "run 1")
    assert generations(folder) == [1, 2]


def test_memory_is_bounded_by_a_chunk_when_nothing_is_kept(tmp_path: Path) -> None:
    import tracemalloc

    content = {"format": "gathered", "common": {}, "full": {"param": {"w": np.zeros(4 * files.CHUNK, np.float32)}}}
    tracemalloc.start()
    try:
        write(tmp_path / "ck", content, 1, "run")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * files.CHUNK
