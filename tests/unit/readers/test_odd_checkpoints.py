"""What readers make of odd checkpoints, part by part.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`); the refusals are in
`golden/refusals.txt`."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_samples as samples
import ml_dtypes
import numpy as np
import pytest
import torch
from shardproof.models import ZOO, model_spec
from shardproof.observe.generators import state_value
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN, Record
from shardproof.observe.settings import SETTING
from shardproof.program import expand
from shardproof.readers import vocabulary
from shardproof.readers.archive import Archive, Budget
from shardproof.readers.checkpoint import expected_written
from shardproof.readers.description import Row, _row, check_complete, render_description
from shardproof.readers.errors import CheckpointError, bad
from shardproof.readers.pieces import ObjectPiece, Piece, TensorPiece, _flatten, _unflattened, leaves, open_regular
from shardproof.readers.roles import records_of
from shardproof.readers.safetensors import MAX_FILE_BYTES, MAX_HEADER_BYTES, sharded_pieces
from shardproof.readers.stored import TorchStored
from shardproof.readers.symbolic import Name
from shardproof.readers.values import Quantised, Storage, Tensor
from shardproof.readers.values import Value as Plain
from shardproof.readers.vocabulary import Vocabulary
from shardproof.scenario import Mesh, Scenario

pytestmark = pytest.mark.usefixtures("refused_word_for_word")


# --- flat ranges of shards ----------------------------------------------------------------------------


def test_a_flat_range_of_a_shard_is_cut_into_boxes_of_the_tensor() -> None:
    data = bytes(range(10))  # elements 1 to 6 of the shard of rows 2 and 3, columns 0 to 2, of a tensor of 4 × 6
    piece = TensorPiece(("w",), 3, "bf16", (2, 2, 6), (1, 0, 1), (1, 1, 5), data)
    found = list(_unflattened(piece, (4, 6)))
    assert found == [
        TensorPiece(("w",), 3, "bf16", (4, 6), (2, 1), (1, 2), data[:4]),
        TensorPiece(("w",), 3, "bf16", (4, 6), (3, 0), (1, 3), data[4:]),
    ]


def test_an_empty_flat_range_at_the_end_of_a_shard_is_no_box_or_an_empty_one() -> None:
    piece = TensorPiece(("w",), 0, "fp32", (1, 4), (0, 9), (1, 0), b"")
    assert [box.data for box in _unflattened(piece, (4,))] in ([], [b""])


# --- files ----------------------------------------------------------------------------------------------


def test_a_link_is_read_where_the_caller_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"ab")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_regular(tmp_path / "link", 0) as file:
        assert file.read() == b"ab"
    with pytest.raises(CheckpointError):
        open_regular(tmp_path / "link")
    with pytest.raises(CheckpointError):
        open_regular(Path("nul\0"))


def test_leaves_of_nested_values() -> None:
    nested: dict[str | int | float | bytes | bool | None, object] = {
        "a": [1, 2], 3: {"b": [{"c": 1}, [2]]}, 0.5: None, "empty": {}, "none": [],
    }  # fmt: skip
    assert list(leaves(("top",), nested)) == [  # type: ignore[arg-type]
        (("top", "a"), [1, 2]), (("top", 3, "b", 0, "c"), 1), (("top", 3, "b", 1), [2]), (("top", "0.5"), None),
        (("top", "none"), []),
    ]  # fmt: skip


FLOATS = Tensor(Storage("fp32", "0", 6), 0, (3, 2), (2, 1))
BYTES = Tensor(Storage("uint8", "1", 6), 0, (2, 3), (3, 1))
INVERSE = Tensor(Storage("fp32", "2", 1), 0, (), ())


def test_values_become_pieces_that_cover_them() -> None:
    held = {FLOATS: b"floats", BYTES: b"bytes", INVERSE: b"inverse"}
    archive: Any = SimpleNamespace(data=held.__getitem__)
    stored: Plain = {"w": FLOATS, "q": Quantised(BYTES, INVERSE, "bf16"), "n": 7}
    assert list(_flatten(("model",), stored, 3, archive)) == [
        TensorPiece(("model", "w"), 3, "fp32", (3, 2), (0, 0), (3, 2), b"floats"),
        TensorPiece(("model", "q"), 3, "fp8e4m3", (2, 3), (0, 0), (2, 3), b"bytes", b"inverse"),
        ObjectPiece(("model", "n"), 3, 7),
    ]


def test_what_a_refusal_quotes_is_shortened() -> None:
    long = "a" * 101 + "b" * 100
    for given in ("c" * 200, long, (1 << 128) - 1, 1 << 128, 0.5, None, [1, 2], b"bytes"):
        assert "given " in str(bad("it", given, "another", "this"))
    assert "…" not in str(bad("d" * 200, "", "another", "this"))
    assert f"{'a' * 100} … {'b' * 100}: given" in str(bad(long, "", "another", "this"))
    assert f"given '{'a' * 100} … {'b' * 100}'" in str(bad("it", long, "another", "this"))
    assert f"given {(1 << 128) - 1};" in str(bad("it", (1 << 128) - 1, "another", "this"))


# --- archives of torch.save ----------------------------------------------------------------------------

NUMBER = b"\x80\x02K\x07."
DIRECTORY = b"PK\x01\x02"
FLAGS, METHOD, PACKED = 8, 10, 20
"""Where an entry of a zip's directory says how it is stored: PKWARE, APPNOTE.TXT 4.3.12."""


