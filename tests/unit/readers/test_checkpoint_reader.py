"""The independent checkpoint reader on sound checkpoints, written by torch."""

from __future__ import annotations

import collections
import hashlib
import pickle
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import torch
from checkpoint_samples import MODEL
from shardproof.diff import diff
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.readers.checkpoint import expected_written, read_checkpoint
from shardproof.readers.description import describe, render_description
from shardproof.readers.stored import TorchStored
from shardproof.readers.symbolic import parse
from shardproof.readers.values import decode
from shardproof.scenario import Scenario

pytestmark = pytest.mark.usefixtures("refused_word_for_word")

FULL, DISTRIBUTED = samples.save_full, samples.save_dcp


def fp64(number: float) -> Value:
    return Value("fp64", (), struct.pack("<d", number))


def text(value: str) -> Value:
    return Value("utf8", (len(value),), value.encode())


def live() -> Logical:
    """What an oracle would say of `samples.STATE`, and what no checkpoint stores."""
    weight = Value("fp32", (3, 2), struct.pack("<6f", *range(6)))
    values = {
        ("param", "a.weight"): weight,
        ("compute_param", "a.weight"): weight,
        ("grad", "a.weight"): weight,
        ("buffer", "a.count"): Value("int64", (), struct.pack("<q", 7)),
        ("buffer", "a.cache"): Value("fp32", (2,), bytes(8)),
        ("step", "a.weight"): Value("fp32", (), struct.pack("<f", 2)),
        ("exp_avg", "a.weight"): Value("bf16", (3, 2), b"\x80\x3f" * 6),
        ("hyperparameter", "group0.lr"): fp64(0.5),
        ("hyperparameter", "group0.beta1"): fp64(0.9),
        ("hyperparameter", "group0.beta2"): fp64(0.95),
        ("hyperparameter", "group0.nesterov"): fp64(1.0),
        ("hyperparameter", "group0.params"): text("a.weight"),
        ("setting", "group0.lr"): text("float"),
        ("setting", "group0.betas"): text("(float, float)"),
        ("setting", "group0.nesterov"): text("bool"),
        ("setting", "group0.foreach"): text("NoneType"),
        ("scheduler", "last_epoch"): Value("int64", (), struct.pack("<q", 2)),
        ("scheduler", "last_lr.0"): fp64(0.5),
        ("scheduler", "last_lr.1"): fp64(0.25),
        ("scaler", "scale"): Value("fp32", (), struct.pack("<f", 8)),
        ("scaler", "growth_tracker"): Value("int64", (), struct.pack("<q", 1)),
    }
    return {Key(3, LIVE, *name): value for name, value in values.items()}


def expected(checkpoint: str) -> Logical:
    return expected_written(live(), MODEL, flat=TorchStored().flattens(Scenario(checkpoint=checkpoint)))


def written(path: Path) -> Logical:
    logical, problems = assemble(read_checkpoint(path, 3, MODEL))
    assert problems == []
    return logical


@pytest.mark.parametrize("save", [FULL, DISTRIBUTED])
def test_written_state_is_what_the_oracle_expects(tmp_path: Path, save: type) -> None:
    assert written(save(samples.STATE, tmp_path / "c")) == expected("dcp")


@pytest.mark.parametrize("save", [FULL, DISTRIBUTED])
def test_an_application_object_around_it_changes_nothing(tmp_path: Path, save: type) -> None:
    assert written(save({"app": samples.STATE}, tmp_path / "c")) == expected("dcp-stateful")


@pytest.mark.parametrize("save", [FULL, DISTRIBUTED])
def test_flattened_optimizer_state_has_hyperparameters_by_parameter(tmp_path: Path, save: type) -> None:
    optim = {
        "state.a.weight.step": torch.tensor(2.0),
        "state.a.weight.exp_avg": torch.ones(3, 2, dtype=torch.bfloat16),
        "param_groups.a.weight.lr": 0.5,
        "param_groups.a.weight.betas": (0.9, 0.95),
        "param_groups.a.weight.nesterov": True,
        "param_groups.a.weight.foreach": None,
    }
    path = save({**samples.STATE, "optim": optim}, tmp_path / "c")
    assert written(path) == expected("full+cpu_offload+flatten")
    assert Key(3, WRITTEN, "hyperparameter", "a.weight.beta2") in written(path)
    assert Key(3, WRITTEN, "setting", "a.weight.foreach") in written(path)


