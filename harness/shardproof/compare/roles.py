"""Guesses the role of a stored value, such as `param` or `exp_avg`, from its name in the checkpoint.

The names are those of torch's state dicts (`optim.state.NAME.exp_avg`), of Megatron-Core's
(`optimizer.state.exp_avg.NAME`), and of DeepSpeed's. A role here is for counting and reading only; nothing is judged by
it.
"""

from __future__ import annotations

from shardproof.readers.pieces import KeyPath, key_of
from shardproof.readers.roles import STATE_ROLE

_STATES = {
    "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "exp_avg_sq", "momentum": "momentum",
    "step": "step", "fp32_param": "master", "fp32": "master", "master": "master", **STATE_ROLE,
}  # fmt: skip
_OPTIMIZERS = ("optim", "optimizer", "optimizer_state_dict", "state", "zero")
_SECTIONS = {
    "scheduler": "scheduler", "lr_scheduler": "scheduler", "opt_param_scheduler": "scheduler", "sched": "scheduler",
    "scaler": "scaler", "grad_scaler": "scaler", "loss_scaler": "scaler", "rng": "rng", "rng_state": "rng",
    "random_rng_state": "rng", "cuda_rng_state": "rng", "cpu_rng_state": "rng", "param_groups": "hyperparameter",
    "param_to_group_meta": "hyperparameter",
}  # fmt: skip
_MODELS = ("model", "module", "modules", "model_state_dict", "state_dict")


def role_of(path: KeyPath, *, tensor: bool) -> str:
    """The role of what lies under a path: `param` (buffers too, which no name tells apart), `master`, `exp_avg` and so
    on; `tensor` or `other` where the name tells nothing."""
    words = key_of(path).split(".")
    if words[-1].endswith("_extra_state") or "_extra_state" in words:
        return "extra_state"
    for word in words:
        if word in _SECTIONS:
            return _SECTIONS[word]
    if any(word in _OPTIMIZERS for word in words[:4]):
        for word in (words[-1], *reversed(words)):
            if word in _STATES:
                return _STATES[word]
        if words[-1] == "param" and tensor:  # Megatron-Core stores the master under `param`
            return "master"
        if not tensor:
            return "hyperparameter"
    model = any(word in _MODELS for word in words[:3]) or words[-1] in ("weight", "bias")
    if tensor:
        return "param" if model else "tensor"
    return "other"
