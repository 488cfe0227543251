"""Scripts of Megatron-Core with a model of their own: for failures that a reader sees at once in one or two parameters,
and that the comparison of whole states does not show.

For example, a gradient that is added to itself is seen in one weight: the loss is its sum, so that its gradient is 1,
and Adam's first moment has taken up 2. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardproof.export.case import FailureCase
from shardproof.export.model import TORCH_NAME
from shardproof.export.script import Draft
from shardproof.mechanisms.megatron import export_calls as calls_of
from shardproof.mechanisms.megatron.export_calls import Store
from shardproof.mechanisms.stand_ins import MODULE, gpu_on_cpu
from shardproof.oracle.contract import half_dtype

HOME = "shardproof.systems.megatron_core"
LR = 0.125


@dataclass(frozen=True)
class Scene:
    """What a script has beside the library's usual calls.

    * case: the operations that it does. about: what the model is. attributes: lines that give it its parameters.
      forward: the expression of its loss; empty where none is taken. block: the value of the one weight of a module
      `Block`, where it is made of such; empty for none.
    * subject, expected, observed: what is compared at the end, in words and as expressions; empty where an operation
      must not raise.
    * calls: kind of operation → lines, in place of the usual ones. fused: with a FusedAdam beside the script, which
      keeps the state of DTensors as local tensors with `local_state`, and in dtypes of its own with `precise`.
    * config: more arguments of the TransformerConfig.
    """

    case: FailureCase
    about: str
    attributes: Sequence[str]
    subject: str
    expected: str
    observed: str
    calls: Mapping[str, str]
    forward: str = ""
    block: str = ""
    fused: bool = False
    local_state: bool = False
    precise: bool = False
    config: Mapping[str, str] | None = None


def drafted(scene: Scene, store: Store) -> Draft:
    """The draft of a scene."""
    case = scene.case
    half = half_dtype(case.scenario.dtype)
    calls = {
        "start": "\n".join(calls_of.joined(case)),
        "step": "\n".join(step_lines()),
        **calls_of.checkpoint(store, case),
        **scene.calls,
    }
    if scene.subject:
        calls |= {"subject": scene.subject, "expected": scene.expected}
    values = {
        "config": calls_of.call("TransformerConfig", {**calls_of.config(half), **(scene.config or {})}),
        "metadata": store.metadata,
        "about": scene.about,
        "attributes": scene.attributes,
        "forward": scene.forward,
        "block": scene.block,
        "shim": MODULE,
        **dict.fromkeys(("shapes", "islands", "frozen", "expert_blocks", "unused_names", "unused_blocks"), ()),
    }
    offload = scene.precise and case.scenario.offload.fraction > 0
    shims = gpu_on_cpu(
        fused=scene.fused,
        local_state=scene.local_state,
        precise=scene.precise,
        offload=offload,
        triton=calls_of.imports_triton(case.result.version),
    )
    return Draft(
        HOME,
        "own.py.j2",
        calls,
        scene.observed,
        values,
        f"megatron-core {case.result.version}",
        shims,
        extends="shardproof.mechanisms.megatron",
        case=case,
    )


def tensor(case: FailureCase, size: str, made: str = "torch.ones") -> str:
    """The call that makes a parameter's tensor on the device, in the dtype of the scenario's weights."""
    half = half_dtype(case.scenario.dtype)
    return f'{made}({size}, device="cuda"{f", dtype={TORCH_NAME[half]}" if half else ""})'


def step_lines(loss: str = 'model(torch.ones(1, device="cuda", requires_grad=True)).sum()') -> list[str]:
    """One step of the training script.

    Args:
        loss: its expression.
    """
    return [
        "model.zero_grad_buffer()",
        "optimizer.zero_grad()",
        f"optimizer.scale_loss({loss}).backward()",
        "finalize_model_grads([model])",
        "optimizer.step()",
    ]


def build_lines(case: FailureCase, store: Store, config: Mapping[str, str]) -> list[str]:
    """The model, DDP or FSDP around it, and the optimizer.

    Args:
        config: arguments of the OptimizerConfig.
    """
    half = half_dtype(case.scenario.dtype)
    lines = calls_of.build(case, store, half)
    first = next(at for at, line in enumerate(lines) if line.startswith("config = "))
    last = next(at for at, line in enumerate(lines) if line.startswith("optimizer = "))
    return [*lines[1:first], *calls_of.spread("config", "OptimizerConfig", config), *lines[last:]]


def adam(case: FailureCase) -> dict[str, str]:
    """The arguments of an OptimizerConfig of Adam without weight decay, of which a reader works out the first step."""
    asked = calls_of.optimizer(case.scenario, half_dtype(case.scenario.dtype))
    kept = {
        name: value for name, value in asked.items() if name in ("bf16", "params_dtype", "use_distributed_optimizer")
    }
    return {"optimizer": '"adam"', "lr": repr(LR), "weight_decay": "0.0", "clip_grad": "0.0", **kept}
