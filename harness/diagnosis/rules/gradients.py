"""Reduction mistakes: a constant factor, a contribution that is missing, an overflow that was not skipped.

The probe's grid makes every rank's and microbatch's contribution known, so that a missing one is recognised
exactly, not by its size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from harness import probe
from harness.diagnosis.explanation import Context, Finding, Pair, Rule, tensor
from harness.diff import Difference, numpy_dtype
from harness.oracle.contracts import stages

LINEAR_ROLES = ("grad", "exp_avg", "momentum", "norm")


def scaled(difference: Difference, context: Context) -> Finding | None:
    """All deviating elements are the expected ones times one factor (TT-1551, MLM-3023: divided by the wrong count)."""
    pair, key = context.pair(difference), difference.key
    if pair is None or not pair.is_float or key.role not in LINEAR_ROLES or not np.isfinite(pair.got).all():
        return None
    if not pair.wanted.all() or len(pair.at) < 2:
        return None
    factors = pair.got / pair.wanted
    factor = float(np.median(factors))
    if abs(factors - factor).max() > abs(factor) * 2.0**-6 or factor in (0.0, 1.0):
        return None
    known = next((name for name, number in _known_factors(context, key.op) if _exactly(pair, number)), "")
    if not known and abs(factors - factor).max() > abs(factor) * 2.0**-20:
        return None
    clause = f"{tensor(key)} is {known or f'{factor:.6g}'} times what it must be after {context.op_name(key.op)}"
    evidence = {"name": key.fqn, "role": key.role, "factor": factor, "known_as": known}
    return Finding("certain" if known else "likely", clause, evidence)


def _exactly(pair: Pair, factor: float) -> bool:
    dtype = numpy_dtype(pair.expected.dtype)
    with np.errstate(over="ignore"):
        scaled_bits = np.frombuffer((pair.wanted * factor).astype(dtype).tobytes(), pair.observed_bits.dtype)
    return bool((scaled_bits == pair.observed_bits).all())


def _known_factors(context: Context, index: int) -> Iterator[tuple[str, float]]:
    op = context.op(index)
    if op is None:
        return
    mesh = op.mesh
    counts = {
        "the number of data-parallel ranks": mesh.dp,
        "dp_shard": mesh.dp_shard,
        "dp_replicate": mesh.dp_replicate,
        "tp": mesh.tp,
        "the world size": mesh.world,
        "the number of microbatches": context.scenario.microbatches,
        "the loss scale": context.scenario.optimizer.loss_scale,
    }
    for name, count in counts.items():
        if count > 1:
            yield f"{name} ({count:g})", float(count)
            yield f"1 / {name} (1/{count:g})", 1.0 / count
    yield "2", 2.0
    yield "1/2", 0.5


def missing_contribution(difference: Difference, context: Context) -> Finding | None:
    """The gradient is the exact sum of some contributions only (DS-7981, DS-7985, AM-3135)."""
    key, pair = difference.key, context.pair(difference)
    op = context.op(key.op)
    if pair is None or op is None or key.role != "grad" or op.kind != "step" or context.scenario.optimizer.clip:
        return None
    contributions = _contributions(key.fqn, op.iteration, op.mesh.dp, context)
    dtype = numpy_dtype(pair.expected.dtype)
    for name, kept in _hypotheses(contributions.shape[0], op.mesh.dp, op.mesh.dp_shard):
        total = contributions[kept].sum(axis=0)[pair.at]
        for divisor in sorted({op.mesh.dp, int(kept.any(axis=0).sum())}, reverse=True):
            value = (total / divisor).astype(dtype)
            if (np.frombuffer(value.tobytes(), pair.observed_bits.dtype) == pair.observed_bits).all():
                clause = f"{tensor(key)} consists of {name}, divided by {divisor}, after {context.op_name(key.op)}"
                evidence = {"name": key.fqn, "contributions": name, "divisor": divisor}
                return Finding(pair.strength, clause, evidence)
    return None


def _contributions(fqn: str, iteration: int, dp: int, context: Context) -> npt.NDArray[np.float64]:
    """Every microbatch's and data-parallel rank's gradient, shape (microbatches, dp, numel)."""
    scenario, param = context.scenario, context.model.param(fqn)
    stage = stages(scenario, param.spec)
    grid = probe.choose_grid(
        (stage.accumulate, stage.reduce, stage.main_grad), stage.compute, dp, scenario.microbatches
    )
    keys = [probe.element_keys(use, param.spec.shape, scenario.seed) for use in context.model.uses(fqn)]
    units = [
        sum((probe.rank_units(k, iteration, m, dp, grid) for k in keys), np.zeros((dp, param.spec.numel), np.int64))
        for m in range(scenario.microbatches)
    ]
    return np.stack(units).astype(np.float64) * np.float64(grid.unit)


def _hypotheses(microbatches: int, dp: int, dp_shard: int) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Which contributions might have been kept: a name, and a mask of shape (microbatches, dp)."""

    def mask(batches: object = slice(None), ranks: object = slice(None)) -> npt.NDArray[np.bool_]:
        chosen = np.zeros((microbatches, dp), np.bool_)
        chosen[batches, ranks] = True  # type: ignore[index]
        return chosen

    if microbatches > 1:
        for m in range(microbatches):
            yield f"all microbatches but {m}", ~mask(m)
            yield f"microbatch {m} alone", mask(m)
    if dp > 1:
        for r in range(dp):
            yield f"all data-parallel ranks but {r}", ~mask(ranks=r)
            yield f"data-parallel rank {r} alone", mask(ranks=r)
    if 1 < dp_shard < dp:
        for j in range(dp // dp_shard):
            yield f"replica group {j} alone", mask(ranks=slice(j * dp_shard, (j + 1) * dp_shard))
    if microbatches > 1 and dp > 1:
        for r in range(dp):
            local_last = mask(slice(0, microbatches - 1)) | mask(microbatches - 1, r)
            yield f"all but the last microbatch, and rank {r}'s share of that", local_last


def overflow_not_skipped(difference: Difference, context: Context) -> Finding | None:
    """A step with an infinite gradient left a trace in the state instead of being skipped."""
    key, pair = difference.key, context.pair(difference)
    if context.op_kind(key.op) != "overflow" or key.role in ("scaler", "compute_param", "buffer", "hyperparameter"):
        return None
    if pair is None and difference.kind not in ("extra", "missing"):
        return None
    broken = pair is not None and pair.is_float and not np.isfinite(pair.got).all()
    clause = f"{tensor(key)} {'became infinite or NaN' if broken else 'was updated'} by {context.op_name(key.op)}"
    return Finding("certain" if broken else "likely", clause, {"name": key.fqn, "role": key.role})


RULES = (
    Rule(
        "missing_contribution",
        "A gradient lacks contributions",
        missing_contribution,
        ("DS-7981", "DS-7985", "AM-3135", "PT-102901"),
    ),
    Rule("scaled", "A gradient has the wrong scale", scaled, ("TT-1551", "MLM-3023")),
    Rule("overflow_not_skipped", "A step that overflowed was applied", overflow_not_skipped, ("ACC-4289",)),
)
