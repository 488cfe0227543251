"""`shardproof diff` on sound checkpoints that torch wrote: what is equal, what differs, and the sentence about it.

*Verifies*: every kind of difference and every explanation on the smallest state that has it; formats against each
other.
*Does not verify*: checkpoints that libraries write (tests/conformance/test_compared_checkpoints.py does).
"""

from __future__ import annotations

import copy
import io
import json
import re
import struct
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import torch
from shardproof.cli.main import entry
from shardproof.compare.differences import Comparison, EntryDifference
from shardproof.compare.page import MOST, page_of
from shardproof.compare.pickles import OpenDecoder
from shardproof.compare.progress import SilentProgress, progress_on
from shardproof.compare.renames import parse_rename
from shardproof.compare.run import CompareRequest, compare
from shardproof.compare.text import FIRST, render
from shardproof.readers.symbolic import Mapping

State = dict[str, Any]


def compared(a: Path, b: Path, renames: Sequence[str] = (), only: Sequence[str] = ()) -> Comparison:
    request = CompareRequest(a, b, (), [parse_rename(text) for text in renames], [re.compile(text) for text in only])
    return compare(request, SilentProgress())


def of_states(folder: Path, a: State, b: State) -> Comparison:
    return compared(samples.save_full(a, folder / "a.pt"), samples.save_full(b, folder / "b.pt"))


def only_found(folder: Path, a: torch.Tensor, b: torch.Tensor) -> EntryDifference:
    (found,) = of_states(folder, {"w": a}, {"w": b}).found
    return found


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_safetensors(path: Path, state: dict[str, torch.Tensor], starts: dict[str, list[int]] | None = None) -> Path:
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.uint16: "U16"}
    header: State = {}
    body = b""
    for name, tensor in state.items():
        data = samples.raw(tensor)
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    if starts is not None:
        places = {name: {"saved_offsets": start} for name, start in starts.items()}
        header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(places)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


# Equal


def test_one_state_in_every_format_is_equal(tmp_path: Path) -> None:
    old = tmp_path / "old.pt"
    torch.save(samples.STATE, old, _use_new_zipfile_serialization=False)
    paths = [
        samples.save_dcp(samples.STATE, tmp_path / "dcp"),
        samples.save_full(samples.STATE, tmp_path / "f.pt"),
        old,
    ]
    for a in paths:
        for b in paths:
            found = compared(a, b)
            assert found.found == ()
            assert found.elements == 6 + 1 + 1 + 6


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", ["quantised", "of channels", "typed", "untyped"])
@pytest.mark.filterwarnings("ignore:torch.quantize_per|TypedStorage is deprecated")
def test_a_storage_is_compared_wherever_it_lies(tmp_path: Path, kind: str, zipped: bool) -> None:
    """Also one that no tensor of a known kind shows."""

    def made(last: float) -> object:
        tensor = torch.tensor([[1.0, 2.0], [3.0, last]])
        match kind:
            case "quantised":
                return torch.quantize_per_tensor(tensor, 0.5, 0, torch.qint8)
            case "of channels":
                return torch.quantize_per_channel(tensor, torch.ones(2), torch.zeros(2), 0, torch.quint8)
            case "typed":
                return tensor.storage()
        return tensor.untyped_storage()

    for name, last in {"a": 4.0, "b": 5.0, "again": 4.0}.items():
        torch.save({"x": made(last)}, tmp_path / name, _use_new_zipfile_serialization=zipped)
    assert compared(tmp_path / "a", tmp_path / "again").equal
    assert [one.kind for one in compared(tmp_path / "a", tmp_path / "b").found] == ["bits"]


def test_safetensors_compare_with_what_torch_wrote(tmp_path: Path) -> None:
    state = {"a": numbers(3, 4), "b": numbers(2, dtype=torch.bfloat16), "c": torch.zeros(0, 3)}
    a = write_safetensors(tmp_path / "a.safetensors", state)
    assert compared(a, samples.save_full(state, tmp_path / "b.pt")).equal
    assert compared(a, samples.save_dcp({"model": state}, tmp_path / "c"), ["^model[.]="]).equal


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint16", "int8", "complex64", "complex128", "bool"])
def test_every_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    tensor = torch.arange(1, 7).reshape(2, 3).to(getattr(torch, dtype))
    other = tensor.clone()
    other[1, 2] = 0
    assert of_states(tmp_path, {"w": tensor}, {"w": tensor}).equal
    found = only_found(tmp_path, tensor, other)
    assert (found.kind, found.mismatched, found.first_index) == ("bits", 1, (1, 2))


