"""Muon on whole matrices, and what may be told of the direction that it steps in.

Muon gives the momentum of a matrix singular values near 1 (Newton-Schulz, five iterations of the quintic polynomial of
Jordan and others, in half precision), and steps by the result, its *direction*. A matrix product rounds otherwise
where it is computed in parts, so the direction's bits depend on how a library shares the matrix out. As of a gradient's
norm (`shardproof.oracle.clipping`), the twin therefore takes the direction that the system reported, calculates with it
bit for bit, and the direction itself is held against the exact one of the whole matrix within a bound
(`shardproof.diff.DIRECTION_BOUND`). For example, ranks that orthogonalise their own rows alone are far outside it.

*Verifies* nothing by itself. *Does not know* shards or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch

from shardproof.observe.logical import Value
from shardproof.oracle.inputs import Orthogonal

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic polynomial, as torch.optim.Muon and DeepSpeed have them by default."""

STEPS = 5

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class WholeMuon(torch.optim.Optimizer):
    """Muon of whole matrices, with torch.optim.Muon's order of operations (torch/optim/_muon.py, 2.13).

    State of a matrix: `momentum_buffer`, of its shape and dtype.

    Args:
        groups: param groups with `lr`, `weight_decay` and the numbers that `how` names, and matrices only.
        how: in which dtype the direction is handed on, and whether it has the factor of the matrix's form already.

    Attributes:
        reported: a matrix → the direction to step in; the exact one for a matrix that is not there.
        exact: a matrix → the exact direction of the last step, rounded to the dtype in which it is handed on.
    """

    def __init__(self, groups: list[dict[str, Any]], how: Orthogonal) -> None:
        super().__init__(groups, {name: value for name, value in groups[0].items() if name != "params"})
        self.how = how
        self.reported: Mapping[torch.Tensor, torch.Tensor] = {}
        self.exact: dict[torch.Tensor, torch.Tensor] = {}

    def take(
        self, operation: int, stepped: Mapping[str, torch.Tensor], reported: Mapping[tuple[int, str], Value]
    ) -> None:
        """Step next in the directions that a system reported of an operation.

        Args:
            stepped: name → the matrix of it. reported: (operation, name) → direction; of another shape it is none.
        """
        known = {name: reported[operation, name] for name in stepped if (operation, name) in reported}
        self.reported = {
            stepped[name]: torch.frombuffer(bytearray(value.data), dtype=DTYPES[value.dtype]).reshape(value.shape)
            for name, value in known.items()
            if value.dtype in DTYPES and value.shape == tuple(stepped[name].shape) and value.data
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every matrix that has a gradient."""
        self.exact = {}
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
                source = gradient.lerp(buffer, group["momentum"]) if group.get("nesterov", True) else buffer
                factor = sqrt(max(1, param.shape[0] / param.shape[1]))
                exact = orthogonal(source) * (factor if self.how.scaled else 1)
                self.exact[param] = exact.to(DTYPES.get(self.how.dtype, param.dtype))
                param.mul_(1 - lr * group["weight_decay"])
                direction = self.reported.get(param, self.exact[param])
                param.add_(direction, alpha=-lr * (1 if self.how.scaled else factor))


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
