"""Rules about ranks and aliases: replicas that diverged, tied parameters that came apart, gaps between shards, and a
single deviating rank."""

from __future__ import annotations

import numpy as np

from shardproof.diagnosis.explanation import Context, Finding, Rule, tensor
from shardproof.diagnosis.rules.gradients import CLIPPED
from shardproof.diagnosis.rules.pieces import wrong_coordinates
from shardproof.diff import Difference, as_numbers


def replicas_diverged(difference: Difference, context: Context) -> Finding | None:
    """Ranks that hold the same box hold different bits (AM-3135, AM-3822).

    Parts of a checkpoint that only claim the same box, and hold what belongs elsewhere, are no copies.
    """
    if difference.kind != "replica_conflict" or wrong_coordinates(difference, context) is not None:
        return None
    clause = f"{tensor(difference.key)} after {context.op_name(difference.key.op)}, {difference.detail}"
    return Finding("certain", clause, {"name": difference.key.fqn, "ranks": list(difference.ranks)})


def norms_differ(difference: Difference, context: Context) -> Finding | None:
    """Ranks computed different norms of the same gradient, so that each rank clips its shard by a different factor
    (TE-2713)."""
    if difference.kind != "replica_conflict" or difference.key.role != "norm":
        return None
    return replicas_diverged(difference, context)


def norm_of_a_part(difference: Difference, context: Context) -> Finding | None:
    """A norm that is not that of all elements: some were left out, or counted more than once (MLM-5916)."""
    expected, observed = context.expected.get(difference.key), context.observed.get(difference.key)
    if difference.kind != "norm" or expected is None or observed is None:
        return None
    wanted, got = (float(as_numbers(value)[0]) for value in (expected, observed))
    why = "as if elements were left out" if got < wanted else "as if elements were counted more than once"
    clause = f"{difference.key.fqn} is {got:.6g} instead of {wanted:.6g} after {context.op_name(difference.key.op)}"
    if not np.isfinite(got) or not clipped_alike(difference.key.op, context):
        return Finding("possible", clause, {"name": difference.key.fqn, "expected": wanted, "observed": got})
    return Finding("likely", f"{clause}, {why}", {"name": difference.key.fqn, "expected": wanted, "observed": got})


def clipped_alike(index: int, context: Context) -> bool:
    """Whether the gradients of a step are what they must be but for one common factor, or were not observed: then a
    wrong norm is a mistake of its own, and no consequence of theirs."""
    factors, close = [], 0.0
    for key, expected in context.expected.items():
        observed = context.observed.get(key) if key[:3] == (index, "live", "grad") else None
        if observed is None or (observed.dtype, observed.shape) != (expected.dtype, expected.shape):
            continue
        wanted, got = (as_numbers(value).astype(np.float64) for value in (expected, observed))
        there = wanted != 0
        if (got[~there] != 0).any():
            return False
        factors.append(got[there] / wanted[there])
        close = max(close, CLIPPED[expected.dtype])
    every = np.concatenate(factors) if factors else np.ones(1)
    return not every.size or bool(np.ptp(every) <= close * np.abs(every).max())


def bad_partition(difference: Difference, context: Context) -> Finding | None:
    """Shards leave elements out, overlap, or do not fit their boxes (MLM-5898, PT-150862, TE-2424)."""
    if difference.kind not in ("gap", "overlap", "size"):
        return None
    clause = f"{tensor(difference.key)} after {context.op_name(difference.key.op)}: {difference.detail}"
    evidence = {"name": difference.key.fqn, "kind": difference.kind, "ranks": list(difference.ranks)}
    return Finding("certain", clause, evidence)


def tie_split(difference: Difference, context: Context) -> Finding | None:
    """Two names of one parameter hold different bits (PT-188346, ACC-3154)."""
    key = difference.key
    known = next((p for p in context.model.params if p.fqn == key.fqn), None)
    if known is None or key.role not in ("param", "compute_param"):
        return None
    canonical = known.spec.tied_to or key.fqn
    own = context.observed.get(key)
    for other in context.model.params:
        value = context.observed.get(key._replace(fqn=other.fqn))
        tied = other.fqn != key.fqn and canonical in (other.fqn, other.spec.tied_to)
        if tied and value is not None and own is not None and value != own:
            clause = f"{key.role} of {key.fqn} and {other.fqn} differ after {context.op_name(key.op)}"
            return Finding("certain", clause, {"name": key.fqn, "tied_to": other.fqn})
    return None


def one_rank(difference: Difference, context: Context) -> Finding | None:
    """Part of a tensor deviates, on few ranks: what those have in common is the clue (DS-7601, TE-3318)."""
    op = context.op(difference.key.op)
    if op is None or not difference.ranks or difference.kind != "bits" or difference.key.where != "live":
        return None
    if len(difference.ranks) * 2 > op.mesh.world or difference.mismatched == difference.total:
        return None
    ranks = list(difference.ranks)
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    last = ", the last one" if ranks == [op.mesh.world - 1] else ""
    clause = f"{tensor(difference.key)} deviates on {which}{last} of {op.mesh.world}"
    return Finding("possible", clause, {"name": difference.key.fqn, "ranks": ranks})


RULES = (
    Rule("norms_differ", "Ranks clip by different norms", norms_differ, ("TE-2713",)),
    Rule("norm_of_a_part", "The gradient norm is not that of all gradients", norm_of_a_part, ("MLM-5916",)),
    Rule(
        "replicas_diverged",
        "Copies of one tensor are not equal",
        replicas_diverged,
        ("AM-3135", "AM-3822", "PT-176076", "DS-7985"),
    ),
    Rule(
        "tie_split",
        "A tied parameter fell apart",
        tie_split,
        ("PT-188346", "ACC-3154", "PT-176076", "PT-148825"),
    ),
    Rule(
        "bad_partition",
        "The shards do not add up to the tensor",
        bad_partition,
        ("PT-150862", "MLM-5898", "TE-2424", "TE-2795", "PT-136228", "DS-1380", "MLM-4423"),
    ),
)

GENERAL = (Rule("one_rank", "Only a part of the ranks is affected", one_rank, ("DS-7601", "TE-3318", "DS-2059")),)
