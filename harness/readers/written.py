"""What a scenario's save wrote, and what it had to write: the reader and the expectation that fit its system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from harness.models import model_spec
from harness.observe.logical import Key, Logical, Value
from harness.observe.record import LIVE, NUMPY_NAME, WRITTEN, Record
from harness.oracle.contracts import masters_in_state, rounds_half_away, stages
from harness.program import Op
from harness.readers.automodel import as_exported, read_automodel
from harness.readers.checkpoint import expected_written, read_checkpoint
from harness.readers.fsdp_dtensor import read_fsdp_dtensor
from harness.readers.megatron import read_megatron
from harness.readers.megatron_fsdp import read_megatron_fsdp, stored_as
from harness.scenario import Scenario

FSDP = "fsdp_dtensor"
"""Megatron-Core's format that stores of each parameter what the optimizer steps on, and nothing else of it."""

_ONE = np.float32(1)

MEGATRON, BRIDGE = "megatron-core", "megatron-bridge"
AUTOMODEL, MEGATRON_FSDP = "automodel", "megatron-fsdp"

FUSED_STEP = "transformer-engine"
"""The system whose FusedAdam counts steps in the param group, and keeps no count of a parameter's own."""

UNTIED = ("dp_zero", "plain")
"""Formats of Megatron-Core that store a tied parameter under every name: the others under its own only."""

GATHERED = ("dp_zero", "dp_zero_gather_scatter", "fully_reshardable")
"""Formats that gather state into buffers of fp32 first, integers too."""

IN_FP32 = frozenset({"master", "exp_avg", "exp_avg_sq"})
"""What Megatron-Core's distributed optimizer stores in fp32 whatever dtype it keeps it in."""


def read_written(path: Path, op: Op, scenario: Scenario) -> list[Record]:
    """The `written` records of the checkpoint that the save `op` of a scenario left at `path`.

    Raises:
        CheckpointError: missing, truncated, foreign, inconsistent or hostile.
    """
    if scenario.system == MEGATRON and scenario.checkpoint == FSDP:
        return read_fsdp_dtensor(path, op, scenario)
    if scenario.system == MEGATRON:
        return read_megatron(path, op, scenario)
    if scenario.system == BRIDGE:
        return read_megatron(path / f"iter_{op.iteration:07d}", op, scenario)
    if scenario.system == AUTOMODEL:
        return read_automodel(path, op, scenario)
    if scenario.system == MEGATRON_FSDP:
        return read_megatron_fsdp(path, op.index, scenario)
    return read_checkpoint(path, op.index, model_spec(scenario.model))


def must_be_written(live: Logical, op: Op, scenario: Scenario) -> Logical:
    """What the checkpoint of the save `op` must hold, from the oracle's live values after it."""
    model = model_spec(scenario.model)
    if scenario.system == AUTOMODEL:
        scenario = replace(scenario, checkpoint=f"{scenario.checkpoint}+flatten")  # always, in its optimizer's state
    written = expected_written({k: v for k, v in live.items() if k.where == LIVE}, scenario, model)
    if scenario.system == AUTOMODEL:
        return as_exported(written, scenario)
    if scenario.system == FUSED_STEP and scenario.optimizer.impl == "multi_tensor":
        scales = {k.fqn: v for k, v in live.items() if k.role == "quant_scale"}
        kept = {k: v for k, v in live.items() if k.role == "quant_scale" and k.fqn.endswith(".param")}
        written |= {k._replace(where=WRITTEN): v for k, v in kept.items()}
        return _as_fused_adam_stores(written, scales, scenario)
    if scenario.system == BRIDGE:
        written = {key: value for key, value in written.items() if key.role in ("param", "buffer")}
    elif scenario.system == MEGATRON_FSDP:
        return _masters_for_params(written, scenario)
    elif scenario.system != MEGATRON:
        return written
    count = np.int64(op.iteration).tobytes()
    written[Key(op.index, WRITTEN, "iteration", "iteration")] = Value("int64", (), count)
    aliases = {p.fqn for p in model.params if p.spec.tied_to is not None}
    form = scenario.checkpoint.partition("+")[0]
    kept = {k: v for k, v in written.items() if form in UNTIED or k.role != "param" or k.fqn not in aliases}
    if form == FSDP:
        mastered = {p.fqn for p in model.params if stages(scenario, p.spec).master}
        return {k: v for k, v in kept.items() if k.role != "param" or k.fqn not in mastered}
    scales = {k.fqn: v for k, v in live.items() if k.role == "quant_scale"}
    return {key: _as_stored(key, value, scales, scenario) for key, value in kept.items()}


