"""The dtype contract of a pretrained model under mixed precision: which dtype each tensor has, and why.

A table of rules, and one pure function that applies it: of the rules for a stage, the first that fits decides. For
example, a weight that the file has in bf16, loaded with fp32 requested, is stored in fp32 by the rule `storage-wider`
and computes in bf16 by `compute-policy`. docs/dtype-contract.md shows the same table; a test keeps them equal. The
contract is what NeMo Automodel documents, and where that says nothing what Hugging Face and FSDP2 promise; a release
that does something else is a finding, not a variant.

*Does not know* releases, models, meshes or values.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"
"""The request for the dtype that the checkpoint file has."""

_WIDTH = {"bf16": 16, "fp16": 16, "fp32": 32}


@dataclass(frozen=True)
class Policy:
    """What FSDP2's MixedPrecisionPolicy asks for. None stands for the dtype of the stage before."""

    param: str | None = None
    reduce: str | None = None


@dataclass(frozen=True)
class Tensor:
    """What is known of a floating-point tensor before it is loaded.

    * file: its dtype in the checkpoint; None for a buffer that no checkpoint holds, which is made in fp32.
    * pinned: the model names it in `_keep_in_fp32_modules_strict`.
    * kept: in `_keep_in_fp32_modules`, which Hugging Face honours for fp16 alone.
    * frozen: it is a frozen parameter, or a buffer of a module all of whose parameters are frozen.
    * buffer: it is no parameter.
    * sharded: FSDP2 manages it.
    * native: a class of Automodel's own holds it, which loads into what it made and records nothing.
    """

    file: str | None = "bf16"
    pinned: bool = False
    kept: bool = False
    frozen: bool = False
    buffer: bool = False
    sharded: bool = True
    native: bool = False


@dataclass(frozen=True)
class Dtypes:
    """The dtype of each stage: as it is stored, inside the forward, when ranks' gradients are summed, and of the
    optimizer's state. reasons: ids of the rules that decided, one for each stage."""

    storage: str
    compute: str
    reduce: str
    state: str
    reasons: tuple[str, str, str, str]


@dataclass(frozen=True)
class Rule:
    """id: stable. stage: which dtype it decides. when, then: for the reader. source: who promises it."""

    id: str
    stage: str
    when: str
    then: str
    source: str


RULES: tuple[Rule, ...] = (
    Rule(
        "storage-frozen",
        "storage",
        "frozen, neither pinned nor kept, and a buffer or not sharded; the policy has a param dtype",
        "the policy's param dtype: one rounding of the loaded value",
        "cast_frozen_modules_to_compute_dtype",
    ),
    Rule(
        "storage-intrinsic",
        "storage",
        "pinned by a class of Automodel's own",
        "fp32, whatever is requested: the loaded value, widened exactly",
        "components/models/common/gated_delta_net_fp32",
    ),
    Rule(
        "storage-native",
        "storage",
        "loaded by a class of Automodel's own",
        "the requested dtype, the config's for `auto`: one rounding of the loaded value",
        "NeMoAutoModelForCausalLM.from_pretrained, local_torch_dtype",
    ),
    Rule("storage-made", "storage", "a buffer that no checkpoint holds", "fp32, as it is made", "transformers"),
    Rule("storage-auto", "storage", "requested `auto`", "the file's dtype", "_restore_loaded_model_dtype"),
    Rule(
        "storage-wider",
        "storage",
        "an explicit request",
        "the wider of the file's and the requested dtype (fp32 where bf16 meets fp16): widened exactly, never rounded",
        "_restore_loaded_model_dtype",
    ),
    Rule("compute-alone", "compute", "not sharded, or a buffer", "the storage dtype", "FSDP2 is not there to cast"),
    Rule("compute-pinned", "compute", "pinned", "fp32", "_keep_in_fp32_modules_strict"),
    Rule(
        "compute-recorded",
        "compute",
        "sharded by dtype, loaded from a file",
        "the file's dtype",
        "fully_shard_by_dtype, _hf_compute_dtype",
    ),
    Rule(
        "compute-fallback",
        "compute",
        "sharded by dtype, nothing recorded",
        "the policy's param dtype where it is stored in fp32 and there is one, else the storage dtype",
        "fully_shard_by_dtype",
    ),
    Rule("compute-policy", "compute", "the policy has a param dtype", "that dtype", "MixedPrecisionPolicy"),
    Rule("compute-storage", "compute", "otherwise", "the storage dtype", "MixedPrecisionPolicy"),
    Rule("reduce-alone", "reduce", "not sharded, or a buffer", "the compute dtype", "nothing is reduced"),
    Rule(
        "reduce-fp32",
        "reduce",
        "sharded by dtype or pinned, and it computes in fp32",
        "fp32",
        "fully_shard_by_dtype, _mp_policy_with_param_dtype",
    ),
    Rule("reduce-policy", "reduce", "the policy has a reduce dtype", "that dtype", "MixedPrecisionPolicy"),
    Rule("reduce-compute", "reduce", "otherwise", "the compute dtype", "MixedPrecisionPolicy"),
    Rule("state-storage", "state", "always", "the storage dtype", "torch.optim, zeros_like"),
)
"""In order: of the rules of a stage, the first that fits decides."""


