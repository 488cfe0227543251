"""The bound within which a direction of Muon is taken from the system: wide enough for roundings, and for nothing else.

*Verifies*: `is_near` on directions in bf16 of matrices in parts, and on matrices orthogonalised row by row; that the
twin takes a near direction and refuses a far one.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
import torch
from shardproof.oracle.muon import COEFFICIENTS, STEPS, WholeMuon, is_near, orthogonal

SHAPES = [(4, 4), (12, 2), (12, 3), (3, 6), (5, 2), (7, 2), (4, 3), (16, 7), (6, 5), (8, 8)]


def in_parts(matrix: torch.Tensor, parts: int) -> torch.Tensor:
    """A direction in bf16 as DTensor computes it of a matrix of which ranks have some rows each: of a tall one, partial
    norms and products are added up in bf16, one rank's after the other; a wide one is gathered."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if tall else matrix.bfloat16()
    pieces = list(x.chunk(parts, 1 if tall else 0))
    norm = reduce(add, [piece.norm() ** 2 for piece in pieces]).sqrt()
    pieces = [piece / norm for piece in pieces] if tall else [torch.cat(pieces) / norm]
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        grams = [piece @ piece.T for piece in pieces]
        gram = reduce(add, grams)
        update = reduce(add, [torch.addmm(partial, partial, gram, beta=b, alpha=c) for partial in grams])
        pieces = [torch.addmm(piece, update, piece, beta=a) for piece in pieces]
    x = torch.cat(pieces, 1)
    return x.T if tall else x


def matrices(shape: tuple[int, int], count: int) -> list[torch.Tensor]:
    """Random ones, a third of them with a singular value that is next to nothing, some with few values."""
    generator = torch.Generator().manual_seed(shape[0] * 100 + shape[1])
    found = []
    for number in range(count):
        matrix = torch.randn(shape, generator=generator)
        if number % 3 == 0:
            left, values, right = torch.linalg.svd(matrix, full_matrices=False)
            values[-1] = values[0] * 10 ** (-4 * float(torch.rand(1, generator=generator)))
            matrix = left * values @ right
        found.append(matrix)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [1, 2, 4, 6, 8, 12])
def test_roundings_are_near(shape: tuple[int, int], parts: int) -> None:
    for matrix in matrices(shape, 40):
        assert is_near(in_parts(matrix, parts), orthogonal(matrix), matrix)


@pytest.mark.parametrize(
    ("shape", "parts", "least"), [((12, 3), 2, 51), ((12, 3), 4, 57), ((16, 7), 2, 57), ((8, 8), 4, 60)]
)
def test_rows_that_are_orthogonalised_by_themselves_are_far(shape: tuple[int, int], parts: int, least: int) -> None:
    found = matrices(shape, 60)
    far = [not is_near(torch.cat([in_parts(p, 1) for p in m.chunk(parts)]), orthogonal(m), m) for m in found]
    assert sum(far) >= least


@pytest.mark.parametrize("wrong", ["sign", "zero", "nan", "order"])
def test_another_direction_is_far(wrong: str) -> None:
    matrix = matrices((8, 8), 2)[1]
    direction = in_parts(matrix, 1)
    made = {"sign": -direction, "zero": direction * 0, "nan": direction * torch.nan, "order": direction.flip(0)}
    assert not is_near(made[wrong], orthogonal(matrix), matrix)


def test_the_twin_takes_what_is_near_and_nothing_else() -> None:
    parameter = torch.zeros(4, 3)
    parameter.grad = matrices((4, 3), 2)[1]
    group = {"params": [parameter], "lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "eps": 1e-8}
    optimizer = WholeMuon([group])
    near = in_parts(parameter.grad, 2)
    optimizer.reported = {parameter: near}
    optimizer.step()
    assert torch.equal(optimizer.stepped_in[parameter], near)
    optimizer.reported = {parameter: -near}
    optimizer.step()
    assert torch.equal(optimizer.stepped_in[parameter], orthogonal(parameter.grad).bfloat16())