def _as_fused_adam_stores(written: Logical, scales: Mapping[str, Value], scenario: Scenario) -> Logical:
    """Moments and masters in fp32, a remainder as it is, and the steps as a number of each group (of each parameter
    where groups are flattened). scales: of what is scaled, by `{parameter}.{role}`."""
    stored: Logical = {}
    flat = "flatten" in scenario.checkpoint.split("+")[1:]
    groups = {
        fqn: key.fqn.partition(".")[0]
        for key, value in written.items()
        if key.role == "hyperparameter" and key.fqn.endswith(".params")
        for fqn in value.data.decode().split("\n")
    }
    for key, value in written.items():
        if key.role == "step":
            number = np.frombuffer(value.data, np.float32).astype(np.float64).tobytes()
            owner = key.fqn if flat else groups[key.fqn]
            stored[key._replace(role="hyperparameter", fqn=f"{owner}.step")] = Value("fp64", (), number)
            continue
        if key.role == "master":
            spec = model_spec(scenario.model).param(key.fqn).spec
            if rounds_half_away(scenario, stages(scenario, spec)):
                stored[key] = _remainder(value)
                continue
        stored[key] = _in_fp32(value, scales.get(f"{key.fqn}.{key.role}")) if key.role in IN_FP32 else value
    return stored


def _masters_for_params(written: Logical, scenario: Scenario) -> Logical:
    """Under every name of a parameter that has a master, the master; one in the optimizer's state as that has it."""
    model = model_spec(scenario.model)
    if masters_in_state(scenario):
        return {key: _as_state(key, value, scenario) for key, value in written.items()}
    kept = {key: value for key, value in written.items() if key.role != "master"}
    for key in [key for key in kept if key.role == "param" and stored_as(model, key.fqn, scenario) == "master"]:
        own = key._replace(role="master")
        kept[own] = written[own._replace(fqn=model.param(key.fqn).spec.tied_to or key.fqn)]
        del kept[key]
    return kept


def _as_state(key: Key, value: Value, scenario: Scenario) -> Value:
    """A value as FusedAdam's state dict has it, none of it scaled: remainders for masters, the moments in fp32."""
    if key.role == "master":
        spec = model_spec(scenario.model).param(key.fqn).spec
        return _remainder(value) if rounds_half_away(scenario, stages(scenario, spec)) else _in_fp32(value)
    return _in_fp32(value) if key.role in IN_FP32 else value


def _as_stored(key: Key, value: Value, scales: Mapping[str, Value], scenario: Scenario) -> Value:
    """A live value as Megatron-Core's formats store it. scales: of what is scaled, by `{parameter}.{role}`."""
    if scenario.sharding != "zero1" or key.role not in IN_FP32:
        return value
    if key.role == "master":
        spec = model_spec(scenario.model).param(key.fqn).spec
        if rounds_half_away(scenario, stages(scenario, spec)):
            value = _remainder(value)
            return _in_fp32(value) if scenario.checkpoint.partition("+")[0] in GATHERED else value
    return _in_fp32(value, scales.get(f"{key.fqn}.{key.role}"))


def _remainder(master: Value) -> Value:
    """What FusedAdam keeps of an fp32 master beside its bf16 parameter: the lower 16 bits."""
    words = np.frombuffer(master.data, "<u2").reshape(-1, 2)
    return Value("int16", master.shape, words[:, 0].tobytes())


def _in_fp32(value: Value, scale: Value | None = None) -> Value:
    if value.dtype == "fp32":
        return value
    stored = np.frombuffer(value.data, ml_dtypes.bfloat16 if value.dtype == "bf16" else NUMPY_NAME[value.dtype])
    wide = stored.astype(np.float32)
    if scale is not None:
        with np.errstate(all="ignore"):
            factor = np.frombuffer(scale.data, np.float32)
            wide = wide * (factor if value.dtype == "fp16" else _ONE / (_ONE / factor))
    return Value("fp32", value.shape, wide.tobytes())
