"""`shardproof diff` on checkpoints that are missing, damaged, foreign or hostile: one clear error, nothing executed."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import checkpoint_samples as samples
import pytest
import torch
from hostile_checkpoints import CYCLE, DOUBLED, NESTED, WRONG, archive, foreign_files, tensor
from shardproof.compare import archives
from shardproof.compare.listing import listed
from shardproof.compare.progress import SilentProgress
from shardproof.compare.run import CompareRequest, compare
from shardproof.errors import UsageError
from shardproof.readers.errors import CheckpointError
from test_compare import compared, write_safetensors


def refusal(path: Path, other: Path | None = None) -> str:
    """The message with which a checkpoint is refused, on either side."""
    with pytest.raises(UsageError) as caught:
        compared(path, other or path)
    message = str(caught.value)
    assert all(part in message for part in ("given ", "; allowed: ", "; for example: "))
    assert len(message) < 2000
    return message


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return samples.save_dcp(samples.STATE, tmp_path / "c")


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return samples.save_full(samples.STATE, tmp_path / "sound.pt")


# Missing, foreign and special files


def test_missing_empty_and_foreign_folders(tmp_path: Path, sound: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "existing directory or file" in refusal(tmp_path / "nothing")
    assert "checkpoints in it" in refusal(sound, tmp_path / "empty")
    (tmp_path / "empty" / "readme.txt").write_text("nothing")
    assert "checkpoints in it" in refusal(tmp_path / "empty")


@pytest.mark.parametrize("kind", sorted(foreign_files().keys() - {"safetensors"}))
def test_a_foreign_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "c").write_bytes(foreign_files()[kind])
    refusal(tmp_path / "c")


def test_nothing_equals_nothing(tmp_path: Path) -> None:
    none = samples.save_full({"model": {}, "lr": 0.1}, tmp_path / "none.pt")
    empty = samples.save_full({"w": torch.zeros(0, 4)}, tmp_path / "empty.pt")
    assert "nothing equals nothing" in refusal(none)
    assert "nothing equals nothing" in refusal(empty)


def test_pipes_devices_and_links_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in refusal(tmp_path / "pipe")
    assert "regular file" in refusal(Path("/dev/zero"))
    data = checkpoint / "__0_0.distcp"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    assert "not a link" in refusal(checkpoint)
    data.unlink()
    os.mkfifo(data)
    assert "regular file" in refusal(checkpoint)


def test_a_link_that_the_user_names_is_followed(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "latest.pt").symlink_to(sound)
    assert compared(tmp_path / "latest.pt", sound).equal


def test_links_in_a_folder_of_safetensors_are_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "blob", {"w": torch.ones(2)})
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "not a link" in refusal(tmp_path / "m")


# Pickles


@pytest.mark.parametrize("where", ["file", "item", "metadata"])
def test_nothing_is_executed(checkpoint: Path, tmp_path: Path, where: str) -> None:
    marker = tmp_path / "executed"
    touch = samples.Touch(marker)
    if where == "file":
        path = samples.save_full({"w": torch.zeros(1), "x": touch}, tmp_path / "f.pt")
        assert compared(path, path).a.foreign == ("posix.system",)
    elif where == "item":
        samples.replace_item(checkpoint, "extra.iteration", samples.saved(touch))
        assert compared(checkpoint, checkpoint).a.foreign == ("posix.system",)
    else:
        (checkpoint / ".metadata").write_bytes(pickle.dumps(touch, protocol=4))
        assert "posix.system" in refusal(checkpoint)
    assert not marker.exists()


@pytest.mark.parametrize("pickled", [NESTED, DOUBLED, CYCLE])
def test_structures_that_do_not_end(tmp_path: Path, pickled: bytes) -> None:
    refusal(archive(tmp_path / "c", pickled))


@pytest.mark.parametrize(
    "pickled",
    [
        tensor((2,), (1,)),
        tensor((1,), (1,), offset=1),
        tensor((1,), (1,), offset=-1),
        tensor((2,), (-1,), offset=1, numel=2),
        tensor((1, 1), (1,)),
        tensor((1,), (1,), numel=2),
        tensor((1,), (1,), kind="QInt8Storage"),
        tensor((1,), (1,), key="1"),
        tensor((1,), (1,), key="../data.pkl"),
        tensor((1 << 62,), (1 << 61,)),
        tensor((1,) * 33, (1,) * 33),
    ],
)
def test_a_tensor_that_leaves_its_storage_or_has_none(tmp_path: Path, pickled: bytes) -> None:
    refusal(archive(tmp_path / "c", pickled))


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (1 << 62, 1 << 62)])
def test_an_endless_tensor_is_refused_before_it_is_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert "times the bytes of its files" in refusal(archive(tmp_path / "c", tensor(shape, (0,) * len(shape))))


# Metadata that contradicts the files


A_GAP = "chunk smaller than its item"
"""The chunks then leave a gap, which is a difference: nobody looks at the item."""


@pytest.mark.parametrize("what", sorted(WRONG.keys() - {"unknown dtype", A_GAP}))
def test_wrong_metadata(checkpoint: Path, what: str) -> None:
    samples.edit_metadata(checkpoint, WRONG[what])
    refusal(checkpoint)


def test_a_chunk_that_leaves_a_gap_is_a_difference(checkpoint: Path) -> None:
    samples.edit_metadata(checkpoint, WRONG[A_GAP])
    assert [one.kind for one in compared(checkpoint, checkpoint).found] == ["gap"]


def test_truncated_files_of_every_kind(checkpoint: Path, sound: Path, tmp_path: Path) -> None:
    old, safe = tmp_path / "old.pt", write_safetensors(tmp_path / "s.safetensors", {"w": torch.ones(4)})
    torch.save(samples.STATE, old, _use_new_zipfile_serialization=False)
    for file, named in ((sound, sound), (old, old), (safe, safe), (checkpoint / ".metadata", checkpoint)):
        data = file.read_bytes()
        for length in range(0, len(data), max(1, len(data) // 23)):
            file.write_bytes(data[:length])
            refusal(named)
        file.write_bytes(data)
    (checkpoint / "__0_0.distcp").write_bytes(b"")
    refusal(checkpoint)


def altered(path: Path) -> Path:
    data = path.read_bytes()
    stored = struct.pack("<6f", *range(6))
    assert data.count(stored) == 1
    path.write_bytes(data.replace(stored, struct.pack("<6f", *range(1, 7))))
    return path


def test_a_checksum_is_verified_unless_one_says_otherwise(sound: Path, tmp_path: Path) -> None:
    other = altered(samples.save_full(samples.STATE, tmp_path / "altered.pt"))
    assert "CRC" in refusal(sound, other)
    assert "CRC" in refusal(other, sound)
    found = compare(CompareRequest(sound, other, (), checksums=False), SilentProgress())
    assert [(one.name, one.mismatched) for one in found.found] == [("model.a.weight", 6)]
    assert not found.checksums


def test_a_checksum_is_verified_where_a_tensor_is_a_part_of_its_storage(tmp_path: Path) -> None:
    base = torch.cat([torch.arange(6.0), torch.ones(100)])
    a = samples.save_full({"w": base[50:60]}, tmp_path / "a.pt")
    b = altered(samples.save_full({"w": base[50:60]}, tmp_path / "b.pt"))
    assert "CRC" in refusal(a, b)


def test_storages_that_share_bytes(tmp_path: Path) -> None:
    path = archive(tmp_path / "c", tensor((1,), (1,)))
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\x01\x02")  # the last entry of the directory is the storage: let it begin at the first one
    data[end + 42 : end + 46] = bytes(4)
    path.write_bytes(data)
    refusal(path)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = archive(tmp_path / "c", tensor((1 << 20,), (1,), numel=1 << 20), bytes(4 << 20), zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(path)


def test_a_directory_of_an_archive_that_is_absurdly_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.save_full({f"t{i}": torch.ones(1) for i in range(900)}, tmp_path / "f.pt")
    monkeypatch.setattr(archives, "MAX_DIRECTORY_BYTES", 10_000)
    assert "bytes of the archive's directory" in refusal(path)


# Safetensors


def _header(path: Path, edit: Callable[[dict[str, dict[str, object]]], object]) -> Path:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header = edit(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return path


DAMAGE: dict[str, Callable[[dict[str, dict[str, object]]], object]] = {
    "outside": lambda h: h["w"].update(data_offsets=[16, 32]),
    "shared": lambda h: h.update(v={**h["w"], "data_offsets": [0, 16]}),
    "another size": lambda h: h["w"].update(shape=[5]),
    "endless": lambda h: h["w"].update(shape=[1 << 62, 0, 1 << 62]),
    "unknown dtype": lambda h: h["w"].update(dtype="F7"),
    "no offsets": lambda h: h["w"].pop("data_offsets") and None,
    "negative": lambda h: h["w"].update(data_offsets=[-4, 12]),
    "fraction": lambda h: h["w"].update(shape=[1.5]),
    "no dict": lambda h: h.update(w=3),  # type: ignore[arg-type]
    "places": lambda h: h.update(__metadata__={"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'}),
    "twice": lambda h: json.dumps(h).encode()[:-1] + b"," + json.dumps(h).encode()[1:],
    "deep": lambda h: b"[" * 100_000,
    "a list": lambda h: b"{[]}",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_safetensors(tmp_path: Path, what: str) -> None:
    refusal(_header(write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(4)}), DAMAGE[what]))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": ""}, "header of 'lm_head.weight': dtype: given ''; allowed: F64, F32, "),
        ({"dtype": ["F32"]}, "header of 'lm_head.weight': dtype: given 'list'; allowed: F64, F32, "),
        ({"shape": [-4]}, "header of 'lm_head.weight': given 'not a list of counts: [-4]'; allowed: a shape and "),
        ({"data_offsets": [0]}, "header of 'lm_head.weight': data_offsets: given 1; allowed: 2 numbers"),
    ],
)
def test_a_header_that_cannot_be_read_is_told_by_file_and_tensor(
    tmp_path: Path, entry: dict[str, object], said: str
) -> None:
    file = write_safetensors(tmp_path / "m.safetensors", {"lm_head.weight": torch.ones(4), "v": torch.ones(2)})
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: {said}")):
        listed(_header(file, lambda header: header["lm_head.weight"].update(entry)), [])


def test_a_header_without_a_part_is_told_by_what_it_has(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(4)})
    with pytest.raises(CheckpointError, match="header of 'w': given 'data_offsets, shape'; allowed: dtype, shape and"):
        listed(_header(file, lambda header: header["w"].pop("dtype") and None), [])


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"w": "../m.safetensors"}}',
        '{"weight_map": {"w": "/etc/passwd"}}',
        '{"weight_map": {"w": "absent.safetensors"}}',
        '{"weight_map": {"w": 3}}',
        '{"weight_map": {"w": "m.safetensors", "v": "m.safetensors"}}',
        '{"weight_map": {"v": "m.safetensors"}}',
        '{"weight_map": {}}',
        '{"weight_map": []}',
        "[]",
        "{",
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, index: str) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(4)})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refusal(tmp_path)


# Files that change


@pytest.mark.parametrize("how", ["shorter", "other", "gone", "touched"])
def test_a_file_that_changes_meanwhile(tmp_path: Path, how: str) -> None:
    a = samples.save_full({"w": torch.arange(1000.0)}, tmp_path / "a.pt")
    b = samples.save_full({"w": torch.arange(1000.0)}, tmp_path / "b.pt")
    status = b.stat()

    class Meanwhile(SilentProgress):
        def phase(self, what: str, total_bytes: int) -> None:
            if how == "shorter":
                os.truncate(b, 1000)
            elif how == "other":
                (tmp_path / "other").write_bytes(b.read_bytes())
                os.replace(tmp_path / "other", b)
            elif how == "gone":
                b.unlink()
            else:
                os.utime(b, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    with pytest.raises(CheckpointError, match=r"changed while it was read|nobody changes"):
        compare(CompareRequest(a, b, ()), Meanwhile())


def test_what_is_cut_off_or_damaged_is_called_so(checkpoint: Path, sound: Path, tmp_path: Path) -> None:
    (tmp_path / "half.pt").write_bytes(sound.read_bytes()[:200])
    assert "file of torch.save: given 'cut off or damaged: " in refusal(tmp_path / "half.pt")
    assert "given 'damaged bytes, of CRC" in refusal(sound, altered(sound))
    shard = checkpoint / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-600])
    assert "given 'cut off: " in refusal(checkpoint)
    (checkpoint / ".metadata").unlink()
    assert ".metadata: given 'none beside __0_0.distcp'; allowed: the file that says what lies where" in refusal(
        checkpoint
    )
