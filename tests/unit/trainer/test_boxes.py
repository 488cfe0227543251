"""The boxes of DTensors, against `torch.chunk` on a tensor that has its own indices as elements."""

from __future__ import annotations

from itertools import product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from shardproof.layout import Box, shard_box
from shardproof.trainer.rank.boxes import Sharding, cuts_of

Case = tuple[tuple[int, ...], list[Sharding]]


def local(table: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """What one mesh dim leaves of a tensor."""
    kept = []
    for outer in chunks(table, sharding.split_factor, sharding.dim):
        kept.append(chunks(outer, sharding.parts, sharding.dim)[sharding.place])
    return torch.cat(kept, sharding.dim)


def chunks(table: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    """As FSDP and DTensor use `torch.chunk`: chunks that it does not make are empty."""
    found = list(table.chunk(parts, dim)) if table.shape[dim] else []
    empty = table.narrow(dim, 0, 0)
    return found + [empty] * (parts - len(found))


@st.composite
def arranged(draw: st.DrawFn, most: int = 3, factors: tuple[int, int] = (1, 1)) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    shardings = []
    for _ in range(draw(st.integers(0, most))):
        parts = draw(st.integers(1, 4))
        dim, place = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, parts - 1))
        shardings.append(Sharding(dim, parts, place, draw(st.integers(*factors))))
    return shape, shardings


@given(arranged() | arranged(1, (2, 3)))
def test_boxes_hold_the_elements_that_chunks_hold(case: Case) -> None:
    shape, shardings = case
    table = torch.arange(prod(shape)).reshape(shape)
    piece = table
    for sharding in shardings:
        piece = local(piece, sharding)
    cuts = cuts_of(shape, shardings)
    covered = torch.zeros(piece.shape, dtype=torch.bool)
    for box, window in cuts:
        there = tuple(slice(at, at + n) for at, n in zip(*box, strict=True))
        here = tuple(slice(at, at + n) for at, n in zip(*window, strict=True))
        assert torch.equal(table[there], piece[here])
        assert not covered[here].any()
        covered[here] = True
    assert covered.all()


def test_a_rank_without_elements_says_so_with_an_empty_box() -> None:
    ((box, window),) = cuts_of((2, 3), [Sharding(0, 4, 3)])
    assert (box, window) == (Box((2, 0), (0, 3)), Box((0, 0), (0, 3)))


def test_a_strided_shard_is_the_inner_mesh_dim_cutting_first() -> None:
    for rows, dp, tp in product(range(1, 14), range(1, 5), range(2, 5)):
        for outer, inner in product(range(dp), range(tp)):
            ((box, _),) = cuts_of((rows, 3), [Sharding(0, dp, outer, split_factor=tp), Sharding(0, tp, inner)])
            assert box == shard_box((rows, 3), (1, dp, tp), (0, outer, inner), tp_dim=0)


def test_a_strided_shard_alone_leaves_several_boxes() -> None:
    cuts = cuts_of((8,), [Sharding(0, 2, 1, split_factor=2)])
    assert [(cut.box, cut.window.start) for cut in cuts] == [(Box((2,), (2,)), (0,)), (Box((6,), (2,)), (2,))]