def test_values_swapped_between_equal_parameters_are_seen(tmp_path: Path) -> None:
    """A writer and a loader that share a wrong index map agree with each other (NVIDIA/Megatron-LM issue 2777)."""
    state = {name: {"exp_avg": torch.full((4, 4), value)} for name, value in (("x", 1.0), ("y", 2.0))}
    swapped = {"x": state["y"], "y": state["x"]}
    right = written(samples.save_dcp({"optim": {"state": state}}, tmp_path / "right"))
    wrong = written(samples.save_dcp({"optim": {"state": swapped}}, tmp_path / "wrong"))
    found = diff(right, wrong)
    assert [(d.key.fqn, d.kind, d.mismatched) for d in found] == [("x", "bits", 16), ("y", "bits", 16)]


def test_a_folder_with_full_pt_is_that_file(tmp_path: Path) -> None:
    samples.save_full(samples.STATE, tmp_path / "full.pt")
    assert written(tmp_path) == expected("full")


def test_a_group_names_its_parameters_by_index_also_where_a_parameter_is_called_0(tmp_path: Path) -> None:
    optim = {"state": {"0": {"momentum_buffer": torch.ones(1)}}, "param_groups": [{"momentum": 0.5, "params": ["0"]}]}
    logical = written(samples.save_dcp({"optim": optim}, tmp_path / "c"))
    assert {(k.role, k.fqn) for k in logical} == {
        ("momentum", "0"),
        ("hyperparameter", "group0.momentum"),
        ("hyperparameter", "group0.params"),
        ("setting", "group0.momentum"),
    }


def test_a_learning_rate_tensor_is_a_number(tmp_path: Path) -> None:
    for save in (FULL, DISTRIBUTED):
        state = {"optim": {"param_groups": [{"lr": torch.tensor(0.5, dtype=torch.bfloat16)}]}}
        assert written(save(state, tmp_path / save.__name__)) == {
            Key(3, WRITTEN, "hyperparameter", "group0.lr"): fp64(0.5),
            Key(3, WRITTEN, "setting", "group0.lr"): text("tensor bfloat16 ()"),
        }


def test_every_key_of_a_group_is_read_with_its_type(tmp_path: Path) -> None:
    group = {"initial_lr": 0.5, "amsgrad": False, "foreach": None, "name": "tower"}
    for save in (FULL, DISTRIBUTED):
        logical = written(save({"optim": {"param_groups": [group]}}, tmp_path / save.__name__))
        assert {k.fqn.partition(".")[2]: v.data.decode() for k, v in logical.items() if k.role == "setting"} == {
            "initial_lr": "float 0.5", "amsgrad": "bool False", "foreach": "NoneType", "name": "str 'tower'",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"foreach": True}, "bits"), ({"lr": torch.tensor(0.5)}, "bits"), ({"maximize": False}, "extra")],
)
def test_a_key_of_a_group_that_was_written_otherwise_is_seen(tmp_path: Path, change: Any, kind: str) -> None:
    (group,) = samples.STATE["optim"]["param_groups"]
    optim = {**samples.STATE["optim"], "param_groups": [{**group, **change}]}
    found = diff(expected("dcp"), written(samples.save_dcp({**samples.STATE, "optim": optim}, tmp_path / "c")))
    assert [(d.key.role, d.key.fqn, d.kind) for d in found] == [("setting", f"group0.{next(iter(change))}", kind)]


def test_a_key_of_a_group_that_was_not_written_is_missing(tmp_path: Path) -> None:
    (group,) = samples.STATE["optim"]["param_groups"]
    kept = {key: value for key, value in group.items() if key != "foreach"}
    optim = {**samples.STATE["optim"], "param_groups": [kept]}
    found = diff(expected("dcp"), written(samples.save_dcp({**samples.STATE, "optim": optim}, tmp_path / "c")))
    assert [(d.key.fqn, d.kind) for d in found] == [("group0.foreach", "missing")]


def test_unknown_names_are_kept_so_that_they_show_as_extra(tmp_path: Path) -> None:
    state = {
        "model": {"ghost": torch.zeros(1)},
        "optim": {"state": {"a.weight": {"max_exp_avg_sq": torch.zeros(1), "step": 3, "momentum_buffer": None}}},
    }
    roles = {(k.role, k.fqn): v.dtype for k, v in written(samples.save_full(state, tmp_path / "c")).items()}
    assert roles == {("param", "ghost"): "fp32", ("max_exp_avg_sq", "a.weight"): "fp32", ("step", "a.weight"): "int64"}


def test_what_scripts_save_beside_tensors_is_read(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 1)
    counts = collections.Counter({3: 1})
    state = {
        "net": module.state_dict(),
        "p": module.bias,
        "s": torch.Size([2]),
        "d": torch.bfloat16,
        "m": counts,
    }
    rows = {row.key: (row.dtype, row.value) for row in samples.accept(samples.save_full(state, tmp_path / "c"))}
    assert rows == {
        "net.weight": ("fp32", ""),
        "net.bias": ("fp32", ""),
        "p": ("fp32", ""),
        "s": ("list", "[2]"),
        "d": ("str", "'torch.bfloat16'"),
        "m.3": ("int", "1"),
    }