def test_shards_of_two_cuts_are_put_together(tmp_path: Path) -> None:
    whole = numbers(4, 6)
    rows = [((0, 0), (1, 6)), ((1, 0), (3, 6))]
    blocks = [((i, j), (2, 2)) for i in (0, 2) for j in (0, 2, 4)]
    a = samples.write_chunks(tmp_path / "a", "model.w", whole, rows)
    b = samples.write_chunks(tmp_path / "b", "model.w", whole, blocks)
    assert compared(a, b).equal
    changed = whole.clone()
    changed[3, 5] += 1
    (found,) = compared(a, samples.write_chunks(tmp_path / "c", "model.w", changed, blocks)).found
    assert (found.first_index, found.mismatched, found.pieces_a, found.pieces_b) == ((3, 5), 1, 2, 6)


@pytest.mark.parametrize("view", ["transposed", "strided", "expanded", "shared"])
def test_a_view_of_a_storage_is_what_it_shows(tmp_path: Path, view: str) -> None:
    base = numbers(6, 8)
    tensor = {"transposed": base.t(), "strided": base[1::2, ::3], "expanded": base[0].expand(5, 8), "shared": base[2:]}
    assert of_states(tmp_path, {"x": base, "w": tensor[view]}, {"x": base, "w": tensor[view].clone()}).equal


COMPLEX = torch.complex(numbers(3, 4), numbers(3, 4, seed=2))
BITS: dict[str, torch.Tensor] = {
    "conjugate": COMPLEX.conj(),
    "conjugate of doubles": COMPLEX.to(torch.complex128).conj(),
    "transposed conjugate": COMPLEX.mH,
    "scalar conjugate": COMPLEX[0, 0].conj(),
    "negative": torch._neg_view(numbers(3, 4)),
    "negative in bf16": torch._neg_view(numbers(3, 4, dtype=torch.bfloat16)),
    "imaginary part of a conjugate": COMPLEX.conj().imag,
    "negative conjugate": torch._neg_view(COMPLEX.conj()),
    "negative integers": torch._neg_view(torch.arange(-2, 4)),
    "negative not-a-number and zero": torch._neg_view(torch.tensor([float("nan"), 0.0, -1.0])),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", BITS)
def test_a_tensor_with_a_bit_of_its_own_is_what_it_shows(tmp_path: Path, kind: str, zipped: bool) -> None:
    """Which torch keeps beside a storage that does not change."""
    lazy = BITS[kind]
    shown = lazy.resolve_conj().resolve_neg()
    assert lazy.is_conj() or lazy.is_neg()
    for name, tensor in {"lazy": lazy, "shown": shown, "other": shown + 1}.items():
        torch.save({"w": tensor, "x": numbers(2)}, tmp_path / name, _use_new_zipfile_serialization=zipped)
    assert compared(tmp_path / "lazy", tmp_path / "shown").equal
    assert not compared(tmp_path / "lazy", tmp_path / "other").equal


@pytest.mark.parametrize("flags", ["wrong", {"neg": 1}, {"other": True}])
def test_bits_that_nobody_knows_are_refused(flags: object) -> None:
    assert OpenDecoder("it", set()).flags(Mapping(list(flags.items())) if isinstance(flags, dict) else flags) is None


def test_sharded_safetensors_with_an_index_and_with_offsets(tmp_path: Path) -> None:
    state = {"a": numbers(4, 3), "b": numbers(5)}
    one = write_safetensors(tmp_path / "one.safetensors", state)
    indexed, shards = tmp_path / "indexed", tmp_path / "shards"
    indexed.mkdir()
    shards.mkdir()
    for name, tensor in state.items():
        write_safetensors(indexed / f"m-{name}.safetensors", {name: tensor})
    names = {"weight_map": {name: f"m-{name}.safetensors" for name in state}}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(names))
    top, rest = {"a": state["a"][:1], "b": state["b"]}, {"a": state["a"][1:]}
    write_safetensors(shards / "shard-00001-model-00001-of-00001.safetensors", top, {"a": [0, 0], "b": [0]})
    write_safetensors(shards / "shard-00002-model-00001-of-00001.safetensors", rest, {"a": [1, 0]})
    assert compared(one, indexed).equal
    assert compared(one, shards).equal


