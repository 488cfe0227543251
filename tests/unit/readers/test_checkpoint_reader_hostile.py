"""The independent checkpoint reader on files that are missing, damaged, foreign or hostile: an error, nothing run."""

from __future__ import annotations

import os
import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import torch
from checkpoint_samples import MODEL
from hostile_checkpoints import (
    CYCLE,
    DOUBLED,
    NESTED,
    WRONG,
    archive,
    foreign_files,
    tensor,
)
from shardproof.errors import UsageError
from shardproof.readers.checkpoint import read_checkpoint
from shardproof.readers.description import describe
from shardproof.readers.errors import CheckpointError
from shardproof.readers.symbolic import parse

pytestmark = pytest.mark.usefixtures("refused_word_for_word")


def refusal(path: Path) -> str:
    """The message with which the reader refuses; the same for every entry point, and complete."""
    with pytest.raises(CheckpointError) as caught:
        describe(path)
    message = str(caught.value)
    with pytest.raises(CheckpointError) as again:
        read_checkpoint(path, 0, MODEL)
    assert str(again.value) == message
    assert isinstance(caught.value, UsageError)
    assert all(part in message for part in ("given ", "; allowed: ", "; for example: "))
    assert len(message) < 1500
    return message


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return samples.save_dcp(samples.STATE, tmp_path / "c")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


# Missing and foreign


def test_missing(tmp_path: Path) -> None:
    assert "existing directory or file" in refusal(tmp_path / "nothing")


def test_a_folder_without_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()
    assert "file .metadata" in refusal(checkpoint)


def test_a_missing_data_file(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    assert "No such file" in refusal(checkpoint)


@pytest.mark.parametrize("kind", foreign_files())
def test_a_foreign_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "c").write_bytes(foreign_files()[kind])
    refusal(tmp_path / "c")


@pytest.mark.parametrize("kind", ["empty", "text", "safetensors", "another zip", "zeros"])
def test_foreign_metadata(checkpoint: Path, kind: str) -> None:
    (checkpoint / ".metadata").write_bytes(foreign_files()[kind])
    refusal(checkpoint)


def test_metadata_that_is_another_pickle(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}, protocol=4))
    assert "nothing was executed" in refusal(checkpoint)


def test_a_legacy_torch_file(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(1)}}, tmp_path / "c", _use_new_zipfile_serialization=False)
    assert "not a torch.save archive" in refusal(tmp_path / "c")


def test_a_file_that_is_not_a_dict(tmp_path: Path) -> None:
    assert "a dict of state" in refusal(samples.save_full([1, 2], tmp_path / "c"))