def wider(first: str, second: str) -> str:
    """The narrowest dtype that holds every value of both: torch.promote_types."""
    if first == second:
        return first
    return "fp32" if _WIDTH[first] == _WIDTH[second] else max(first, second, key=_WIDTH.__getitem__)


def dtypes(tensor: Tensor, requested: str, policy: Policy, *, by_dtype: bool) -> Dtypes:
    """The contract of one tensor.

    Args:
        requested: the dtype asked of the loader, or `auto`; the config's dtype for `auto` where a class is native.
        by_dtype: sharded by resolved compute dtype (`fully_shard_by_dtype`), not by FSDP2 alone.
    """
    storage, why_storage = _storage(tensor, requested, policy)
    compute, why_compute = _compute(tensor, storage, policy, by_dtype)
    reduce, why_reduce = _reduce(compute, why_compute, policy)
    return Dtypes(storage, compute, reduce, storage, (why_storage, why_compute, why_reduce, "state-storage"))


def _storage(tensor: Tensor, requested: str, policy: Policy) -> tuple[str, str]:
    if policy.param and tensor.frozen and not (tensor.pinned or tensor.kept) and (tensor.buffer or not tensor.sharded):
        return policy.param, "storage-frozen"
    if tensor.native:
        return ("fp32", "storage-intrinsic") if tensor.pinned else (requested, "storage-native")
    if tensor.file is None:
        return "fp32", "storage-made"
    if requested == AUTO:
        return tensor.file, "storage-auto"
    return wider(tensor.file, requested), "storage-wider"


def _compute(tensor: Tensor, storage: str, policy: Policy, by_dtype: bool) -> tuple[str, str]:
    if tensor.buffer or not tensor.sharded:
        return storage, "compute-alone"
    if tensor.pinned:
        return "fp32", "compute-pinned"
    if by_dtype and tensor.native:
        return (policy.param if policy.param and storage == "fp32" else storage), "compute-fallback"
    if by_dtype and tensor.file is not None:
        return tensor.file, "compute-recorded"
    return (policy.param, "compute-policy") if policy.param else (storage, "compute-storage")


def _reduce(compute: str, why_compute: str, policy: Policy) -> tuple[str, str]:
    if why_compute == "compute-alone":
        return compute, "reduce-alone"
    if compute == "fp32" and why_compute in ("compute-pinned", "compute-recorded", "compute-fallback"):
        return "fp32", "reduce-fp32"
    return (policy.reduce, "reduce-policy") if policy.reduce else (compute, "reduce-compute")


RECIPE_PIPELINE, RECIPE_POLICY, RECIPE_STORAGE = "recipe_pipeline", "recipe_policy", "recipe_storage"
"""What of a recipe's parsing is looked at: the dtype between pipeline stages, texts that name no policy, and the
storage dtype of a run that asks for none."""

REFUSED = "refused"


def recipe(asked: str, policy: Policy, output: str | None) -> dict[str, str]:
    """What a recipe's texts must come to: name → a dtype, or that the text is refused.

    Stages exchange activations, which have the policy's output dtype, else its param dtype. A text that names no dtype,
    and no policy, must not fall back to another. Torch's optimizers keep no masters, so that a run that trains every
    parameter and names no storage dtype stores fp32.
    """
    match asked:
        case "recipe_pipeline":
            return {"pipeline.dtype": str(output or policy.param)}
        case "recipe_policy":
            refused = dict.fromkeys(("unknown_dtype", "unknown_target", "no_mapping"), REFUSED)
            return {"good": f"param_dtype={policy.param}"} | refused
        case "recipe_storage":
            return {"unset": "fp32", "auto": "fp32", "bf16": "bf16", "adapters": "None", "other_optimizer": "None"}
        case _:
            raise ValueError(f"a recipe has no {asked!r}")
