"""Flat buffers, buckets, padding and shards: every element has one owner, in the order the libraries use."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardproof.models import ZOO
from shardproof.probe import element_keys
from shardproof.reference.placement import Catalogue, FlatLayout, Piece, chunk, lay_out, pieces, runs
from shardproof.scenario import Mesh


@given(size=st.integers(1, 40), parts=st.integers(1, 12))
def test_chunk_is_torch_chunk(size: int, parts: int) -> None:
    expected = [len(part) for part in torch.arange(size).chunk(parts)]
    ours = [chunk(size, parts, index) for index in range(parts)]
    assert [length for _, length in ours if length] == expected
    assert [start for start, length in ours if length] == [sum(expected[:i]) for i in range(len(expected))]


def layouts(model: str, mesh: Mesh, zero1: bool) -> tuple[Catalogue, list[FlatLayout]]:
    catalogue = Catalogue(ZOO[model], seed=0)
    return catalogue, [lay_out(catalogue, tuple(catalogue.names), mesh, tp, zero1) for tp in range(mesh.tp)]


@pytest.mark.parametrize("model", ZOO)
def test_keys_are_those_of_the_probe(model: str) -> None:
    keys = Catalogue(ZOO[model], seed=7).keys
    assert list(keys) == [p.fqn for p in ZOO[model].params]
    for param in ZOO[model].params:
        assert np.array_equal(keys[param.fqn], element_keys(param.fqn, param.spec.shape, 7))


CELLS = [(m, mesh, z) for m in ZOO for mesh in ("1x1x1", "1x3x1", "2x2x2", "1x8x1", "1x1x3") for z in (True, False)]


@pytest.mark.parametrize(("model", "mesh", "zero1"), CELLS)
def test_every_element_has_one_owner(model: str, mesh: str, zero1: bool) -> None:
    catalogue, columns = layouts(model, Mesh.parse(mesh), zero1)
    for tp_index, layout in enumerate(columns):
        assert sorted(layout.order.ravel()) == list(range(layout.element.size))
        owned = layout.shard_element[layout.shard_element != catalogue.padding]
        assert len(set(owned)) == len(owned)
        slots = list(layout.slots)
        assert len(owned) == sum(prod(slot.size) for slot in slots)
        assert {slot.param.fqn for slot in slots} == {p.fqn for p in catalogue.params}, tp_index
    covered = np.concatenate([layout.element for layout in columns])
    assert set(covered) - {catalogue.padding} == set(range(catalogue.padding))


@pytest.mark.parametrize(("model", "mesh", "zero1"), CELLS)
def test_pieces_are_the_elements_their_rank_owns(model: str, mesh: str, zero1: bool) -> None:
    catalogue, columns = layouts(model, Mesh.parse(mesh), zero1)
    for layout in columns:
        for fragment in layout.fragments:
            spec, offset = fragment.slot.param.spec, catalogue.offset[fragment.slot.param.fqn]
            own = layout.shard_element[fragment.shard, fragment.at : fragment.at + fragment.numel] - offset
            numbers = np.arange(spec.numel)
            for as_runs in (True, False):
                found = [_elements(numbers, spec.shape, piece) for piece in pieces(fragment, as_runs)]
                assert np.array_equal(np.concatenate(found), own)


def _elements(numbers: np.ndarray, shape: tuple[int, ...], piece: Piece) -> np.ndarray:
    view = numbers if piece.flat else numbers.reshape(shape)
    taken = view[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))].ravel()
    assert taken.size == piece.numel
    return taken


def test_zero1_buckets_are_units_in_reverse_with_equal_even_shares() -> None:
    _, (layout,) = layouts("dense", Mesh.parse("1x4x1"), zero1=True)
    assert [[slot.param.fqn for slot in bucket.slots] for bucket in layout.buckets] == [
        ["norm.weight"], ["down.bias", "down.weight"], ["up.bias", "up.weight"], ["embed.bias", "embed.weight"],
    ]  # fmt: skip
    for bucket in layout.buckets:
        assert 0 <= bucket.share * 4 - bucket.numel < 4


def test_modules_that_are_no_unit_share_the_last_bucket() -> None:
    catalogue = Catalogue(ZOO["tied"], seed=0)
    layout = lay_out(catalogue, tuple(catalogue.names), Mesh(), 0, True)
    assert [slot.param.fqn for slot in layout.buckets[-1].slots] == ["embed.weight"]


def test_trailing_ranks_of_a_short_parameter_own_padding_only() -> None:
    catalogue, (layout,) = layouts("short", Mesh.parse("1x4x1"), zero1=False)
    assert (layout.shard_element[3] == catalogue.padding).all()
    assert [f.shard for f in layout.fragments if f.slot.param.fqn == "two.weight"] == [0, 1]


def test_runs() -> None:
    assert runs(np.array([4, 5, 6, 9, 10, 2])) == [(0, 3), (3, 5), (5, 6)]
    assert runs(np.array([], np.int64)) == []