def test_a_pipe_does_not_block(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()
    os.mkfifo(checkpoint / ".metadata")
    assert "regular file" in refusal(checkpoint)


# Hostile pickles


def test_a_hostile_metadata_is_not_executed(checkpoint: Path, marker: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(samples.Touch(marker), protocol=4))
    assert "posix.system" in refusal(checkpoint)
    assert not marker.exists()


def test_a_hostile_value_inside_metadata_is_not_executed(checkpoint: Path, marker: Path) -> None:
    samples.edit_metadata(checkpoint, lambda m: m.state_dict_metadata.update({"model.a.weight": samples.Touch(marker)}))
    refusal(checkpoint)
    assert not marker.exists()


@pytest.mark.parametrize("key", ["extra.iteration", "model.a.weight"])
def test_a_hostile_item_is_not_executed(checkpoint: Path, marker: Path, key: str) -> None:
    samples.replace_item(checkpoint, key, samples.saved(samples.Touch(marker)))
    assert "posix.system" in refusal(checkpoint)
    assert not marker.exists()


def test_a_hostile_full_file_is_not_executed(tmp_path: Path, marker: Path) -> None:
    path = samples.save_full({"model": {"w": torch.zeros(1), "x": samples.Touch(marker)}}, tmp_path / "c")
    assert "posix.system" in refusal(path)
    assert not marker.exists()


def test_the_payload_of_these_tests_would_run(marker: Path) -> None:
    pickle.loads(pickle.dumps(samples.Touch(marker)))
    assert marker.exists()


class Arbitrary:
    pass


@pytest.mark.parametrize(
    "value",
    [Arbitrary(), torch.nn.Linear(1, 1), print, range(3), complex(1), torch.device("cpu"), {(1, 2): 3}],
)
def test_other_objects_are_refused_by_name(tmp_path: Path, value: object) -> None:
    refusal(samples.save_full({"x": value}, tmp_path / "c"))


def test_a_tensor_whose_flags_change_its_values_is_refused(tmp_path: Path) -> None:
    negated = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert "flags" in refusal(samples.save_full({"w": negated}, tmp_path / "c"))


# Truncated and altered


def test_truncated_metadata(checkpoint: Path) -> None:
    data = (checkpoint / ".metadata").read_bytes()
    for length in range(0, len(data), 41):
        (checkpoint / ".metadata").write_bytes(data[:length])
        refusal(checkpoint)
    (checkpoint / ".metadata").write_bytes(data + b"x")
    refusal(checkpoint)


def test_a_truncated_data_file(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert "the file's end" in refusal(checkpoint)
    file.write_bytes(b"")
    refusal(checkpoint)


def test_a_truncated_full_file(tmp_path: Path) -> None:
    path = samples.save_full(samples.STATE, tmp_path / "c")
    data = path.read_bytes()
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        refusal(path)


def test_an_altered_element_is_found_by_its_checksum(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    data = file.read_bytes()
    assert data.count(struct.pack("<6f", *range(6))) == 1
    file.write_bytes(data.replace(struct.pack("<6f", *range(6)), struct.pack("<6f", *range(1, 7))))
    assert "CRC" in refusal(checkpoint)


# Metadata that contradicts the files


@pytest.mark.parametrize("what", WRONG)
def test_wrong_metadata(checkpoint: Path, what: str) -> None:
    refusal(samples.edit_metadata(checkpoint, WRONG[what]))


def test_a_data_file_may_not_be_a_link(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (checkpoint / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert "not a link" in refusal(checkpoint)


def test_duplicate_keys(checkpoint: Path) -> None:
    data = (checkpoint / ".metadata").read_bytes()
    assert data.count(b"model.a.weight") == 1
    (checkpoint / ".metadata").write_bytes(
        data.replace(b"model.a.weight", b"model.a.count\0"[:14]).replace(b"\0", b"!")
    )
    refusal(checkpoint)
    twice = b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00aK\x02u."
    assert pickle.loads(twice) == {"a": 2}
    path = archive(checkpoint.parent / "f", twice)
    assert "every key once" in refusal(path)


@pytest.mark.parametrize(
    "boxes", [[((0, 0), (2, 2))], [((0, 0), (2, 2)), ((1, 0), (2, 2))], [((0, 0), (2, 2)), ((1, 1), (2, 1))]]
)
def test_accept_refuses_gaps_and_overlaps(tmp_path: Path, boxes: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    path = samples.write_chunks(tmp_path / "c", "model.w", torch.arange(6).reshape(3, 2), boxes)
    with pytest.raises(CheckpointError, match="every element of"):
        samples.accept(path)


def test_accept_refuses_a_key_that_occurs_twice(tmp_path: Path) -> None:
    path = samples.save_full({"model": {"w": 1}, "model.w": 2}, tmp_path / "c")
    assert [row.key for row in describe(path)] == ["model.w", "model.w"]
    with pytest.raises(CheckpointError, match="every key once"):
        samples.accept(path)


def test_accept_refuses_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="number of keys"):
        samples.accept(samples.save_full({"model": {}}, tmp_path / "c"))


# Archives made by hand


def test_an_archive_made_by_hand_is_read(tmp_path: Path) -> None:
    (row,) = describe(archive(tmp_path / "c", tensor((1, 2), (2, 1), 1, 3), bytes(12)))
    assert (row.dtype, row.shape, row.coverage) == ("fp32", (1, 2), "ok")


@pytest.mark.parametrize(
    "pickled",
    [
        tensor((2,), (1,)),
        tensor((1,), (1,), offset=1),
        tensor((1,), (1,), offset=-1),
        tensor((2,), (-1,), offset=1, numel=2),
        tensor((-1,), (1,)),
        tensor((1, 1), (1,)),
        tensor((1,), (1,), numel=2),
        tensor((1,), (1,), numel=-1),
        tensor((1,), (1,), kind="ComplexFloatStorage"),
        tensor((1,), (1,), kind="UntypedStorage"),
        tensor((1,), (1,), key="1"),
        tensor((1,), (1,), key="../data.pkl"),
        tensor((1 << 62,), (1 << 61,)),
        tensor((1 << 62,) * 5, (1 << 61,) * 5),
        tensor((1,) * 33, (1,) * 33),
    ],
)
def test_a_tensor_that_leaves_its_storage_or_has_none(tmp_path: Path, pickled: bytes) -> None:
    refusal(archive(tmp_path / "c", pickled))


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (1 << 62, 1 << 62)])
def test_an_endless_tensor_is_refused_before_it_is_made(tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert "in one checkpoint" in refusal(archive(tmp_path / "c", tensor(shape, (0,) * len(shape))))


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = archive(tmp_path / "c", tensor((1 << 26,), (1,), numel=1 << 26), bytes(4 << 26), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    assert "compressed" in refusal(path)


def test_a_sparse_file_of_a_terabyte_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    os.truncate(checkpoint / "__0_0.distcp", 1 << 40)
    assert "size in bytes" in refusal(checkpoint)
    (tmp_path / "f").touch()
    os.truncate(tmp_path / "f", 1 << 40)
    assert "size in bytes" in refusal(tmp_path / "f")
    os.truncate(checkpoint / ".metadata", 1 << 40)
    assert "size of the pickle" in refusal(checkpoint)


def test_another_byte_order(tmp_path: Path) -> None:
    assert "byte order" in refusal(archive(tmp_path / "c", tensor((1,), (1,)), order="big"))


@pytest.mark.parametrize("pickled", [NESTED, DOUBLED, CYCLE, b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."])
def test_structures_that_do_not_end(tmp_path: Path, pickled: bytes) -> None:
    begin = time.monotonic()
    refusal(archive(tmp_path / "c", pickled))
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02(lp0\n.",  # opcodes of protocol 0
        b"\x80\x05N.",
        b"\x80\x02.",
        b"\x80\x02NN.",
        b"\x80\x02(N.",
        b"\x80\x02h\x05.",
        b"\x80\x02K\x01R.",
        b"\x80\x02K\x01)R.",
        b"\x80\x02]}b.",
        b"\x80\x02]K\x01K\x02s.",
        b"\x80\x02}K\x01a.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02K\x01(b.",
        b"\x80\x02X\xff\xff\xff\xffa.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.",
        b"\x80\x02cos\nsystem",
        b"\x80\x04K\x01K\x02\x93.",
        b"\x80\x02r\xff\xff\xff\xff.",
    ],
)
def test_damaged_pickles(pickled: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse(pickled, "test")


def test_a_huge_memo_index_costs_nothing() -> None:
    assert parse(b"\x80\x02Nr\xff\xff\xff\xff.", "test") is None


@pytest.mark.parametrize(
    "state",
    [
        {"optim": {"param_groups": [{"lr": "fast"}]}},
        {"optim": {"param_groups": [{"lr": torch.zeros(2)}]}},
        {"optim": {"param_groups": [{"betas": 0}]}},
        {"optim": {"param_groups": [{"params": 0}]}},
        {"extra": {"scheduler": {"last_epoch": 0.5}}},
        {"extra": {"scheduler": {"last_epoch": float("nan")}}},
        {"extra": {"scheduler": {"last_epoch": float("inf")}}},
        {"extra": {"scaler": {"scale": 1e300}}},
        {"extra": {"scaler": {"_growth_tracker": 1 << 70}}},
        {"optim": {"param_groups": [{"lr": 1 << 2000}]}},
        {"model": {"w": "text"}},
    ],
)
def test_a_value_that_is_no_number(tmp_path: Path, state: dict[str, Any]) -> None:
    path = samples.save_full(state, tmp_path / "c")
    with pytest.raises(CheckpointError):
        read_checkpoint(path, 0, MODEL)