def zipped(**entries: bytes) -> bytes:
    """An archive with these entries; `_` in a name stands for a slash."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in entries.items():
            file.writestr(name.replace("_", "/").replace("pkl", "data.pkl"), data)
    return buffer.getvalue()


def marked(data: bytes, at: int, value: int) -> bytes:
    """The archive with another number in its first entry in the directory."""
    place = data.index(DIRECTORY) + at
    return data[:place] + struct.pack("<H", value) + data[place + 2 :]


def test_an_archive_that_says_nothing_of_its_byte_order_is_read() -> None:
    for data in (zipped(x_pkl=NUMBER), zipped(x_pkl=NUMBER, x_byteorder=b"little")):
        assert Archive(data, "it", Budget()).value() == 7


def test_flags_of_an_entry_that_change_none_of_its_bytes_are_let_be() -> None:
    assert Archive(marked(zipped(x_pkl=NUMBER), FLAGS, 2), "it", Budget()).value() == 7


@pytest.mark.parametrize(("at", "value"), [(FLAGS, 1), (FLAGS, 3), (METHOD, 8), (PACKED, 4)])
def test_an_entry_that_is_not_stored_as_it_is(at: int, value: int) -> None:
    with pytest.raises(CheckpointError):
        Archive(marked(zipped(x_pkl=NUMBER), at, value), "it", Budget())


@pytest.mark.parametrize("order", [b"big", b"", b"LITTLE", b"a longer one \xff than 16 bytes"])
def test_another_byte_order_is_quoted(order: bytes) -> None:
    with pytest.raises(CheckpointError):
        Archive(zipped(x_pkl=NUMBER, x_byteorder=order), "it", Budget())


def test_an_archive_has_every_name_once_and_one_pickle() -> None:
    twice = zipped(x_pkl=NUMBER, x_aa=b"", x_ab=b"").replace(b"x/ab", b"x/aa")
    for data in (twice, zipped(x_pkl=NUMBER, y_pkl=NUMBER), zipped(x_a=b""), zipped(x_y_pkl=NUMBER)):
        with pytest.raises(CheckpointError):
            Archive(data, "it", Budget())


def test_a_pickle_that_is_damaged_is_said_to_be_that_of_its_archive() -> None:
    with pytest.raises(CheckpointError):
        Archive(zipped(x_pkl=NUMBER[:-1]), "it", Budget()).value()


def test_tensors_may_take_as_many_bytes_as_is_said_in_all() -> None:
    budget = Budget(10)
    for _ in range(2):
        budget.spend(5, "it")
    with pytest.raises(CheckpointError):
        budget.spend(1, "it")


# --- safetensors ---------------------------------------------------------------------------------------


def shard(folder: Path, header: bytes, body: bytes, name: str = "shard-00001-model-00001-of-00001.safetensors") -> Path:
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + body)
    return folder / name


def entry(name: str, first: int, last: int) -> str:
    return f'"{name}": {{"dtype": "U8", "shape": [{last - first}], "data_offsets": [{first}, {last}]}}'


def test_tensors_may_stand_in_any_order_and_files_are_those_of_their_ranks(tmp_path: Path) -> None:
    shard(tmp_path, f"{{{entry('a', 2, 3)}, {entry('b', 0, 2)}}}".encode(), b"bba")
    shard(tmp_path, f"{{{entry('c', 0, 1)}}}".encode(), b"c", "shard-00000-model-00001-of-00001.safetensors")
    shard(tmp_path, f"{{{entry('d', 0, 1)}}}".encode(), b"d", "shard-00003-model-00001-of-00001.safetensors")
    found = {(p.rank, p.path[1], p.start, p.data) for p in sharded_pieces(tmp_path, {})}
    assert found == {(0, "a", (0,), b"a"), (0, "b", (0,), b"bb"), (0, "c", (0,), b"c"), (2, "d", (0,), b"d")}


def test_a_shard_may_be_as_large_as_is_said_and_no_larger(tmp_path: Path) -> None:
    file = shard(tmp_path, b"{}", b"")
    os.truncate(file, MAX_FILE_BYTES)
    assert list(sharded_pieces(tmp_path, {})) == []
    os.truncate(file, MAX_FILE_BYTES + 1)
    with pytest.raises(CheckpointError):
        list(sharded_pieces(tmp_path, {}))


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8, b"\2" + b"\0" * 7 + b"{", b"\3" + b"\0" * 7 + b"{}"])
def test_a_header_that_is_not_there_whole(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError):
        list(sharded_pieces(tmp_path, {}))


def test_a_header_may_be_as_long_as_is_said_and_no_longer(tmp_path: Path) -> None:
    shard(tmp_path, b"{}".ljust(MAX_HEADER_BYTES), b"")
    assert list(sharded_pieces(tmp_path, {})) == []
    shard(tmp_path, b"{}".ljust(MAX_HEADER_BYTES + 1), b"")
    with pytest.raises(CheckpointError):
        list(sharded_pieces(tmp_path, {}))


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_shard_is_a_file(tmp_path: Path, link: str) -> None:
    file = shard(tmp_path, b"{}", b"")
    if link == "file":
        (tmp_path / "other").write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(tmp_path / "other")
    else:
        file.unlink()
        file.mkdir()
    with pytest.raises(CheckpointError):
        list(sharded_pieces(tmp_path, {}))


# --- what pieces are ----------------------------------------------------------------------------------

DENSE = model_spec("dense")


def records(*pieces: Piece) -> list[Record]:
    """Without the lines of settings, of which `test_the_line_of_a_setting` is."""
    return [record for record in records_of(pieces, 3, DENSE, "it") if record.role != SETTING]


def number(*path: str | int, value: object = 1, rank: int = 2) -> Piece:
    return ObjectPiece(path, rank, value)  # type: ignore[arg-type]


def scalar(*path: str | int, value: object, dtype: str) -> Piece:
    kind = ml_dtypes.bfloat16 if dtype == "bf16" else {"fp32": "f4", "fp64": "f8", "fp16": "f2", "int64": "i8"}[dtype]
    return TensorPiece(path, 2, dtype, (), (), (), np.array(value, kind).tobytes())


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16", "int64"])
def test_a_learning_rate_may_be_a_tensor_of_any_dtype(dtype: str) -> None:
    (record,) = records(scalar("optim", "param_groups", 0, "lr", value=2, dtype=dtype))
    assert record == Record(3, 2, WRITTEN, "hyperparameter", "group0.lr", "fp64", (), (), (), struct.pack("<d", 2.0))


def wanted(role: str, fqn: str, dtype: str, value: float) -> Record:
    data = struct.pack({"fp64": "<d", "fp32": "<f", "int64": "<q"}[dtype], value)
    return Record(3, 2, WRITTEN, role, fqn, dtype, (), (), (), data)


@pytest.mark.parametrize(
    ("piece", "record"),
    [
        (number("optim", "param_groups", 1, "eps"), wanted("hyperparameter", "group1.eps", "fp64", 1)),
        (number("optim", "param_groups", 1, "step", value=4), wanted("hyperparameter", "group1.step", "fp64", 4)),
        (number("app", "optim", "param_groups", 0, "nesterov"), wanted("hyperparameter", "group0.nesterov", "fp64", 1)),
        (number("optim", "param_groups.up.weight.lr"), wanted("hyperparameter", "up.weight.lr", "fp64", 1)),
        (number("optim", "state", "up.weight", "step"), wanted("step", "up.weight", "int64", 1)),
        (number("optim", "state", "up.weight", "step", value=1.5), wanted("step", "up.weight", "fp64", 1.5)),
        (number("optim", "state", "up.weight", "mine", value=True), wanted("mine", "up.weight", "fp64", 1)),
        (number("extra", "scheduler", "last_epoch", value=2), wanted("scheduler", "last_epoch", "int64", 2)),
        (number("extra", "scheduler", "last_epoch", value=-(1 << 63)),
         wanted("scheduler", "last_epoch", "int64", -(1 << 63))),
        (number("extra", "scheduler", "last_epoch", value=2.0), wanted("scheduler", "last_epoch", "int64", 2)),
        (number("extra", "scheduler", "_last_lr", value=[0.5]), wanted("scheduler", "last_lr.0", "fp64", 0.5)),
        (scalar("extra", "scheduler", "_last_lr", 1, value=0.5, dtype="fp32"),
         wanted("scheduler", "last_lr.1", "fp64", 0.5)),
        (number("extra", "scaler", "scale", value=8.0), wanted("scaler", "scale", "fp32", 8)),
        (number("extra", "scaler", "_growth_tracker"), wanted("scaler", "growth_tracker", "int64", 1)),
    ],
)  # fmt: skip
def test_what_a_number_is(piece: Piece, record: Record) -> None:
    assert records(piece) == [record]


@pytest.mark.parametrize(
    ("piece", "fqn", "line"),
    [
        (number("optim", "param_groups", 1, "foreach", value=None), "group1.foreach", b"NoneType"),
        (number("optim", "param_groups", 0, "maximize", value=True), "group0.maximize", b"bool True"),
        (number("optim", "param_groups", 0, "lr"), "group0.lr", b"int"),
        (number("app", "optim", "param_groups", 0, "betas", value=[0.5, 1]), "group0.betas", b"(float, int)"),
        (number("optim", "param_groups.up.weight.name", value="\ud800"), "up.weight.name", b"str '\\ud800'"),
        (scalar("optim", "param_groups", 0, "lr", value=2, dtype="bf16"), "group0.lr", b"tensor bfloat16 ()"),
    ],
)  # fmt: skip
def test_the_line_of_a_setting(piece: Piece, fqn: str, line: bytes) -> None:
    found = [record for record in records_of([piece], 3, DENSE, "it") if record.role == SETTING]
    size = (len(line),)
    assert found == [Record(3, 2, WRITTEN, SETTING, fqn, "utf8", size, (0,), size, line)]


def test_what_is_no_setting() -> None:
    pieces = [number("optim", "param_groups", 0, "params", value=["a"]), number("optim", "param_groups", 0, "step")]
    assert {record.role for record in records_of(pieces, 3, DENSE, "it")} == {"hyperparameter"}


def test_the_state_of_a_generator_is_a_digest_of_it() -> None:
    state = bytes(range(16))
    piece = TensorPiece(("extra", "rng", "rank1", "cpu"), 2, "uint8", (16,), (0,), (16,), state)
    known = state_value(state)
    assert records(piece) == [Record(3, 0, WRITTEN, "rng", "rank1.cpu", "uint8", (16,), (0,), (16,), known.data)]
    assert records(number("extra", "rng", "rank1", "cpu")) == []


def test_pairs_of_betas_and_names_of_parameters() -> None:
    betas = records(number("optim", "param_groups", 0, "betas", value=[0.5, 0.25]))
    assert betas == [
        wanted("hyperparameter", "group0.beta1", "fp64", 0.5), wanted("hyperparameter", "group0.beta2", "fp64", 0.25)
    ]  # fmt: skip
    text = b"a\nb"
    assert records(number("optim", "param_groups", 0, "params", value=["a", "b"])) == [
        Record(3, 2, WRITTEN, "hyperparameter", "group0.params", "utf8", (3,), (0,), (3,), text)
    ]
    (odd,) = records(number("optim", "param_groups", 0, "params", value=["\ud800", 7]))
    assert odd.data == b"?\n7"


def test_a_tensor_with_a_scale_has_a_scale_for_each_element() -> None:
    inverse = np.float32(0.5).tobytes()
    piece = TensorPiece(("model", "up.weight"), 1, "fp8e4m3", (4, 2), (2, 0), (2, 2), b"abcd", inverse)
    box = ((4, 2), (2, 0), (2, 2))
    assert records(piece) == [
        Record(3, 1, WRITTEN, "param", "up.weight", "fp8e4m3", *box, b"abcd"),
        Record(3, 1, WRITTEN, "quant_scale", "up.weight.param", "fp32", *box, inverse * 4),
    ]


def test_what_is_no_record() -> None:
    assert records(
        number("model"), number("other", "x"), number("optim", "mine", "x"), number("extra", "iteration"),
        number("optim", "state", "up.weight", "max", value=None),
        number("extra", "scheduler", "_step_count"), number("extra", "scheduler", "_last_lr", value=0.5),
        scalar("extra", "scheduler", "_last_lr", value=0.5, dtype="fp32"), number("extra", "scaler", "growth"),
    ) == []  # fmt: skip


def test_roles_of_a_model() -> None:
    names = ("weight", "_extra_state", "_extra_state.more")
    found = records(*(scalar("model", "up", name, value=1, dtype="fp32") for name in names))
    assert [record.role for record in found] == ["param", "extra_state", "param"]
    buffered = next(model for model in ZOO.values() if list(model.buffers()))
    name, _ = next(iter(buffered.buffers()))
    (buffer,) = records_of([scalar("model", *name.split("."), value=1, dtype="fp32")], 0, buffered, "it")
    assert (buffer.role, buffer.fqn) == ("buffer", name)
    (master,) = records(scalar("optim", "state", "up.weight", "master_param", value=1, dtype="fp32"))
    (momentum,) = records(scalar("optim", "state", "up.weight", "momentum_buffer", value=1, dtype="fp32"))
    assert (master.role, momentum.role, master.fqn) == ("master", "momentum", "up.weight")


@pytest.mark.parametrize(
    "piece",
    [
        number("optim", "param_groups", 0, "betas", value=[0.5]),
        number("optim", "param_groups", 0, "betas", value=0.5),
        number("optim", "param_groups", 0, "betas", value=["a", "b"]),
        number("optim", "param_groups", 0, "params", value="a"),
        number("optim", "param_groups", 0, "lr", value=10**400),
        number("optim", "param_groups", 0, "lr", value="0.5"),
        number("extra", "scaler", "scale", value=1e300),
        number("extra", "scheduler", "last_epoch", value=0.5),
        number("extra", "scheduler", "last_epoch", value="a"),
        number("extra", "scheduler", "_last_lr", value=["a"]),
        number("extra", "scheduler", "last_epoch", value=1 << 63),
        number("extra", "scheduler", "last_epoch", value=-(1 << 63) - 1),
        TensorPiece(("optim", "param_groups", 0, "lr"), 0, "fp32", (2,), (0,), (2,), bytes(8)),
    ],
)
def test_a_value_that_is_no_number(piece: Piece) -> None:
    with pytest.raises(CheckpointError):
        records(piece)


# --- what must be written ---------------------------------------------------------------------------


def test_numbers_of_a_group_are_handed_down_to_its_parameters() -> None:
    def lasting(*entries: tuple[int, str, bytes]) -> Logical:
        return {Key(op, LIVE, "hyperparameter", fqn): Value("utf8", (len(data),), data) for op, fqn, data in entries}

    live = lasting(
        (1, "group0.lr", b"x"), (1, "group0.params", b"a b\nc"), (1, "group1.lr", b"y"), (1, "group1.params", b""),
        (2, "group0.lr", b"z"), (2, "group0.params", b"a b"), (2, "group0.mine.own", b"w"),
    )  # fmt: skip
    found = expected_written(live, DENSE, flat=True)
    assert {(key.op, key.where, key.fqn, value.data) for key, value in found.items()} == {
        (1, WRITTEN, "a b.lr", b"x"), (1, WRITTEN, "c.lr", b"x"), (2, WRITTEN, "a b.lr", b"z"),
        (2, WRITTEN, "a b.mine.own", b"w"),
    }  # fmt: skip
    assert {key.fqn for key in expected_written(live, DENSE, flat=False)} == {key.fqn for key in live}


def test_a_format_flattens_if_its_name_says_so(tmp_path: Path) -> None:
    scenario = Scenario(mesh=Mesh(1, 1, 1), program="build save", checkpoint="dcp+flatten")
    group = {
        Key(1, LIVE, "hyperparameter", "group0.lr"): Value("fp64", (), bytes(8)),
        Key(1, LIVE, "hyperparameter", "group0.params"): Value("utf8", (1,), b"a"),
    }
    save = expand(scenario)[1]
    for checkpoint, names in (("dcp+flatten", {"a.lr"}), ("dcp", {"group0.lr", "group0.params"})):
        held = TorchStored().must_hold(group, save, replace(scenario, checkpoint=checkpoint))
        assert {key.fqn for key in held} == names


def test_settings_that_are_live_must_be_written() -> None:
    scenario = Scenario(mesh=Mesh(1, 1, 1), program="build save", checkpoint="dcp")
    live = {Key(1, LIVE, role, "group0.foreach"): Value("utf8", (1,), b"a") for role in (SETTING, "hyperparameter")}
    held = TorchStored().must_hold(live, expand(scenario)[1], scenario)
    assert {key.role for key in held} == {SETTING, "hyperparameter"}


def test_records_of_a_checkpoint_are_of_the_save(tmp_path: Path) -> None:
    scenario = Scenario(mesh=Mesh(1, 1, 1), program="build step save", checkpoint="dcp")
    samples.save_full({"model": {"up.weight": torch.zeros(2)}}, tmp_path / "c")
    (record,) = TorchStored().read(tmp_path / "c", expand(scenario)[2], scenario)
    assert (record.op, record.fqn, record.role) == (2, "up.weight", "param")


# --- names that systems know -------------------------------------------------------------------------


def test_names_of_all_systems_are_known_together(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Name("a", "x"), Name("b", "y")
    makes = {a: lambda args, decode: None}
    one = Vocabulary(frozenset({a}), frozenset({b}), makes, frozenset({b}))
    other = Vocabulary(frozenset({b}), frozenset({a}), {b: makes[a]}, frozenset({a}))
    both = frozenset({a, b})
    assert one | other == Vocabulary(both, both, makes | {b: makes[a]}, both)
    monkeypatch.setattr(vocabulary, "_providers", [])
    monkeypatch.setattr(vocabulary, "_known", Vocabulary())
    vocabulary.provide(lambda: [one])
    vocabulary.provide(lambda: [other])
    assert vocabulary.known() == one | other
    assert vocabulary.known() == one | other, "and asked once"


# --- the table ----------------------------------------------------------------------------------------


def row(key: str, coverage: str = "ok", shape: tuple[int, ...] = (2, 3), kind: str = "tensor") -> Row:
    return Row(key, kind, "fp32", shape, 1, coverage, "0" * 12, "" if kind == "tensor" else "text")


def test_a_table_is_aligned_and_cannot_control_a_terminal() -> None:
    told = render_description([row("a\x1b\ud800"), row("b", shape=()), row("a long name", kind="object", shape=())])
    assert told.splitlines() == [
        "key          dtype  shape   chunks  coverage  sha256        value",
        "a\\x1b\\ud800  fp32   2×3     1       ok        000000000000",
        "b            fp32   scalar  1       ok        000000000000",
        "a long name  fp32           1       ok        000000000000  text",
    ]
    assert told.endswith("text\n")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def test_rows_of_objects() -> None:
    shown = {"a" * 38: f"'{'a' * 38}'", "a" * 39: f"'{'a' * 38}…", "\ud800": "'\\ud800'", 7: "7", True: "True"}
    for value, told in shown.items():
        found = _row("k", [number("k", value=value)])
        assert found == Row("k", "object", type(value).__name__, (), 1, "ok", digest(repr(value).encode()), told)
    twice = _row("k", [number("k"), number("k")])
    assert (twice.chunks, twice.coverage) == (2, "overlap")


def chunk(start: tuple[int, ...], size: tuple[int, ...], data: bytes, shape: tuple[int, ...] = (2, 2)) -> TensorPiece:
    return TensorPiece(("k",), 0, "uint8", shape, start, size, data)


@pytest.mark.parametrize(
    ("chunks", "coverage", "data"),
    [
        ([chunk((0, 0), (2, 2), b"abcd")], "ok", b"abcd"),
        ([chunk((0, 1), (2, 1), b"bd"), chunk((0, 0), (2, 1), b"ac")], "ok", b"abcd"),
        ([chunk((0, 0), (0, 2), b"", (0, 2))], "ok", b""),
        ([chunk((0, 0), (1, 2), b"ab")], "gap", None),
        ([chunk((0, 0), (2, 2), b"abcd"), chunk((0, 0), (1, 1), b"a")], "overlap", None),
        ([chunk((0, 0), (1, 2), b"ab"), chunk((0, 1), (2, 1), b"bd")], "overlap", None),
        ([chunk((0, 0), (1, 2), b"ab"), chunk((0, 0), (1, 2), b"ab")], "overlap", None),
        ([chunk((0, 0), (1, 2), b"ab"), chunk((1, 0), (1, 2), b"cd", (2, 3))], "overlap", None),
        ([chunk((0, 0), (1, 2), b"ab"), number("k")], "overlap", None),
    ],
)
def test_rows_of_tensors(chunks: list[Piece], coverage: str, data: bytes | None) -> None:
    first = chunks[0]
    assert isinstance(first, TensorPiece)
    told = "" if data is None else digest(data)
    assert _row("k", chunks) == Row("k", "tensor", "uint8", first.shape, len(chunks), coverage, told)


@pytest.mark.parametrize("rows", [[], [row("a"), row("b", "gap")], [row("a", "overlap")], [row("a"), row("a")]])
def test_a_checkpoint_that_is_not_complete(rows: list[Row]) -> None:
    check_complete(Path("it"), [row("a"), row("b")])
    with pytest.raises(CheckpointError):
        check_complete(Path("it"), rows)