def test_a_parameter_is_read_with_what_hangs_on_it(tmp_path: Path) -> None:
    """Megatron's parameters carry their gradient buffer as an attribute, which torch pickles with them."""
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
    parameter.main_grad = torch.ones(3, 2)  # type: ignore[attr-defined]
    path = FULL({"model": {"a.weight": parameter}}, tmp_path / "full.pt")
    (row,) = describe(path)
    assert (row.key, row.shape) == ("model.a.weight", (3, 2))


def test_chunks_keep_their_box_and_their_writer(tmp_path: Path) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    path = samples.write_chunks(
        tmp_path / "c", "model.w", whole, [((3, 0), (2, 2)), ((0, 0), (3, 2)), ((5, 0), (0, 2))]
    )
    records = read_checkpoint(path, 1, MODEL)
    assert [(r.rank, r.start, r.size) for r in records] == [
        (1, (0, 0), (3, 2)),
        (0, (3, 0), (2, 2)),
        (2, (5, 0), (0, 2)),
    ]
    logical, problems = assemble(records)
    assert problems == []
    assert logical == {Key(1, WRITTEN, "param", "w"): Value("fp32", (5, 2), whole.numpy().tobytes())}


@pytest.mark.parametrize(
    ("boxes", "coverage"),
    [
        ([((0, 0), (2, 2)), ((2, 0), (1, 2))], "ok"),
        ([((0, 0), (2, 2))], "gap"),
        ([((0, 0), (2, 2)), ((1, 0), (2, 2))], "overlap"),
        ([((0, 0), (1, 2)), ((2, 0), (1, 1)), ((1, 0), (1, 2)), ((2, 1), (1, 1))], "ok"),
        ([((0, 0), (2, 2)), ((1, 1), (2, 1))], "overlap"),
    ],
)
def test_coverage_is_described_by_describe_and_found_by_assembly(
    tmp_path: Path, boxes: list[tuple[tuple[int, int], tuple[int, int]]], coverage: str
) -> None:
    path = samples.write_chunks(tmp_path / "c", "model.w", torch.arange(6).reshape(3, 2), boxes)
    (row,) = describe(path)
    assert row.coverage == coverage
    assert bool(row.digest) == (coverage == "ok")
    _, problems = assemble(read_checkpoint(path, 1, MODEL))
    assert bool(problems) == (coverage != "ok")


def test_a_digest_is_that_of_the_whole_tensor_whatever_the_format(tmp_path: Path) -> None:
    whole = torch.arange(6).reshape(3, 2)
    split = samples.write_chunks(tmp_path / "c", "model.w", whole, [((0, 0), (3, 1)), ((0, 1), (3, 1))])
    full = samples.save_full({"model": {"w": whole.t().contiguous().t()}}, tmp_path / "f")
    assert describe(split)[0].digest == describe(full)[0].digest


def test_render_is_a_table_that_no_key_can_break(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(2, 3, dtype=torch.bool), "s": torch.tensor(1.0)}, "evil\x1b[2J\n": "x\x07" * 50}
    lines = render_description(samples.accept(samples.save_full(state, tmp_path / "c"))).split("\n")
    assert [line.split() for line in lines] == [
        ["key", "dtype", "shape", "chunks", "coverage", "sha256", "value"],
        ["evil\\x1b[2J\\n", "str", "1", "ok", digest(repr("x\x07" * 50).encode()), "'" + "x\\x07" * 7 + "x\\x…"],
        ["model.s", "fp32", "scalar", "1", "ok", digest(b"\0\0\x80?")],
        ["model.w", "bool", "2×3", "1", "ok", digest(bytes(6))],
        [],
    ]
    assert len({line.index("ok") for line in lines[1:-1]}) == 1


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def test_the_reader_does_not_import_torch(tmp_path: Path) -> None:
    path = samples.save_dcp(samples.STATE, tmp_path / "c")
    code = (
        "import sys; from pathlib import Path; from shardproof.readers.description import describe;"
        f"rows = describe(Path({str(path)!r})); assert rows and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@dataclass(frozen=True)
class Listed:
    """Pickles as the set of its members, which the pickle lists in this order."""

    members: list[int]

    def __reduce__(self) -> tuple[type, tuple[list[int]]]:
        return set, (self.members,)


def test_a_set_has_no_order() -> None:
    listed = [pickle.dumps(Listed(members), 2) for members in ([3, 1, 2], [2, 3, 1])]
    assert [decode(parse(data, "p"), "p") for data in listed] == [[1, 2, 3], [1, 2, 3]]
