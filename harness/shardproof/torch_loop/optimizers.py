"""torch's optimizers on one rank: how a scenario's numbers make one, and the directions that Muon steps in.

torch keeps the direction of a matrix nowhere. So the function that makes it is called through one of ours during a
step, which notes what came out and hands it on as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import _muon

from shardproof.scenario import Optimizer

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "muon": torch.optim.Muon,
}  # fmt: skip
"""Name of the `optimizer` axis → the class of torch that ranks step with."""


def made(ask: Optimizer, groups: list[dict[str, Any]], lr: float | torch.Tensor) -> torch.optim.Optimizer:
    """torch's optimizer over param groups, with the numbers of a scenario. Muon's groups have matrices only."""
    options: dict[str, Any] = {"lr": lr, "weight_decay": ask.weight_decay}
    if ask.kind != "muon":
        options |= {"foreach": ask.impl == "foreach", "fused": ask.impl == "fused"}
    if ask.kind in ("sgd", "muon"):
        options |= {"momentum": ask.momentum, "nesterov": ask.nesterov}
    else:
        options |= {"betas": (ask.beta1, ask.beta2), "capturable": ask.capturable}
    if ask.kind != "sgd":
        options["eps"] = ask.eps
    return OPTIMIZERS[ask.kind](groups, **options)


@contextmanager
def noting_directions(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]
) -> Iterator[dict[str, torch.Tensor]]:
    """Name → this rank's part of the direction of a matrix, shaped as its part of the matrix is, of the step that is
    taken meanwhile; empty for another optimizer than Muon.

    A direction is shared out as its matrix is, which DTensor does again when it adds the one to the other: with the
    same calls, so that what is noted is what was added, however the parts of a sum were rounded.
    """
    found: dict[str, torch.Tensor] = {}
    if not isinstance(optimizer, torch.optim.Muon):
        yield found
        return
    names = {parameter: name for name, parameter in named.items()}
    given = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    order, stepped = iter(given), False
    makes = _muon._zeropower_via_newtonschulz

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        direction: torch.Tensor = makes(*args, **kwargs)
        parameter, own = next(order), direction
        if isinstance(direction, DTensor) and isinstance(parameter, DTensor):
            own = direction.redistribute(placements=parameter.placements).to_local()
        found[names[parameter]] = own.detach().clone().contiguous()
        return direction

    def was_stepped(*_: Any) -> None:
        nonlocal stepped
        stepped = True

    hook = optimizer.register_step_post_hook(was_stepped)
    _muon._zeropower_via_newtonschulz = noted
    try:
        yield found
    finally:
        _muon._zeropower_via_newtonschulz = makes
        hook.remove()
    if stepped and len(found) != len(given):
        raise RuntimeError(f"{len(found)} directions noted of {len(given)} matrices: this torch makes them elsewhere")
