"""What Megatron-Core's training loop and optimizers promise, for the contracts of the systems that drive them.

Each clause names the function upstream that makes the promise. What it means for numbers are the methods below them:
for example, `clip` says that the coefficient is computed in double precision, and `kernels` that with CPU offload the
elements on the host are stepped by torch's fused AdamW and those on the device by FusedAdam, which round differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, ClassVar

from shardproof.mechanisms.fused_adam import HALF_AWAY, PRECISION_AWARE, SCALES, FusedAdamContract
from shardproof.mechanisms.megatron.switches import OVERRIDE, TORCH_OFFLOAD, hyperparameters
from shardproof.mechanisms.param_scheduler import SHARE
from shardproof.models import ModuleSpec, draws, model_spec
from shardproof.oracle.contract import Clause, half_dtype
from shardproof.oracle.inputs import DOUBLE_CLIPPING, Clip, LossScale
from shardproof.scenario import FLOAT_DTYPES, Mesh, Optimizer, Scenario

if TYPE_CHECKING:
    from shardproof.observe.logical import Logical

WINDOW, HYSTERESIS = 2, 2
"""Steps without overflow after which the loss scale doubles, and overflows after which it halves, in every scenario."""


SEEDS = Clause(
    "with seed s the device's default generator and the stream data-parallel-rng start from s, "
    "model-parallel-rng from s + 2718 + the tensor-parallel rank, expert-parallel-rng from s + 1024 + 100 × "
    "the expert-parallel rank + the rank within an expert",
    "megatron.core.tensor_parallel.random.model_parallel_cuda_manual_seed",
)


class MegatronContract(FusedAdamContract):
    """What differs from a plain torch loop: flat gradient buffers, fp32 masters, a loss scaler with hysteresis, and
    CPU offload by a second optimizer."""

    clauses: ClassVar[Sequence[Clause]] = (
        Clause(
            "the dynamic loss scale exists in fp16 only; it doubles after 2 steps without overflow, halves from the "
            "second overflow on that no growth came between (hysteresis), and is at least 1",
            "megatron.core.optimizer.grad_scaler.DynamicGradScaler",
        ),
        Clause(
            "gradients are multiplied in fp32 by clip / (norm + 1e-6), a python float, if that is below 1",
            "megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32",
        ),
        Clause(
            "every trainable parameter has a gradient, zeros where no forward used it; frozen ones the optimizer lacks",
            "megatron.core.distributed.param_and_grad_buffer, main_grad; optimizer._get_param_groups",
        ),
        Clause(
            "floating-point buffers are cast with the model to the half dtype",
            "megatron.core.transformer.module.Float16Module",
        ),
        Clause(
            "the optimizer reads the gradient in fp32; a precision-aware one reads it in the buffer's dtype",
            "megatron.core.optimizer.distrib_optimizer._copy_model_grads_to_main_grads",
        ),
        HALF_AWAY,
        SCALES,
        Clause(
            "with CPU offload, elements on the host are stepped by torch.optim.AdamW(fused=True), those on the device "
            "by FusedAdam, or by torch's too where use_torch_optimizer_for_cpu_offload asks for it or there is no "
            "FusedAdam",
            "megatron.core.optimizer, optimizer_cpu_offload",
        ),
    )
    zero_gradients = True
    trainable_only = True
    owner_groups = True

    def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: AbstractSet[int]) -> Logical:
        if not draws(scenario.model):
            return truth
        from shardproof.mechanisms.megatron.generators import megatron_streams

        return truth | megatron_streams(scenario)

    def masters_in_state(self, scenario: Scenario) -> bool:
        return PRECISION_AWARE in scenario.options and not scenario.offload.fraction

    def buffer_dtype(self, scenario: Scenario, dtype: str, module: ModuleSpec, mesh: Mesh) -> str:
        half = half_dtype(scenario.dtype)
        return half if half and dtype in FLOAT_DTYPES else dtype

    def at_build(self, scenario: Scenario, init_seed: int) -> Optimizer:
        return hyperparameters(scenario, init_seed)

    def run_keeps(self, scenario: Scenario) -> tuple[str, ...]:
        return ("lr", "weight_decay", "max_lr", "min_lr") if OVERRIDE in scenario.options else ()

    def schedule_share(self, scenario: Scenario) -> str:
        return SHARE

    def loss_scale(self, scenario: Scenario) -> LossScale | None:
        if not scenario.optimizer.loss_scale or half_dtype(scenario.dtype) != "fp16":
            return None
        return LossScale(torch=False, window=WINDOW, hysteresis=HYSTERESIS, minimum=1.0)

    def clip(self, scenario: Scenario) -> Clip | None:
        bound = scenario.optimizer.clip
        return Clip(bound, "fp64", DOUBLE_CLIPPING) if bound else None

    def kernels(self, scenario: Scenario) -> tuple[str, str]:
        impl = scenario.optimizer.impl
        if not scenario.offload.fraction:
            return impl, impl
        if scenario.optimizer.kind == "sgd":
            return "forloop", "forloop"
        host = "fused"
        device = impl if impl == "multi_tensor" and TORCH_OFFLOAD not in scenario.options else host
        return (host if scenario.offload.fraction == 1 else device), host

    def knows_host(self, scenario: Scenario) -> bool:
        """Whether it is known which elements the host steps, so that ranks record it.

        It is not known without a distributed optimizer where something is stored in half precision: there the masters
        are made after the hybrid optimizer has taken its parameters, and none of them is on the host
        (NVIDIA/Megatron-LM issue 4046).
        """
        if not scenario.offload.fraction:
            return False
        if scenario.sharding == "replicate" and half_dtype(scenario.dtype) is not None:
            return False
        return scenario.offload.fraction == 1 or not (_has_groups(scenario) or _shares_experts(scenario))

    def host_elements(self, scenario: Scenario, mesh: Mesh) -> Mapping[str, bytes]:
        if not scenario.offload.fraction or not (self.mixes_kernels(scenario) or self.knows_host(scenario)):
            return {}
        from shardproof.mechanisms.megatron.host_elements import host_elements

        return host_elements(scenario, mesh)

    def scale_domains(self, scenario: Scenario, mesh: Mesh) -> Mapping[str, tuple[int, ...]]:
        if not self.has_scales(scenario):
            return {}
        from shardproof.mechanisms.megatron.domains import scale_domains

        return scale_domains(scenario, mesh)


def _has_groups(scenario: Scenario) -> bool:
    return scenario.optimizer.groups == "model" and len(model_spec(scenario.model).groups) > 1


def _shares_experts(scenario: Scenario) -> bool:
    experts = any(p.spec.ep_dim is not None for p in model_spec(scenario.model).params)
    return scenario.expert_parallel > 1 and experts
