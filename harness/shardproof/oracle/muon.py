"""Muon on whole matrices, and what may be told of the direction that it steps in.

Muon gives the momentum of a matrix singular values near 1 (Newton-Schulz, five iterations of the quintic polynomial of
Jordan and others, in half precision), and steps by the result, its *direction*. A matrix product rounds otherwise
where it is computed in parts, so the direction's bits depend on how a library shares the matrix out. As of a gradient's
norm (`shardproof.oracle.clipping`), the twin therefore takes the direction that the system reported, calculates with it
bit for bit, as long as it is near the exact one of the whole matrix (`is_near`). For example, ranks that orthogonalise
their own rows alone are far from it; then the exact direction is what must be.

*Verifies* nothing by itself. *Does not know* shards or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch

from shardproof.observe.logical import Value

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic polynomial, as torch.optim.Muon and DeepSpeed have them by default."""

STEPS = 5

CLEAR, BOUND = 1 / 16, 0.25
"""Between clear singular vectors, as a share of its length, bf16 left a direction at most 9 % off the exact one where a
matrix was whole, and 17 % where its rows lay in up to 12 parts and every sum of partial products was rounded as DTensor
does it: 3000 random matrices of the zoo's shapes each. Rows that were orthogonalised by themselves were farther off
than 25 % in 89 of 100 matrices of 12 × 2 in 2 parts, in 99 of 8 × 8, and in 96 to 100 in 4 parts; a scenario has
several matrices, and steps (`tests/unit/oracle/test_muon.py`)."""


class WholeMuon(torch.optim.Optimizer):
    """Muon of whole matrices, with torch.optim.Muon's order of operations (torch/optim/_muon.py, 2.13).

    State of a matrix: `momentum_buffer`, of its shape and dtype.

    Args:
        groups: param groups with `lr`, `weight_decay`, `momentum`, `nesterov` and `eps`, and matrices only.

    Attributes:
        reported: a matrix → the direction that a system says it stepped in.
        stepped_in: a matrix → the direction of the last step: the reported one where that is near the exact one, else
            the exact one, in bf16 as torch hands it on.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {name: value for name, value in groups[0].items() if name != "params"})
        self.reported: Mapping[torch.Tensor, torch.Tensor] = {}
        self.stepped_in: dict[torch.Tensor, torch.Tensor] = {}

    def take(
        self, operation: int, stepped: Mapping[str, torch.Tensor], reported: Mapping[tuple[int, str], Value]
    ) -> None:
        """Step next in the directions that a system reported of an operation.

        Args:
            stepped: name → the matrix of it.
            reported: (operation, name) → direction; of another shape or dtype it is none.
        """
        known = {name: reported[operation, name] for name in stepped if (operation, name) in reported}
        self.reported = {
            stepped[name]: torch.frombuffer(bytearray(value.data), dtype=torch.bfloat16)
            .reshape(value.shape)
            .to(stepped[name].device)
            for name, value in known.items()
            if value.dtype == "bf16" and value.shape == tuple(stepped[name].shape) and value.data
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every matrix that has a gradient."""
        self.stepped_in = {}
        for group in self.param_groups:
            lr = float(group["lr"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, gradient = self.state[param], param.grad
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"]
                buffer.lerp_(gradient, 1 - group["momentum"])
                source = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                exact, reported = orthogonal(source), self.reported.get(param)
                near = reported is not None and is_near(reported, exact, source)
                self.stepped_in[param] = reported if reported is not None and near else exact.bfloat16()
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(self.stepped_in[param], alpha=-lr * sqrt(max(1, param.shape[0] / param.shape[1])))


def is_near(reported: torch.Tensor, exact: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a direction is as near the exact one as roundings of half precision leave it.

    They are compared between the singular vectors of the source whose singular values are not below a share `CLEAR` of
    the greatest: the iteration makes the noise along the others as large as the direction itself.

    Args:
        reported, exact, source: the two directions, and the matrix that they are of, (n, m) each.
    """
    if not source.isfinite().all():
        return False
    left, values, right = torch.linalg.svd(source.double(), full_matrices=False)
    clear = values >= values[0] * CLEAR
    left, right = left[:, clear], right[clear]
    off = left.T @ (reported.double() - exact) @ right.T
    return bool(off.norm() <= BOUND * (left.T @ exact @ right.T).norm())


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The direction of a matrix, (n, m), in double precision; zeros where it has no element other than zero."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.double().T if tall else matrix.double()
    x = x / x.norm().clamp(min=1e-30)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    made: torch.Tensor = x.T if tall else x
    return made
