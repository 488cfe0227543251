"""Whatever torch writes comes back bit for bit; whatever happens to a file, the only exception is CheckpointError."""

from __future__ import annotations

import contextlib
import pickle
import random
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import torch
from checkpoint_samples import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Value
from shardproof.readers.checkpoint import read_checkpoint
from shardproof.readers.errors import CheckpointError
from shardproof.readers.pieces import ObjectPiece, TensorPiece, pieces
from shardproof.readers.symbolic import Mapping, parse

from tests.effort import examples

DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int64: "int64",
    torch.int32: "int32", torch.int16: "int16", torch.uint8: "uint8", torch.bool: "bool",
}  # fmt: skip

Shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def of_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, NaN payloads and negative zeros among them; a bool has only its two values."""
    generator = random.Random(seed)
    size = prod(shape) * dtype.itemsize
    raw = bytes(b & 1 for b in generator.randbytes(size)) if dtype is torch.bool else generator.randbytes(size)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor with any layout: whole, transposed, a strided slice of a larger one, or expanded."""
    whole = of_bits(draw(st.sampled_from(list(DTYPES))), draw(Shapes), draw(st.integers(0, 1 << 30)))
    match draw(st.sampled_from(["whole", "transposed", "slice", "expanded"])):
        case "transposed":
            return whole.permute(tuple(reversed(range(whole.dim()))))
        case "slice" if whole.dim():
            dim = draw(st.integers(0, whole.dim() - 1))
            start = draw(st.integers(0, whole.shape[dim]))
            return whole[(slice(None),) * dim + (slice(start, None, draw(st.integers(1, 2))),)]
        case "expanded":
            return whole.expand(draw(st.integers(0, 3)), *whole.shape)
        case _:
            return whole


Scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 500), 1 << 500) | st.floats(allow_nan=False) | st.text(max_size=5)
)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """A flat state of tensors and scalars in which some tensors are views of others' storage."""
    state: dict[str, Any] = {}
    for index, tensor in enumerate(draw(st.lists(tensors(), max_size=5))):
        state[f"t{index}"] = tensor
        if draw(st.booleans()) and tensor.dim() and tensor.shape[0]:
            state[f"t{index}.row"] = tensor[-1]
            state[f"t{index}.alias"] = tensor
    for index, value in enumerate(draw(st.lists(Scalars | st.lists(Scalars, max_size=3), max_size=3))):
        state[f"o{index}"] = value
    return state


def held(state: dict[str, Any]) -> dict[str, Any]:
    """What the reader must give for a flat state."""
    return {
        key: (DTYPES[value.dtype], tuple(value.shape), samples.raw(value)) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def found(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for piece in pieces(path):
        (key,) = piece.path
        match piece:
            case TensorPiece():
                assert (piece.start, piece.size) == ((0,) * len(piece.shape), piece.shape)
                result[str(key)] = piece.dtype, piece.shape, piece.data
            case ObjectPiece():
                result[str(key)] = piece.value
    return result


@settings(max_examples=examples(40), deadline=None)
@given(states())
def test_a_full_file_comes_back_bit_for_bit(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert found(samples.save_full(state, Path(folder, "c"))) == held(state)


@settings(max_examples=examples(10), deadline=None)
@given(states().filter(bool))
def test_a_distributed_checkpoint_comes_back_bit_for_bit(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = samples.save_dcp(state, Path(folder, "c"))
        assert found(path) == held(state)
        assert {row.key for row in samples.accept(path)} == set(state)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A tensor and boxes that partition it, by repeated guillotine cuts."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(1, size[dim]))
        tail_start = (*start[:dim], start[dim] + cut, *start[dim + 1 :])
        boxes.append((start, (*size[:dim], cut, *size[dim + 1 :])))
        if cut < size[dim]:
            boxes.append((tail_start, (*size[:dim], size[dim] - cut, *size[dim + 1 :])))
    return of_bits(draw(st.sampled_from(list(DTYPES))), shape, draw(st.integers(0, 1 << 30))), boxes


@settings(max_examples=examples(20), deadline=None)
@given(partitions())
def test_chunks_of_any_partition_assemble_to_the_tensor(
    case: tuple[torch.Tensor, list[tuple[tuple[int, ...], tuple[int, ...]]]],
) -> None:
    whole, boxes = case
    with tempfile.TemporaryDirectory() as folder:
        path = samples.write_chunks(Path(folder, "c"), "model.w", whole, boxes)
        (row,) = samples.accept(path)
        assert row.chunks == len(boxes)
        logical, problems = assemble(read_checkpoint(path, 0, MODEL))
    assert problems == []
    assert list(logical.values()) == [Value(DTYPES[whole.dtype], tuple(whole.shape), samples.raw(whole))]


Names = st.text(max_size=3)

Plain = st.recursive(
    Scalars | st.binary(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(Names, inner, max_size=3),
    max_leaves=10,
)


def plain(node: object) -> object:
    match node:
        case Mapping(pairs=pairs):
            return {plain(key): plain(value) for key, value in pairs}
        case list():
            return [plain(entry) for entry in node]
        case tuple():
            return tuple(plain(entry) for entry in node)
        case _:
            return node


@settings(max_examples=examples(80), deadline=None)
@given(Plain, st.sampled_from([3, 4]))
def test_plain_pickles_are_parsed_like_pickle_loads_them(value: object, protocol: int) -> None:
    assert repr(plain(parse(pickle.dumps(value, protocol), "test"))) == repr(value)


Damage = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "full"])
def test_damage_gives_an_error_or_sound_data(tmp_path: Path, file: str) -> None:
    samples.save_dcp(samples.STATE, tmp_path / "c")
    samples.save_full(samples.STATE, tmp_path / "full.bin")
    target = tmp_path / "full.bin" if file == "full" else tmp_path / "c" / file
    checkpoint = target if file == "full" else tmp_path / "c"
    intact = target.read_bytes()

    @settings(max_examples=examples(60), deadline=None)
    @given(Damage, st.booleans())
    def check(damage: list[tuple[float, int]], cut: bool) -> None:
        data = bytearray(intact)
        for where, value in damage:
            data[int(where * len(data))] = value
        target.write_bytes(data[: int(damage[0][0] * len(data))] if cut else data)
        with contextlib.suppress(CheckpointError):
            samples.accept(checkpoint)
            read_checkpoint(checkpoint, 0, MODEL)

    check()
