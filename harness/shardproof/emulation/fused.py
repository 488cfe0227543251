"""FusedAdam and FusedSGD with the interface that Megatron-Core uses of apex and of TransformerEngine 2.10.

One FusedAdam stands for both: apex's is TransformerEngine's with every option of the precision-aware optimizer off.
State that is not fp32 is kept as TransformerEngine keeps it: fp16 and fp8 (E4M3) divided by one fp32 scale a tensor,
bf16 as it is, and of a bf16 parameter's master only the 16 low bits. What it refuses is refused; CUDA-graph capture is
not emulated. docs/fused-adam.md has every rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch

from shardproof.emulation import kernels
from shardproof.emulation.used_symbols import touch
from shardproof.ownership import refused

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "master_param"
_LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2.0, torch.uint8: 448.0}
_MOMENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class FusedAdam(torch.optim.Optimizer):
    """Adam whose whole update of an element is one kernel. Steps are counted in the param group.

    A DTensor is stepped through its local part, and its state is made of DTensors like it, as in TransformerEngine from
    2.14 on. With `local_state` the state is plain local tensors, as between its pull requests 2698 and 2795.

    Raises RuntimeError for dtypes that TransformerEngine refuses, NotImplementedError for `capturable`.
    """

    local_state = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        touch("FusedAdam")
        if amsgrad:
            raise refused(RuntimeError("FusedAdam does not support the AMSGrad variant."))
        if capturable:
            raise NotImplementedError("FusedAdam(capturable=True) is not emulated: no CUDA graph can capture it here")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise refused(RuntimeError("FusedAdam only supports fp32/fp16 master weights."))
        if exp_avg_dtype not in _MOMENT_DTYPES or exp_avg_sq_dtype not in _MOMENT_DTYPES:
            raise refused(RuntimeError("FusedAdam only supports fp32/fp16/bf16/fp8 exp_avg and exp_avg_sq."))
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype is torch.float32
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            _MASTER: master_weight_dtype,
        }
        self._scales: dict[Any, dict[str, torch.Tensor]] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none)
            return
        for param in _parameters(self):
            if set_to_none:
                param.decoupled_grad = None
            else:
                param.decoupled_grad.zero_()

    def _keeps_remainder(self, param: torch.Tensor, name: str = _MASTER) -> bool:
        return self.store_param_remainders and name == _MASTER and param.dtype is torch.bfloat16

    def _initialize_state(self, param: torch.Tensor, name: str) -> None:
        """A state of zeros, with a scale of 1 where that state has a scale."""
        dtype = self.name_to_dtype_map[name]
        stored = {torch.uint8: torch.float8_e4m3fn}.get(dtype, dtype)
        if self._keeps_remainder(param, name):
            stored = torch.int16
        state = torch.zeros(_local(param).shape, dtype=stored, device=param.device)
        self.state[param][name] = state if self.local_state else _distributed_as(param, state)
        if dtype is not torch.float32:
            scale = torch.ones([1], dtype=torch.float32, device=param.device)
            self._scales.setdefault(param, {})[name] = scale

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Create all state of a parameter: zero moments, and the master from the parameter's value."""
        for name in _MOMENTS:
            self._initialize_state(param, name)
        if self.master_weights:
            self._initialize_state(param, _MASTER)
            if not store_param_remainders:
                self.set_scaled_state(param, _MASTER, _local(param).clone().detach().float())

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """A state in fp32: the tensor itself where it is fp32 (or int16 remainders), else a converted copy."""
        state: torch.Tensor = _local(self.state[param][state_name])
        dtype = self.name_to_dtype_map[state_name]
        if dtype is torch.float32:
            _assert(state.dtype is (torch.int16 if self._keeps_remainder(param, state_name) else torch.float32))
            return state
        unscaled = state.float()
        if dtype is torch.float16:
            unscaled.mul_(self._scales[param][state_name])
        elif dtype is torch.uint8:
            # TransformerEngine keeps the inverse of an fp8 tensor's scale, and inverts that again
            unscaled.mul_(1 / (1 / self._scales[param][state_name]))
        return unscaled

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Store fp32 values (int16 remainders where those are kept) as a state, scaled where the state is.

        `unscaled_state` is scaled in place on the way to fp16, as in TE.
        """
        wanted = torch.int16 if self._keeps_remainder(param, state_name) else torch.float32
        _assert(_dtype_of(unscaled_state) is wanted)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name)
        state = _local(self.state[param][state_name])
        if state.shape != unscaled_state.shape:  # copy_ would refuse it
            shapes = f"{list(unscaled_state.shape)} into {list(state.shape)}"
            raise refused(RuntimeError(f"set_scaled_state: sizes do not match: {state_name} {shapes}"))
        if self.name_to_dtype_map[state_name] is torch.float32:
            state.copy_(unscaled_state)
        else:
            self._apply_scale(state_name, unscaled_state, state, self._scales[param][state_name])

    def _apply_scale(self, name: str, unscaled: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> None:
        """Write fp32 values to a state in lower precision: the largest magnitude maps to the top of its range."""
        dtype = self.name_to_dtype_map[name]
        if dtype is torch.bfloat16:
            stored.copy_(unscaled)
            return
        low, high = torch.aminmax(unscaled.to(stored.device))
        scale.copy_(kernels.maximum(-low, high).reshape(1).div(_LARGEST[dtype]))
        if dtype is torch.uint8:
            stored.copy_(unscaled.to(stored.device).mul(1 / scale))
        else:
            unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0).to(unscaled.device))
            stored.copy_(unscaled)

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict with every state in fp32 (remainders stay int16)."""
        state_dict = super().state_dict()
        params = _by_id(state_dict, self)
        for key, state in state_dict["state"].items():
            if key in params:
                state_dict["state"][key] = {name: self.get_unscaled_state(params[key], name) for name in state}
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load fp32 states into whatever precision each has here."""
        super().load_state_dict(dict(state_dict))
        params = _by_id(state_dict, self)
        for key, state in state_dict["state"].items():
            if key not in params:
                continue
            param = params[key]
            self.state[param] = {}
            for name, value in state.items():
                if value is not None:
                    exact = self._keeps_remainder(param, name)
                    value = _local(value)
                    self.set_scaled_state(param, name, value if exact else value.float())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One step of every parameter that has a gradient; the group's count rises even where none has."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            scalars = kernels.AdamScalars.from_hyperparameters(
                group["lr"],
                group["betas"],
                group["eps"],
                group["weight_decay"],
                group["step"],
                decoupled=bool(self.adam_w_mode),
                bias_correction=bool(group["bias_correction"]),
            )
            self._refuse_mixed_halves(group["params"])
            for param in group["params"]:
                self._step_one(scalars, param)
        return loss

    def _gradient(self, param: Any) -> torch.Tensor | None:
        grad: torch.Tensor | None = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
        return grad

    def _refuse_mixed_halves(self, params: list[Any]) -> None:
        dtypes = {param.dtype for param in params if self._gradient(param) is not None}
        if {torch.float16, torch.bfloat16} <= dtypes:
            raise refused(RuntimeError("FusedAdam does not support a mix of float16 and bfloat16 model weights."))
        if unknown := dtypes - {torch.float32, torch.float16, torch.bfloat16}:
            raise refused(
                RuntimeError(f"FusedAdam only support model weights in fp32, fp16, bf16 and fp8, not {unknown}")
            )

    def _step_one(self, scalars: kernels.AdamScalars, param: Any) -> None:
        if not self.state[param]:
            self.initialize_state(param, self._keeps_remainder(param))
        grad = self._gradient(param)
        if grad is None:
            return
        grad, value = _local(grad), _local(param.data)
        state = {n: self.get_unscaled_state(param, n) for n in self.name_to_dtype_map if n in self.state[param]}
        moments = state["exp_avg"], state["exp_avg_sq"]
        has_master = self.master_weights and param.dtype is not torch.float32
        if has_master and self._keeps_remainder(param):
            master = kernels.adam(scalars, grad, kernels.join_remainder(value, state[_MASTER]), *moments)
            high, low = kernels.split_remainder(master)
            value.copy_(high)
            state[_MASTER].copy_(low)
        elif has_master:
            state[_MASTER].copy_(kernels.adam(scalars, grad, state[_MASTER], *moments))
            value.copy_(state[_MASTER])
        else:
            value.copy_(kernels.adam(scalars, grad, value, *moments))
        for name, unscaled in state.items():
            if self.name_to_dtype_map[name] is not torch.float32:
                self._apply_scale(name, unscaled, _local(self.state[param][name]), self._scales[param][name])


class FusedSGD(torch.optim.Optimizer):
    """SGD whose whole update of an element is one kernel. Parameters that are neither fp16 nor fp32 are passed over,
    and momentum buffers exist even without momentum, both as upstream."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
    ) -> None:
        touch("FusedSGD")
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise refused(ValueError("Nesterov momentum requires a momentum and zero dampening"))
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        self.wd_after_momentum = wd_after_momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for dtype in (torch.float16, torch.float32):
                params = [param for param in group["params"] if param.dtype is dtype and param.grad is not None]
                self._launch(group, params)
        return loss

    def _launch(self, group: dict[str, Any], params: list[Any]) -> None:
        """One kernel launch over lists of tensors. Whether it is the first step is read off the last parameter, as
        upstream does."""
        first_run = True
        for param in params:
            first_run = "momentum_buffer" not in self.state[param]
            if first_run:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param.data)
        for param in params:
            new = kernels.sgd(
                param.grad,
                param.data,
                self.state[param]["momentum_buffer"],
                lr=group["lr"],
                momentum=group["momentum"],
                dampening=group["dampening"],
                weight_decay=group["weight_decay"],
                nesterov=group["nesterov"],
                first_run=first_run,
                decay_after_momentum=self.wd_after_momentum,
            )
            param.data.copy_(new)


def _dtype_of(given: Any) -> Any:
    """The dtype of what a library hands over as a tensor. What is no tensor fails here, as it fails inside
    TransformerEngine."""
    try:
        return given.dtype
    except AttributeError as error:
        raise refused(error) from None


def _assert(holds: bool) -> None:
    """An assertion that the real class makes about its arguments."""
    if not holds:
        raise refused(AssertionError())


def _is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor. None is one where nobody has imported their module, which takes longer than torch: the
    twin, which steps with this class too, has whole tensors only."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Any) -> Any:
    """The local shard of a DTensor; a plain tensor as given."""
    return tensor._local_tensor if _is_distributed(tensor) else tensor


def _distributed_as(param: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor of this local part like the parameter, where that is one."""
    if not _is_distributed(param):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.size(), stride=param.stride()
    )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _by_id(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """A state dict's parameter ids → the parameters of this optimizer, in order."""
    saved = deepcopy(state_dict["param_groups"])
    ids = chain.from_iterable(group["params"] for group in saved)
    return dict(zip(ids, _parameters(optimizer), strict=False))
