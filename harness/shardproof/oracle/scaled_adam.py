"""FusedAdam over whole tensors, some of whose states it scales shard by shard.

The twin has a weight in one tensor. On ranks the weight is cut into shards, and FusedAdam takes a scale for each, so
that the stored bits depend on the cut. The contract says which elements lie together, a *domain*; here every domain
becomes a tensor of its own for the FusedAdam inside, as it is on the rank that owns it. The state of the whole tensor
is what those hold, put together again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.emulation.apex import FusedAdam

SCALE = ".scale"
"""What follows a state's name in the name of its scales: `exp_avg.scale` has, in fp32, for each element the scale of
its domain."""

_SCALED = (torch.float16, torch.float8_e4m3fn)


class _Sound(FusedAdam):
    """FusedAdam, except that zeros stay zeros. TransformerEngine multiplies a domain of zeros in fp8 by the infinite
    inverse of its scale, and stores NaN (_apply_scale, 2.10 to 2.20.2), which no contract can promise."""

    def _apply_scale(self, name: str, unscaled: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> None:
        super()._apply_scale(name, unscaled, stored, scale)
        if stored.dtype is torch.float8_e4m3fn and scale == 0:
            stored.copy_(unscaled)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A domain of a tensor as FusedAdam sees it. where: which elements of the tensor it has (bool, the tensor's
    shape)."""

    tensor: torch.nn.Parameter
    where: torch.Tensor


class ScaledAdam(torch.optim.Optimizer):
    """An optimizer whose state of a tensor has FusedAdam's names, each value as it is stored, and `<name>.scale`
    beside those that have a scale."""

    use_decoupled_grad = True

    def __init__(
        self, groups: list[dict[str, Any]], options: Mapping[str, Any], domains: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """options: FusedAdam's. domains: for a tensor, the number of each element's domain; a tensor that is not
        named is one domain."""
        self.pieces: dict[torch.Tensor, list[_Piece]] = {}
        inner = []
        for group in groups:
            for param in group["params"]:
                numbers = domains.get(param, torch.zeros(param.shape, dtype=torch.int64))
                self.pieces[param] = [
                    _Piece(torch.nn.Parameter(param.detach()[where]), where)
                    for where in (numbers == number for number in sorted(set(numbers.flatten().tolist())))
                ]
            inner.append({**group, "params": [p.tensor for param in group["params"] for p in self.pieces[param]]})
        self.inner = _Sound(inner, use_decoupled_grad=True, **options)
        super().__init__(groups, self.inner.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every tensor that has a `decoupled_grad`."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for name in inner.keys() - group.keys():
                del inner[name]  # a count of steps that a load has taken away
            inner.update({name: value for name, value in group.items() if name != "params"})
            for param in group["params"]:
                self._hand_over(param)
        self.inner.step()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            if "step" in inner:  # FusedAdam counts no step of a group that is empty
                group["step"] = inner["step"]
            for param in group["params"]:
                for piece in self.pieces[param]:
                    param[piece.where] = piece.tensor.detach()
                self._gather(param)

    def _hand_over(self, param: torch.Tensor) -> None:
        gradient = getattr(param, "decoupled_grad", None)
        for piece in self.pieces[param]:
            piece.tensor.copy_(param[piece.where])
            piece.tensor.decoupled_grad = None if gradient is None else gradient[piece.where]  # type: ignore[attr-defined]
            if not self.state[param]:
                self.inner.state[piece.tensor] = {}

    def _gather(self, param: torch.Tensor) -> None:
        """Put the pieces' states together."""
        state: dict[str, torch.Tensor] = {}
        for piece in self.pieces[param]:
            for name, values in self._stored(piece):
                bits = values.view(torch.uint8) if values.dtype is torch.float8_e4m3fn else values
                whole = state.setdefault(name, torch.zeros(param.shape, dtype=values.dtype))
                (whole.view(bits.dtype))[piece.where] = bits
        self.state[param] = state

    def _stored(self, piece: _Piece) -> Iterator[tuple[str, torch.Tensor]]:
        for name, values in self.inner.state[piece.tensor].items():
            yield name, values
            if values.dtype in _SCALED:
                yield name + SCALE, self.inner._scales[piece.tensor][name].expand(values.shape)

    def restore(self, param: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Give a tensor the state that a checkpoint has of it. A checkpoint has fp32, of which every domain takes a
        new scale."""
        for name in (name for name in state if not name.endswith(SCALE)):
            self.set_state(param, name, unscaled(state, name))

    def refresh_master(self, param: torch.Tensor) -> None:
        """Set the master, where there is one, to the value that its parameter has now."""
        if self.state[param]:
            self.set_state(param, "master_param", param.detach().float())

    def set_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Store fp32 values as a state."""
        for piece in self.pieces[param]:
            self.inner.set_scaled_state(piece.tensor, name, values[piece.where])
        self._gather(param)


def unscaled(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A stored state in fp32."""
    values, scale = state[name].float(), state.get(name + SCALE)
    if scale is None:
        return values
    return values * scale if state[name].dtype is torch.float16 else values * (1 / (1 / scale))