def test_a_folder_of_several_checkpoints_is_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_safetensors((tmp_path / name / "model").mkdir(parents=True) or tmp_path / name / "model/m.safetensors",
                          {"w": numbers(3)})  # fmt: skip
        samples.save_dcp({"state": {"w": {"exp_avg": numbers(3, seed=len(name))}}}, tmp_path / name / "optim")
        (tmp_path / name / "config.json").write_text("{}")
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.equal
    assert dict(found.compared) == {"param": 1, "exp_avg": 1}


# Different


def test_a_folder_and_a_file_of_one_name_are_told_apart_by_the_suffix(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        samples.save_dcp({"w": BASE}, tmp_path / side / "before")
        samples.save_full({"w": BASE + (side == "b")}, tmp_path / side / "before.pt")
        samples.save_full({"w": BASE}, tmp_path / side / "after.pt")
    found = compared(tmp_path / "a", tmp_path / "b")
    assert ([one.name for one in found.found], sum(found.compared.values())) == (["before.pt.w"], 3)


def test_zeros_of_two_signs_and_payloads_of_nan_differ(tmp_path: Path) -> None:
    zero = only_found(tmp_path, torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (zero.mismatched, zero.max_ulp, zero.mechanism) == (1, 0, "sign")
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    nan = only_found(tmp_path, quiet, other)
    assert (nan.nan, nan.max_ulp, nan.mechanism) == (1, None, "nan_payload")
    assert nan.first_b == "nan (0x7fc00001)"


def test_a_flipped_bit_is_named_and_located(tmp_path: Path) -> None:
    tensor = numbers(5, 7)
    other = tensor.clone()
    other.view(torch.int32)[4, 2] ^= 1 << 20
    found = only_found(tmp_path, tensor, other)
    assert (found.first_index, found.last_index, found.mismatched) == ((4, 2), (4, 2), 1)
    assert found.explanation == "Where they differ, bit 20 is flipped."
    assert found.max_ulp == 1 << 20


BASE = numbers(8, 6)


def test_a_flipped_bit_of_the_exponent_is_a_factor_that_no_fraction_of_doubles_says(tmp_path: Path) -> None:
    number = torch.tensor([1.1585954e167], dtype=torch.float64)
    flipped = (number.view(torch.int64) ^ (1 << 62)).view(torch.float64)
    assert only_found(tmp_path, number, flipped).kind == "bits"
    assert only_found(tmp_path, flipped, number).kind == "bits"


def moved(tensor: torch.Tensor, by: int, start: int) -> torch.Tensor:
    flat = tensor.clone().reshape(-1)
    flat[start:] = tensor.reshape(-1)[start - by : len(flat) - by]
    return flat.reshape(tensor.shape)


ANOTHER_ORDER = "B has A's slices along dim {} in another order: {}."
EXPLAINED: dict[str, tuple[torch.Tensor, torch.Tensor, str, str]] = {
    "rounded": (BASE, BASE.bfloat16().float(), "narrowed", "B is A rounded to bf16."),
    "was rounded": (BASE.half().float(), BASE, "narrowed", "A is B rounded to fp16."),
    "quarter": (BASE, BASE / 4, "scaled", "B is A times 1/4 (0.25)."),
    "third": (BASE, BASE / 3, "scaled", "B is A times 1/3 (0.333333)."),
    "scaled up": (BASE, BASE * 65536, "scaled", "B is A times 65536."),
    "tiny": (BASE, BASE * 2**-30, "scaled", "B is A times 1/1073741824 (9.31323e-10)."),
    "constant": (torch.ones(8, 6), torch.full((8, 6), 2.0), "scaled", "B is A times 2."),
    "constant third": (torch.full((8, 6), 9.0), torch.full((8, 6), 3.0), "scaled", "B is A times 1/3 (0.333333)."),
    "other constant": (torch.full((8, 6), 0.3), torch.full((8, 6), 0.7), "", ""),
    "other integer": (torch.full((8, 6), 1), torch.full((8, 6), 2), "", ""),
    "one bit of a constant": (torch.ones(8, 6), torch.full((8, 6), 0.5), "bit_flip", "Bit 23 is flipped."),
    "one bit of several": (BASE.abs() % 1 + 1, (BASE.abs() % 1 + 1) / 2, "scaled", "B is A times 1/2 (0.5)."),
    "sign": (BASE, -BASE, "sign", "The signs are opposite."),
    "zeros": (BASE, torch.zeros(8, 6), "zeroed", "B is zero and A is not."),
    "nan": (BASE, BASE * float("nan"), "nan", "B is NaN and A is a number."),
    "rows": (BASE, BASE.roll(4, 0), "permuted", ANOTHER_ORDER.format(0, "4 to 7, then 0 to 3")),
    "columns": (BASE, BASE.roll(2, 1), "permuted", ANOTHER_ORDER.format(1, "4 to 5, then 0 to 3")),
    "reverse": (BASE, BASE.flip(0), "permuted", ANOTHER_ORDER.format(0, "the 8 chunks in reverse")),
    "along": (
        BASE,
        moved(BASE, 3, 10),
        "shifted",
        "From element 13 on, B has A's elements 3 places later; the 3 before are others.",
    ),
    "dims": (BASE, BASE.t().reshape(8, 6), "transposed", "B has A's elements with dims 0 and 1 exchanged."),
    "half": (BASE, BASE.half(), "cast", "B is A rounded to fp16."),
    "widened": (BASE.half(), BASE.half().float(), "cast", "The numbers are equal: fp32 holds each of A's exactly."),
    "transposed": (BASE, BASE.t().contiguous(), "transposed", "B is A transposed."),
    "flat": (BASE, BASE.reshape(-1), "reshaped", "Both have the same elements in the same order, under another shape."),
    "padded": (
        BASE,
        torch.cat([BASE, torch.zeros(2, 6)]),
        "padded",
        "B begins with all of A and has 2 more along dim 0, and they are zero.",
    ),
}


@pytest.mark.parametrize("what", EXPLAINED)
def test_a_mechanism_is_told_in_a_sentence(tmp_path: Path, what: str) -> None:
    a, b, mechanism, sentence = EXPLAINED[what]
    found = only_found(tmp_path, a, b)
    assert (found.mechanism, found.explanation) == (mechanism, sentence)


def test_what_nothing_explains_stays_unexplained(tmp_path: Path) -> None:
    found = only_found(tmp_path, numbers(8, 6), numbers(8, 6, seed=2))
    assert (found.mechanism, found.explanation, found.mismatched) == ("", "", 48)
    assert sum(count for _, count in found.ulp_histogram) == 48


def test_swapped_copied_and_renamed_tensors_are_named(tmp_path: Path) -> None:
    a = {name: numbers(4, 4, seed=seed) for seed, name in enumerate(["x", "y", "z", "old"])}
    b = {"x": a["y"], "y": a["x"], "z": a["x"], "new": a["old"]}
    found = {one.name: (one.mechanism, one.explanation) for one in of_states(tmp_path, a, b).found}
    assert found == {
        "x": ("swapped", "A's x and y are exchanged in B."),
        "y": ("swapped", "A's y and x are exchanged in B."),
        "z": ("other_tensor", "B has here what A has under x."),
        "new": ("renamed", "A has it as old."),
        "old": ("renamed", "B has it as new."),
    }


def test_tensors_of_zeros_are_not_taken_for_each_other(tmp_path: Path) -> None:
    a = {"x": torch.zeros(4), "y": numbers(4)}
    assert [one.mechanism for one in of_states(tmp_path, a, {"x": numbers(4, seed=5), "y": torch.zeros(4)}).found] == [
        "zeroed", "zeroed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b"), [(1, 1.0), (1, True), (0.0, -0.0), ("a", b"a"), ([1], [1, 2]), (None, 0), ({"k": 1}, {"k": 2})]
)
def test_plain_values_are_equal_only_if_they_are_the_same(tmp_path: Path, a: object, b: object) -> None:
    w = {"w": torch.ones(1)}
    assert of_states(tmp_path, {**w, "v": a}, {**w, "v": a}).equal
    assert [one.kind for one in of_states(tmp_path, {**w, "v": a}, {**w, "v": b}).found] == ["value"]


def test_a_tensor_against_a_number_is_a_difference_of_kind(tmp_path: Path) -> None:
    found = of_states(tmp_path, {"w": torch.ones(1), "s": torch.tensor(3.0)}, {"w": torch.ones(1), "s": 3.0}).found
    assert [(one.kind, one.a, one.b) for one in found] == [("kind", "fp32 scalar", "3.0 (float)")]


def test_gaps_and_overlaps_are_differences_even_if_both_have_them(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(3, 2)
    sound = samples.write_chunks(tmp_path / "s", "w", whole, [((0, 0), (3, 2))])
    gap = samples.write_chunks(tmp_path / "g", "w", whole, [((0, 0), (2, 2))])
    overlap = samples.write_chunks(tmp_path / "o", "w", whole, [((0, 0), (2, 2)), ((1, 0), (2, 2))])
    for a, b, kind, detail in (
        (sound, gap, "gap", "in B, 2 of 6 elements are in no piece"),
        (overlap, sound, "overlap", "in A, the pieces [0:2, 0:2] and [1:3, 0:2] share elements"),
        (gap, gap, "gap", "in A, 2 of 6 elements are in no piece; in B, 2 of 6 elements are in no piece"),
    ):
        (found,) = compared(a, b).found
        assert (found.kind, found.detail) == (kind, detail)


def test_differences_are_counted_by_role(tmp_path: Path) -> None:
    other = copy.deepcopy(samples.STATE)
    other["optim"]["state"]["a.weight"]["exp_avg"][0, 0] = 9
    other["optim"]["param_groups"][0]["lr"] = 0.25
    found = of_states(tmp_path, samples.STATE, other)
    assert found.counts()["exp_avg"] == {"compared": 1, "equal": 0, "bits": 1}
    assert found.counts()["hyperparameter"]["value"] == 1
    assert found.counts()["param"] == {"compared": 2, "equal": 2}


def test_objects_of_any_class_are_compared_as_text_and_named(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "args": Namespace(lr=0.1, names=set("abcdefgh"))}
    found = of_states(tmp_path, state, {**state, "args": Namespace(lr=0.2, names=set("hgfedcba"))})
    assert [one.name for one in found.found] == ["args.state.lr"]
    assert found.a.foreign == ("argparse.Namespace",)


# The page


def test_a_page_shows_each_difference_with_both_sides(tmp_path: Path) -> None:
    a, b, _ = files(tmp_path)
    page = tmp_path / "o.html"
    assert entry(["diff", a, b, "--html", str(page)]) == 1
    text = page.read_text("utf-8")
    for needed in ("1 of 1 name that both have differ", "model.w", "other bits", "fp32 8×6", "Written by shardproof"):
        assert needed in text, needed
    assert entry(["diff", a, b, "--html", str(page)]) == 1  # over its own page
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    assert entry(["diff", a, b, "--html", str(tmp_path / "mine.html")]) == 2


def test_a_page_of_many_differences_is_bounded(tmp_path: Path) -> None:
    a = {f"t{i:04}": torch.ones(1) for i in range(MOST + 5)}
    text = page_of(of_states(tmp_path, a, {name: tensor + 1 for name, tensor in a.items()}))
    assert text.count("<details") == MOST
    assert "… and 5 more" in text


# The command


def files(folder: Path) -> tuple[str, str, str]:
    samples.save_full({"model": {"w": BASE}}, folder / "a.pt")
    samples.save_full({"model": {"w": BASE + 1}}, folder / "b.pt")
    samples.save_full({"module": {"w": BASE}, "other": {"v": BASE}}, folder / "c.pt")
    return str(folder / "a.pt"), str(folder / "b.pt"), str(folder / "c.pt")


def test_exit_status_and_output_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = files(tmp_path)
    assert entry(["diff", a, a]) == 0
    assert "equal: 1 name, 48 elements, bit for bit" in capsys.readouterr().out
    assert entry(["diff", a, b, "--json", str(tmp_path / "o.json")]) == 1
    assert "different: 1 of 1 name that both have differ" in capsys.readouterr().out
    document = json.loads((tmp_path / "o.json").read_text())
    assert (document["equal"], [one["name"] for one in document["differences"]]) == (False, ["model.w"])
    assert entry(["diff", a, str(tmp_path / "nothing")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "an existing directory or file" in output.err
    assert entry(["diff", a, c, "--rename", "^module=model", "--only", "^model[.]"]) == 0
    assert entry(["diff", a, c]) == 1
    assert "--rename '^model[.]='" not in capsys.readouterr().out.split("hint")[0]


def test_the_pattern_of_the_help_takes_weights_alone_and_the_rest_is_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry(["diff", "--help"]) == 0
    (pattern,) = re.findall("--only '(.*)'", capsys.readouterr().out)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moments = {
        f"l.{name}": state for (name, _), state in zip(model.named_parameters(), optimizer.state.values(), strict=True)
    }
    groups = optimizer.state_dict()["param_groups"]
    state = {"model": {"l": model.state_dict()}, "optim": {"state": moments, "param_groups": groups}}
    a = samples.save_full(state, tmp_path / "a.pt")
    b = samples.save_full({**state, "epoch": 1}, tmp_path / "b.pt")
    found = compared(a, b, only=[pattern])
    assert (found.equal, found.compared) == (True, {"param": 1})
    entries = sum(compared(a, b).compared.values()) + 1
    assert found.left_out == entries - 1
    assert f"left out by --only: {entries - 1} names" in render(found)


def test_names_without_a_common_one_give_a_hint(tmp_path: Path) -> None:
    a = samples.save_full({"model": {"x": BASE, "y": BASE}}, tmp_path / "a.pt")
    b = samples.save_full({"x": BASE, "y": BASE}, tmp_path / "b.pt")
    found = compared(a, b)
    assert len(found.found) == 4
    assert found.hint.endswith("2 of A's are on the other one without 'model': --rename '^model[.]='")
    assert compared(a, b, ["^model[.]="]).equal


@pytest.mark.parametrize(
    ("of_a", "rename"),
    [
        ({"optimizer": {"fp32": BASE, "exp_avg": BASE}}, r"^optimizer[.](.*)[.]fp32$=\1"),
        ({"": {"fp32": BASE, "exp_avg": BASE}}, "[.]fp32$="),
        ({"module": {"": BASE.half()}, "optimizer": {"fp32": BASE}}, r"^optimizer[.](.*)[.]fp32$=\1"),
        ({"module": {"": BASE}, "optimizer": {"fp32": BASE}}, "^module[.]="),
    ],
)
def test_a_hint_takes_what_stands_around_names_of_tensors(
    tmp_path: Path, of_a: dict[str, dict[str, torch.Tensor]], rename: str
) -> None:
    """As in DeepSpeed's folder and its export; shapes that lie beside are no tensors."""
    state: State = {f"param_shapes.0.{name}": (8, 6) for name in ("up.weight", "down.weight")}
    for prefix, parts in of_a.items():
        for suffix, tensor in parts.items():
            for name in ("up.weight", "down.weight"):
                state[".".join(filter(None, (prefix, name, suffix)))] = tensor.clone()
    a = samples.save_full(state, tmp_path / "a.pt")
    b = samples.save_full({"up.weight": BASE, "down.weight": BASE}, tmp_path / "b.pt")
    for one, other, side in ((a, b, "A"), (b, a, "B")):
        hint = compared(one, other).hint
        assert hint.startswith(f"no tensor's name is on both sides; 2 of {side}'s are on the other one without ")
        assert hint.endswith(f": --rename '{rename}'")
    assert compared(a, b, [rename], ["^(up|down)[.]weight$"]).equal


@pytest.mark.parametrize(
    "words", [["--rename", "x"], ["--rename", "(=y"], ["--rename", r"x=\1"], ["--only", "["], ["--only", "nothing"]]
)
def test_bad_options_are_refused(tmp_path: Path, words: list[str]) -> None:
    a, _, _ = files(tmp_path)
    assert entry(["diff", a, a, *words]) == 2


def test_names_that_are_made_equal_are_refused(tmp_path: Path) -> None:
    samples.save_full({"x": BASE, "y": BASE}, tmp_path / "a.pt")
    assert entry(["diff", str(tmp_path / "a.pt"), str(tmp_path / "a.pt"), "--rename", "[xy]=z"]) == 2


def test_the_text_is_bounded_and_whole_with_all(tmp_path: Path) -> None:
    a = {f"t{i:03}": torch.ones(1) for i in range(100)}
    found = of_states(tmp_path, a, {name: tensor + 1 for name, tensor in a.items()})
    assert render(found).count("other bits\n") == FIRST + 1
    assert f"… and {100 - FIRST} more: --all shows them" in render(found)
    assert render(found, everything=True).count("(tensor): other bits") == 100


def test_names_cannot_forge_lines_or_move_the_cursor(tmp_path: Path) -> None:
    found = of_states(tmp_path, {"w": BASE, "x\nequal: all\x1b[2J": BASE}, {"w": BASE})
    text = render(found)
    assert "\x1b" not in text
    assert "\nequal" not in text


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    a, b, _ = files(tmp_path)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        with progress_on(stream) as progress:
            compare(CompareRequest(Path(a), Path(b), ()), progress)
        assert ("comparing" in stream.getvalue()) is shown


def test_an_interruption_ends_it_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: SilentProgress, what: str, total_bytes: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SilentProgress, "phase", interrupted)
    a, b, _ = files(tmp_path)
    assert entry(["diff", a, b, "--json", str(tmp_path / "o.json")]) == 130
    output = capsys.readouterr()
    assert (output.out, "Traceback" in output.err) == ("", False)
    assert not (tmp_path / "o.json").exists()


def with_safetensors(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", {"w": torch.arange(6.0)})


def with_an_index(folder: Path) -> None:
    write_safetensors(folder / "shard.safetensors", {"w": torch.arange(6.0)})
    index = {"metadata": {}, "weight_map": {"w": "shard.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def distributed(folder: Path) -> None:
    samples.save_dcp({"w": torch.arange(6.0)}, folder)


def pair_with_a_moment(folder: Path, make: Callable[[Path], None], where: str) -> tuple[Path, Path]:
    """Two folders in a known format, and beside it a file whose tensor differs."""
    for name, moment in (("a", torch.zeros(6)), ("b", torch.ones(6))):
        (folder / name / where).parent.mkdir(parents=True)
        make(folder / name)
        if where.endswith(".safetensors"):
            write_safetensors(folder / name / where, {"moment": moment})
        else:
            samples.save_full({"moment": moment}, folder / name / where)
    return folder / "a", folder / "b"


@pytest.mark.parametrize(
    ("make", "where", "name"),
    [
        (with_safetensors, "optimizer.bin", "optimizer.moment"),
        (with_safetensors, "optim/rank0.pt", "optim.rank0.moment"),
        (with_an_index, "optimizer.safetensors", "optimizer.moment"),
        (distributed, "optimizer.pt", "optimizer.moment"),
    ],
)
def test_what_lies_beside_the_format_of_two_folders_is_compared(
    tmp_path: Path, make: Callable[[Path], None], where: str, name: str
) -> None:
    a, b = pair_with_a_moment(tmp_path, make, where)
    assert [one.name for one in compared(a, b).found] == [name]
    assert compared(a, b, only=["^w$"]).equal


def test_a_file_is_compared_with_the_format_of_a_folder_alone(tmp_path: Path) -> None:
    a, _ = pair_with_a_moment(tmp_path, with_safetensors, "optimizer.bin")
    assert compared(a, a / "model.safetensors").equal


def test_a_file_beside_a_format_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    a, b = pair_with_a_moment(tmp_path, with_safetensors, "optimizer.bin")
    for folder, text in ((a, "some words"), (b, "others")):
        (folder / "optimizer.bin").write_text(text)
    assert compared(a, b).equal
