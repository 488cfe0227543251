"""The row buffers that parameters are sharded in: every row has one owner, ranges are equal, and cases by hand."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.layout import inside
from shardproof.mechanisms.row_buffers import buckets, core_buckets, cut, local_shapes, owned_box, place, rows
from shardproof.models import zoo
from shardproof.scenario import DTypePolicy, Mesh

ZOO = zoo()
MODELS = sorted(name for name in ZOO.keys() - {"gpt", "moe"} if ZOO[name].has_rows)
shapes = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes)
def test_tensors_never_overlap_and_ranges_cut_whole_rows(found: list[tuple[int, ...]]) -> None:
    wide_first = sorted(found, key=lambda shape: -prod(shape[1:]))
    at, end, grain = place(wide_first)
    taken = sorted((start, start + prod(wide_first[i])) for i, start in at.items())
    assert len(taken) == len(found)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
    assert taken[-1][1] <= -(-end // grain) * grain
    for index, start in at.items():
        row, numel = prod(wide_first[index][1:]), prod(wide_first[index])
        cuts = range(-(-start // grain) * grain, start + numel, grain)
        assert all((cut - start) % row == 0 for cut in cuts), (wide_first, index)


@given(st.sampled_from(MODELS), st.integers(1, 8), st.sampled_from([1, 2]), st.sampled_from(["fp32", "mixed"]))
def test_every_row_has_one_owner(model: str, parts: int, tp: int, storage: str) -> None:
    policy = DTypePolicy(storage)
    for tp_index in range(tp):
        owned = rows(model, policy, parts, tp, tp_index)
        local = local_shapes(model, tp, tp_index)
        assert owned.keys() == local.keys()
        for fqn, cuts in owned.items():
            assert len(cuts) == parts
            held = [row for first, count in cuts for row in range(first, first + count)]
            assert held == list(range(local[fqn][0])), fqn


@given(st.sampled_from(MODELS), st.sampled_from(["1x3x1", "2x2x1", "1x4x2", "1x1x1"]), st.booleans(), st.booleans())
def test_boxes_lie_inside(model: str, mesh: str, sharded: bool, outer: bool) -> None:
    parsed, policy = Mesh.parse(mesh), DTypePolicy()
    for rank in range(parsed.world):
        for named in ZOO[model].unique_params:
            box = owned_box(model, policy, parsed, rank, named.fqn, sharded=sharded, outer=outer)
            assert inside(named.spec.shape, box)


def test_replicas_share_the_range_of_their_shard() -> None:
    """13 rows over 2 × 2 ranks: 4, 4, 4, 1, the replicas of a shard beside each other."""
    mesh = Mesh(2, 2, 1)
    boxes = [owned_box("dense", DTypePolicy(), mesh, r, "norm.weight", sharded=True, outer=True) for r in range(4)]
    assert [(box.start, box.size) for box in boxes] == [((0,), (4,)), ((8,), (4,)), ((4,), (4,)), ((12,), (1,))]


def test_a_unit_is_laid_out_as_by_hand() -> None:
    """(3, 4) and (2, 2): ranges are multiples of 4 elements, and the second tensor is one such range."""
    at, end, grain = place([(3, 4), (2, 2), (3,)])
    assert (at, end, grain) == ({0: 0, 1: 12, 2: 16}, 19, 4)


def test_what_is_left_of_a_range_is_filled() -> None:
    """Rows of 3 and 2 make ranges of 6: 9 elements leave 3, which the last 2 of 8 end, and nothing else fits."""
    assert place([(3, 3), (4, 2), (2,)]) == ({0: 0, 1: 10, 2: 18}, 20, 6)
    assert place([(3, 3), (6, 2), (2,)]) == ({0: 0, 1: 12, 2: 9}, 24, 6)


def test_no_cut_goes_through_a_row() -> None:
    """(2, 5) and (2, 3) are smaller than a range of 15: the second would lie across the first cut."""
    assert place([(2, 5), (2, 3)]) == ({0: 0, 1: 15}, 21, 15)


def test_rows_of_dense_over_two_ranks() -> None:
    owned = rows("dense", DTypePolicy(), 2, 1, 0)
    assert owned["norm.weight"] == ((0, 7), (7, 6))
    assert owned["embed.weight"] == ((0, 8), (8, 4))  # 60 + 12 elements, padded to 80: 40 each
    assert owned["embed.bias"] == ((0, 0), (0, 12))


@pytest.mark.parametrize(("model", "count"), [("frozen_tower", 2), ("tied", 2), ("mixed_unit", 3), ("many", 12)])
def test_buckets_are_of_one_unit_dtype_and_trainability(model: str, count: int) -> None:
    assert len(buckets(ZOO[model], DTypePolicy("mixed"))) == count


@given(
    st.sampled_from(MODELS),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([None, 1, 48]),
    st.sampled_from(["", ".w"]),
)
def test_every_element_has_one_owner_under_megatron_core(
    model: str, parts: int, units: bool, size: int | None, experts: str
) -> None:
    spec, shapes = ZOO[model], local_shapes(model, 1, 0)
    found = core_buckets(spec, DTypePolicy("mixed"), shapes, units=units, size=size, experts=experts, prefix="module.")
    assert sorted(fqn for bucket in found for fqn in bucket) == sorted(shapes)
    for bucket in found:
        for fqn, cuts in cut(bucket, shapes, parts).items():
            held = [element for start, count in cuts for element in range(start, start + count)]
            assert held == list(range(prod(shapes[fqn]))), fqn


def test_a_bucket_of_megatron_core_ends_when_it_is_large_enough() -> None:
    """12 × 5 elements are enough for a bucket; 12, 16 × 7 are; 16, 7 × 16 are; 7 and 13 are what is left."""
    spec, shapes = ZOO["dense"], local_shapes("dense", 1, 0)
    found = core_buckets(spec, DTypePolicy(), shapes, units=False, size=48, experts=".experts.", prefix="")
    assert [len(bucket) for bucket in found] == [1, 2, 2, 2]
    whole = core_buckets(spec, DTypePolicy(), shapes, units=False, size=None, experts=".experts.", prefix="")
    assert [len(bucket) for bucket in whole] == [7]


@pytest.mark.parametrize(
    ("experts", "prefix", "count"), [(".experts.", "module.", 2), (".experts.", "", 1), ("", "module.", 1)]
)
def test_experts_have_a_bucket_of_their_own_where_their_names_tell_them(experts: str, prefix: str, count: int) -> None:
    """An fp32 model has no Float16Module around it, and so no word before `experts`."""
    shapes = local_shapes("experts", 1, 0)
    found = core_buckets(ZOO["experts"], DTypePolicy(), shapes, units=False, size=None, experts=experts, prefix=prefix)
    assert len(found) == count
