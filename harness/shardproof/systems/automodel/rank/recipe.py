"""Calls NeMo Automodel's recipe code to see how texts in a configuration are resolved, each answer as one text. Rank
side.

*Verifies* nothing by itself: `dtype_contract.recipe` says what must come out.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from shardproof.mechanisms.probe_module import DTYPE_NAME
from shardproof.scenario import DTypePolicy
from shardproof.systems.automodel.dtype_contract import RECIPE_PIPELINE, RECIPE_POLICY, REFUSED

LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolved(asked: str, policy: DTypePolicy) -> dict[str, str]:
    """name → what a recipe's text comes to."""
    if asked == RECIPE_PIPELINE:
        section = {"pp_size": 2, "pipeline": {}, "mp_policy": _texts(policy)}
        return {"pipeline.dtype": _name(_parse()(section)["pipeline_config"].dtype)}
    if asked == RECIPE_POLICY:
        good = _texts(policy)
        wrong: dict[str, object] = {
            "unknown_dtype": {**good, "param_dtype": "bfloat61"},
            "unknown_target": {**good, "_target_": "torch.distributed.fsdp.NoSuchPolicy"},
            "no_mapping": "bfloat16",
        }
        # One text must be understood: a parser that refuses everything would pass otherwise.
        sound = {"good": f"param_dtype={_name(_policy(good).param_dtype)}"}
        return sound | {name: _outcome(value) for name, value in wrong.items()}
    return _storages()


def _policy(policy: object) -> Any:
    """What a recipe makes of its section `distributed`, read as the recipe reads it."""
    node = import_module("nemo_automodel.components.config.loader").ConfigNode({"mp_policy": policy})
    return _parse()(node.to_dict())["strategy_config"].mp_policy


def _outcome(policy: object) -> str:
    """`refused`, or what the text fell back to."""
    try:
        found = _policy(policy)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):
        return REFUSED
    return f"{type(found).__name__} {found}"


def _storages() -> dict[str, str]:
    resolve = import_module("nemo_automodel.components.optim.precision_warnings").resolve_storage_dtype
    torch_optimizer, other = {"_target_": "torch.optim.AdamW"}, {"_target_": "transformer_engine.FusedAdam"}
    cases: dict[str, tuple[dict[str, Any], dict[str, str], bool]] = {
        "unset": ({}, torch_optimizer, False),
        "auto": ({"torch_dtype": "auto"}, torch_optimizer, False),
        "bf16": ({"torch_dtype": "bfloat16"}, torch_optimizer, False),
        "adapters": ({}, torch_optimizer, True),
        "other_optimizer": ({}, other, False),
    }
    for model, optimizer, adapters in cases.values():
        resolve(model, optimizer, is_peft=adapters)
    short = {long: name for name, long in LONG.items()}
    return {name: str(short.get(m.get("torch_dtype", ""), m.get("torch_dtype"))) for name, (m, _, _) in cases.items()}


def _parse() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The parser of a recipe's `distributed` section, which moved in 0.5."""
    try:
        module = import_module("nemo_automodel.recipes._dist_utils")
    except ImportError:
        module = import_module("nemo_automodel.recipes._dist_setup")
    parse: Callable[[dict[str, Any]], dict[str, Any]] = module.parse_distributed_section
    return parse


def _texts(policy: DTypePolicy) -> dict[str, str]:
    named = {"param_dtype": policy.param, "reduce_dtype": policy.reduce, "output_dtype": policy.output}
    return {name: LONG[value] for name, value in named.items() if value}


def _name(dtype: Any) -> str:
    return DTYPE_NAME.get(dtype, str(dtype))
