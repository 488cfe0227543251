"""Any state, cut into pieces in any two ways, compares equal; one flipped bit in any piece is found, named and located.

*Verifies*: that, over random dtypes, shapes, bits and partitions, written as torch's distributed checkpoint writes them
(its metadata, `torch.save` of every piece); and over a file of torch.save. *Does not verify*: that meshes cut so:
tests/conformance/test_compared_checkpoints.py has real ones.
"""

from __future__ import annotations

import pickle
import random
import sys
import tempfile
from math import prod
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkpoint_samples as samples
from shardproof.compare.differences import Comparison
from shardproof.compare.progress import SilentProgress
from shardproof.compare.run import CompareRequest, compare

from tests.effort import examples

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
State = dict[str, torch.Tensor]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn]
Shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def of_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    raw = bytearray(random.Random(seed).randbytes(prod(shape) * dtype.itemsize))
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


@st.composite
def states(draw: st.DrawFn) -> State:
    names = draw(st.lists(st.sampled_from(["a", "b.weight", "c", "d"]), min_size=1, max_size=3, unique=True))
    return {name: of_bits(draw(st.sampled_from(DTYPES)), draw(Shapes), draw(st.integers(0, 1 << 30))) for name in names}


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Boxes:
    """Boxes that partition a tensor, by repeated guillotine cuts."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(1, size[dim]))
        boxes.append((start, (*size[:dim], cut, *size[dim + 1 :])))
        if cut < size[dim]:
            tail = (*start[:dim], start[dim] + cut, *start[dim + 1 :])
            boxes.append((tail, (*size[:dim], size[dim] - cut, *size[dim + 1 :])))
    return boxes


def write(path: Path, state: State, cut: dict[str, Boxes]) -> Path:
    """A distributed checkpoint; the i-th box of every tensor is rank i's."""
    path.mkdir()
    entries, storage, files = {}, {}, dict[int, bytes]()
    for name, tensor in state.items():
        chunks = []
        for rank, (start, size) in enumerate(cut[name]):
            piece = tensor[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].clone()
            payload, before = samples.saved(piece), files.get(rank, b"")
            files[rank] = before + payload
            chunks.append(samples.ChunkStorageMetadata(torch.Size(start), torch.Size(size)))
            storage[samples.MetadataIndex(name, start)] = _StorageInfo(f"__{rank}_0.distcp", len(before), len(payload))
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for rank, content in files.items():
        (path / f"__{rank}_0.distcp").write_bytes(content)
    metadata = Metadata(entries, {name: tuple(name.split(".")) for name in state}, storage)
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    return path


def compared(a: Path, b: Path) -> Comparison:
    return compare(CompareRequest(a, b, ()), SilentProgress())


@settings(max_examples=examples(25), deadline=None)
@given(states(), st.data())
def test_a_state_cut_in_two_ways_is_equal_and_a_flipped_bit_is_found(state: State, data: st.DataObject) -> None:
    first, second = ({name: data.draw(cuts(tuple(t.shape))) for name, t in state.items()} for _ in range(2))
    name = data.draw(st.sampled_from(sorted(state)))
    flat = data.draw(st.integers(0, state[name].numel() - 1))
    bit = data.draw(st.integers(0, state[name].dtype.itemsize * 8 - 1))
    changed = {key: tensor.clone() for key, tensor in state.items()}
    place = flat * state[name].dtype.itemsize + bit // 8
    changed[name].reshape(-1).view(torch.uint8)[place] ^= 1 << bit % 8
    with tempfile.TemporaryDirectory() as folder:
        a, b = write(Path(folder, "a"), state, first), write(Path(folder, "b"), state, second)
        full = samples.save_full(state, Path(folder, "full.pt"))
        assert compared(a, b).found == compared(b, full).found == ()
        (found,) = compared(a, write(Path(folder, "c"), changed, second)).found
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), state[name].shape))
    assert (found.name, found.kind, found.mismatched) == (name, "bits", 1)
    assert found.first_index == found.last_index == index
