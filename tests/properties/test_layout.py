"""Layout arithmetic: partitions of the index set, brute force, torch.chunk and torch's own DTensor offsets."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardproof.layout import Box, chunk, flat_index, inside, interval_boxes, multi_index, shard_box

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)
MESHES = st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 4))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(at, at + n) for at, n in zip(box.start, box.size, strict=True))))


def flat_cells(shape: tuple[int, ...], box: Box) -> np.ndarray:
    numbers = np.arange(prod(shape)).reshape(shape)
    return numbers[tuple(slice(at, at + n) for at, n in zip(box.start, box.size, strict=True))].reshape(-1)


@given(st.integers(0, 40), st.integers(1, 40))
def test_chunks_partition_a_dim_as_torch_does(size: int, parts: int) -> None:

    intervals = [chunk(size, parts, i) for i in range(parts)]
    assert [n for _, n in intervals if n] == [t.numel() for t in torch.arange(size).chunk(parts) if t.numel()]
    end = 0
    for start, n in intervals:
        assert start == end
        end += n
    assert end == size


def test_empty_chunks_start_at_the_end() -> None:
    assert [chunk(4, 3, i) for i in range(3)] == [(0, 2), (2, 2), (4, 0)]
    with pytest.raises(ValueError, match="allowed: 0 to 2"):
        chunk(4, 3, 3)


@given(SHAPES, MESHES, st.data())
def test_shards_partition_the_index_set(
    shape: tuple[int, ...], sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    tp_dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    seen: dict[tuple[int, ...], int] = {}
    for coordinate in product(*map(range, sizes)):
        box = shard_box(shape, sizes, coordinate, tp_dim)
        assert inside(shape, box)
        for cell in cells(box):
            seen[cell] = seen.get(cell, 0) + 1
    copies = sizes[0] * (sizes[2] if tp_dim is None else 1) * (1 if shape else sizes[1])
    assert seen == dict.fromkeys(product(*map(range, shape)), copies)


@given(SHAPES.filter(bool), MESHES, st.data())
def test_shards_agree_with_cutting_numpy_arrays(
    shape: tuple[int, ...], sizes: tuple[int, int, int], data: st.DataObject
) -> None:

    tp_dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    coordinate = tuple(data.draw(st.integers(0, n - 1)) for n in sizes)
    whole = torch.arange(prod(shape)).reshape(shape)

    def piece(tensor, parts, index, dim):  # type: ignore[no-untyped-def]
        chunks = tensor.chunk(parts, dim)
        return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)

    local = whole if tp_dim is None else piece(whole, sizes[2], coordinate[2], tp_dim)
    local = piece(local, sizes[1], coordinate[1], 0)
    box = shard_box(shape, sizes, coordinate, tp_dim)
    assert box.size == tuple(local.shape) or box.volume == local.numel() == 0
    assert flat_cells(shape, box).tolist() == local.reshape(-1).tolist()


@pytest.mark.real
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 3, 1), (1, 2, 2), (1, 4, 2), (2, 2, 2), (1, 3, 3)])
def test_shards_agree_with_dtensor_offsets(sizes: tuple[int, int, int]) -> None:
    """torch's private offset function, on every coordinate, for even and uneven sizes.

    FSDP2 cuts with `_StridedShard(split_factor=tp)` where tp shards dim 0 too. torch defines that only for
    shards of equal length, so uneven tp × dp pairs are checked against chunking alone (above).
    """

    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    shards = sizes[1] * sizes[2]
    for shape, tp_dim in [((n, m), dim) for n in range(1, 14) for m in (1, 3, 4) for dim in (None, 0, 1)]:
        if tp_dim == 0 and sizes[2] > 1 and shape[0] % shards:
            continue
        if tp_dim == 0 and sizes[2] > 1:
            placements = [Replicate(), _StridedShard(0, split_factor=sizes[2]), Shard(0)]
        else:
            placements = [Replicate(), Shard(0), Replicate() if tp_dim is None else Shard(tp_dim)]
        for coordinate in product(*map(range, sizes)):
            size, start = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
            assert shard_box(shape, sizes, coordinate, tp_dim) == (start, size)


@given(SHAPES, st.data())
def test_interval_boxes_cover_exactly_the_interval(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    length = data.draw(st.integers(0, prod(shape) - start))
    boxes = list(interval_boxes(shape, start, length))
    assert all(inside(shape, box) and box.volume for box in boxes)
    covered = [i for box in boxes for i in flat_cells(shape, box).tolist()]
    assert covered == list(range(start, start + length))
    with pytest.raises(ValueError, match="is not inside"):
        list(interval_boxes(shape, start, prod(shape) + 1))


@given(SHAPES, st.data())
def test_flat_and_multi_index_are_inverse(shape: tuple[int, ...], data: st.DataObject) -> None:
    flat = data.draw(st.integers(0, prod(shape) - 1))
    assert multi_index(shape, flat) == tuple(int(i) for i in np.unravel_index(flat, shape))
    assert flat_index(shape, multi_index(shape, flat)) == flat


@pytest.mark.parametrize(
    ("shape", "box", "expected"),
    [
        ((4,), Box((0,), (4,)), True),
        ((4,), Box((4,), (0,)), True),
        ((4,), Box((3,), (2,)), False),
        ((4,), Box((-1,), (2,)), False),
        ((4,), Box((), ()), False),
        ((), Box((), ()), True),
    ],
)
def test_inside(shape: tuple[int, ...], box: Box, expected: bool) -> None:
    assert inside(shape, box) is expected


def test_an_index_has_as_many_entries_as_the_shape_has_dims() -> None:
    with pytest.raises(ValueError, match="zip"):
        flat_index((2, 3), (1,))
    with pytest.raises(ValueError, match="zip"):
        flat_index((2, 3), (1, 2, 0))


@pytest.mark.parametrize(
    ("start", "length", "told"), [(-1, 2, r"\[-1, 1\)"), (3, -1, r"\[3, 2\)"), (5, 3, r"\[5, 8\)")]
)
def test_an_interval_that_leaves_the_tensor_is_told(start: int, length: int, told: str) -> None:
    with pytest.raises(ValueError, match=f"interval {told} is not inside a tensor of 6 elements"):
        list(interval_boxes((2, 3), start, length))


def test_an_empty_shard_starts_at_the_end_of_the_tensor_and_not_of_its_tensor_parallel_chunk() -> None:
    assert shard_box((4, 3), (1, 3, 2), (0, 2, 0), 0) == Box((4, 0), (0, 3))
