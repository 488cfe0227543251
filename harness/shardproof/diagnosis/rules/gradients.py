"""Rules for wrong gradient reductions: a constant factor, a missing contribution, or an overflow that was not
skipped.

The probe's grid makes every rank's and microbatch's contribution known, so that a missing one is recognised
exactly, not by its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from statistics import median
from typing import Any

import numpy as np

from shardproof import probe
from shardproof.diagnosis.arrangement import DISTINCT
from shardproof.diagnosis.explanation import Context, Finding, Floats, Pair, Rule, tensor
from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.logical import Key
from shardproof.program import STEPS, Op
from shardproof.scenario import Mesh

LINEAR_ROLES = ("grad", "exp_avg", "momentum", "norm", "quant_scale")

CLIPPED = {"fp32": 2.0**-20, "fp64": 2.0**-20, "fp16": 2.0**-9, "bf16": 2.0**-6}
"""How far, relative to each other, the factors lie apart by which one clipping scaled gradients of a dtype: a value is
rounded before it is scaled and after it."""

HALF = ("fp16", "bf16")

ROUNDING = 2.0**-16
"""A factor that is closer to 1 is another rounding, not a wrong count: kernels round 1 - beta differently, say."""


def scaled(difference: Difference, context: Context) -> Finding | None:
    """All deviating elements are the expected ones times one factor (TT-1551, MLM-3023: divided by the wrong count)."""
    pair, key = context.pair(difference), difference.key
    if pair is None or not pair.is_float or key.role not in LINEAR_ROLES or len(pair.at) < 2:
        return None
    if not np.isfinite([pair.got, pair.wanted]).all() or not pair.wanted.all():
        return None
    factors = pair.got / pair.wanted
    factor = median(factors.tolist())
    if factor == 0.0 or abs(factor - 1.0) < ROUNDING:
        return None
    known = " or ".join(name for name, number in _known_factors(context, key.op) if _exactly(pair, number))
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
    return assembled(difference, context, _partial_sums)


def reduced_twice(difference: Difference, context: Context) -> Finding | None:
    """The gradient was averaged, and what came out was reduced, or added to, once more (MLM-6357, MLM-6660)."""
    return assembled(difference, context, _second_reductions)


def narrowed_sum(difference: Difference, context: Context) -> Finding | None:
    """The gradient is what comes out if contributions are added in a narrower dtype (AM-2484, PT-186998)."""
    return assembled(difference, context, _narrow_sums) if _is_roughly_right(difference, context) else None


def _is_roughly_right(difference: Difference, context: Context) -> bool:
    """Whether a gradient is off by no more than its additions could have rounded away in bf16. An overflow in fp16 may
    be anything."""
    key, pair = difference.key, context.pair(difference)
    op = context.op(key.op)
    if pair is None or op is None or key.role != "grad" or op.kind != "step" or context.scenario.optimizer.clip:
        return True
    every = _contributions(key.fqn, op, context)[..., pair.at]
    number = every.shape[0] * every.shape[1]
    allowed = np.abs(every).sum(axis=(0, 1)) * (number + 2) * 2.0**-7 / every.shape[1]
    off = np.abs(pair.got - every.sum(axis=(0, 1)) / every.shape[1])
    return not np.isfinite(off).all() or bool((off <= allowed).all())


def assembled(
    difference: Difference, context: Context, hypotheses: Callable[[Floats, Mesh], Iterator[tuple[str, Floats]]]
) -> Finding | None:
    """The first hypothesis that gives every deviating element its bits.

    A hypothesis is a name and the gradients it allows, shape (alternatives, numel): where ranks differ, each
    element may follow another one, since each belongs to some rank's shard.
    """
    key, pair = difference.key, context.pair(difference)
    op = context.op(key.op)
    if pair is None or op is None or key.role != "grad" or op.kind != "step":
        return None
    contributions = _contributions(key.fqn, op, context)
    if context.scenario.optimizer.clip:
        return _assembled_and_clipped(difference, context, pair, hypotheses(contributions, op.mesh), contributions)
    dtype = numpy_dtype(pair.expected.dtype)
    for name, values in hypotheses(contributions, op.mesh):
        rounded = np.ascontiguousarray(values[:, pair.at].astype(dtype))
        if (rounded.view(pair.observed_bits.dtype) == pair.observed_bits).any(axis=0).all():
            clause = f"{tensor(key)} is {name}, after {context.op_name(key.op)}"
            return Finding(pair.strength, clause, {"name": key.fqn, "is": name})
    return None


def _assembled_and_clipped(
    difference: Difference, context: Context, pair: Pair, hypotheses: Iterator[tuple[str, Floats]], every: Floats
) -> Finding | None:
    """The first hypothesis that, times one factor, is the gradient; clipping took the factor of a norm that is wrong
    too. None where the right gradient is, times a factor: then only the norm was wrong."""
    key, got = difference.key, as_numbers(pair.observed).astype(np.float64)
    close, right = CLIPPED[pair.expected.dtype], every.sum(axis=(0, 1)) / every.shape[1]
    if times_a_factor(right[None], got, close) or len(np.unique(got)) <= DISTINCT:
        return None
    factors = [] if pair.expected.dtype in HALF else _clipping_factors(key, right, context)
    for name, values in hypotheses:
        if times_a_factor(values, got, close) or any(_each_times(f, values, got, close) for f in factors):
            clause = f"{tensor(key)} is {name}, and was clipped, after {context.op_name(key.op)}"
            return Finding("likely", clause, {"name": key.fqn, "is": name})
    return None


def times_a_factor(alternatives: Floats, got: Floats, close: float) -> bool:
    """Whether one of some alternatives, each of shape (numel,), is a gradient but for one factor."""
    for values in alternatives:
        there = values != 0
        if not there.any() or (got[~there] != 0).any():
            continue
        factors = got[there] / values[there]
        if factors.min() > 0 and np.ptp(factors) <= close * factors.max():
            return True
    return False


def _clipping_factors(key: Key, right: Floats, context: Context) -> list[float]:
    """By what a gradient may have been clipped: as it must be, since the norm that a library clips by may be rounded;
    and by the norm that was observed."""
    expected, there = as_numbers(context.expected[key]).astype(np.float64), right != 0
    if not there.any():
        return []
    due = median((expected[there] / right[there]).tolist())
    norm = key._replace(role="norm", fqn="total_norm")
    wanted, got = (float(as_numbers(n)[0]) if n else 0.0 for n in (
        context.expected.get(norm), context.observed.get(norm)))  # fmt: skip
    return [due, due * wanted / got] if got and np.isfinite(got) else [due]


def _each_times(factor: float, alternatives: Floats, got: Floats, close: float) -> bool:
    """Whether every element is, times a factor, that of some alternative, each of shape (numel,)."""
    return bool((np.abs(alternatives * factor - got) <= close * np.abs(got)).any(axis=0).all())


def _contributions(fqn: str, op: Op, context: Context) -> Floats:
    """Every microbatch's and data-parallel rank's gradient, shape (microbatches, dp, numel)."""
    return context.once(("contributions", fqn, op.index), partial(_contributions_of, fqn, op, context))


def _contributions_of(fqn: str, op: Op, context: Context) -> Floats:
    inputs, dp = context.inputs, op.mesh.dp
    param = inputs.builds[inputs.operations[op.index].build].by_name[fqn]
    shared = context.scenario.expert_parallel if context.model.param(fqn).spec.ep_dim is not None else 1
    ranks, numel = dp // shared, prod(param.shape)
    assert param.gradient is not None
    grid = param.gradient
    keys = [probe.element_keys(use, param.shape, inputs.seed) for use in param.uses]
    units = [
        sum((probe.rank_units(k, op.iteration, m, ranks, grid) for k in keys), np.zeros((ranks, numel), np.int64))
        for m in range(inputs.microbatches)
    ]
    return np.repeat(np.stack(units), dp // ranks, axis=1).astype(np.float64) * np.float64(grid.unit)


def _contributors(every: Floats) -> int:
    """How many data-parallel ranks contribute anything. What one contributes alone is the sum times a factor."""
    return int(np.count_nonzero(every.any(axis=(0, 2))))


def _partial_sums(every: Floats, mesh: Mesh) -> Iterator[tuple[str, Floats]]:
    """Sums that leave contributions out: some that are zero all over are not left out. every: shape (microbatches, dp,
    numel)."""
    batches, dp, _ = every.shape
    for m in range(batches) if batches > 1 else ():
        if every[m].any():
            yield f"the average over all microbatches but {m}", np.delete(every, m, 0).sum(axis=(0, 1))[None] / dp
        if np.delete(every, m, 0).any():
            yield f"the average of microbatch {m} alone", every[m].sum(axis=0)[None] / dp
    for r in np.flatnonzero(every.any(axis=(0, 2))).tolist() if dp > 1 else ():
        rest = np.delete(every, r, 1).sum(axis=(0, 1))
        yield (
            f"the sum over all data-parallel ranks but {r}, divided by {dp} or {dp - 1}",
            np.stack([rest / dp, rest / (dp - 1)]),
        )
    if 1 < mesh.dp_shard < dp:
        groups = every.sum(axis=0).reshape(mesh.dp_replicate, mesh.dp_shard, -1)
        averages = [groups.sum(axis=1) / mesh.dp_shard, groups.sum(axis=1) / dp]
        yield "the average over one replica group alone", np.concatenate(averages)
        averages = [groups.sum(axis=0) / mesh.dp_replicate, groups.sum(axis=0) / dp]
        yield "the average over one shard index of all replicas alone", np.concatenate(averages)
    if _contributors(every) > 1:
        own = every.sum(axis=0)
        yield "one data-parallel rank's own contribution alone", np.concatenate([own, own / dp])
    if batches > 1 and dp > 1:
        reduced = every[:-1].sum(axis=(0, 1)) / dp
        late = np.concatenate([reduced + every[-1], reduced + every[-1] / dp])
        yield "the average of all microbatches but the last plus one rank's own last one", late


def _second_reductions(every: Floats, mesh: Mesh) -> Iterator[tuple[str, Floats]]:
    """What a second reduction makes of an average. every: shape (microbatches, dp, numel).

    An average lies where its owner keeps it, beside what the other ranks still hold of their own: a second reduction
    mixes the two. Each element may have another owner.
    """
    batches, dp, _ = every.shape
    if _contributors(every) > 1 and (every != every[:, :1]).any():  # else an average and one rank's own are the same
        own = every.sum(axis=0)
        mean = own.sum(axis=0)[None] / dp
        yield (
            "its average over the ranks, averaged once more with the other ranks' own gradients",
            ((mean + own.sum(axis=0) - own) / dp),
        )
        yield "its average over the ranks plus one rank's own gradient", np.concatenate([mean + own, mean + own / dp])
    for count in sorted({dp, mesh.dp_replicate, mesh.dp_shard} - {1}) if batches > 1 else ():
        kept = np.zeros_like(every[0])
        for batch in every:
            kept = (kept + batch) / count
        yield (
            f"divided by {count} again with every microbatch",
            np.stack([kept.sum(axis=0), kept.sum(axis=0) * count / dp]),
        )
    if batches > 1:
        kept = np.zeros_like(every[0])
        for batch in every:
            kept = 2 * kept + batch
        yield "doubled with every further microbatch", np.concatenate([kept / dp, kept.sum(axis=0)[None] / dp])


def _narrow_sums(every: Floats, mesh: Mesh) -> Iterator[tuple[str, Floats]]:
    """Averages whose partial sums are rounded. every: shape (microbatches, dp, numel)."""
    for name in ("bf16", "fp16"):
        dtype = numpy_dtype(name)
        accumulated = np.zeros_like(every[0])
        with np.errstate(over="ignore"):
            for batch in every:
                accumulated = (accumulated + batch).astype(dtype).astype(np.float64)
            if len(every) > 1:
                yield f"accumulated over microbatches in {name}", accumulated.sum(axis=0)[None] / mesh.dp
            single = every.astype(dtype).astype(np.float64)
            yield f"the average of contributions rounded to {name}", single.sum(axis=(0, 1))[None] / mesh.dp
            for what, ranks in (("reduced", every.sum(axis=0)), ("accumulated and reduced", accumulated)):
                yield f"{what} in {name}", _averaged(reduced_in(ranks, dtype), dtype, mesh)
                within = _averaged(_reduced_in_replicas(ranks, dtype, mesh), dtype, mesh)
                yield f"{what} in {name} within replicas", within
            once = _rounded(every.sum(axis=(0, 1))[None], dtype)
            yield f"an average whose sum was rounded to {name}", _averaged(once, dtype, mesh)
            if len(every) > 1:
                of_batches = np.stack([_reduced(batch, dtype, mesh) for batch in every])
                yield f"reduced in {name} with every microbatch", of_batches.sum(axis=0)
                in_fp32 = of_batches.astype(np.float32).sum(axis=0)
                yield f"reduced in {name} with every microbatch, and added in fp32", in_fp32.astype(np.float64)


def _reduced(ranks: Floats, dtype: np.dtype[Any], mesh: Mesh) -> Floats:
    """The averages over the ranks of one microbatch, by every order of adding; the sums rounded after each addition, or
    once, or the average."""
    whole = ranks.sum(axis=0)[None]
    sums = [reduced_in(ranks, dtype), _reduced_in_replicas(ranks, dtype, mesh), _rounded(whole, dtype)]
    return np.concatenate([*(_averaged(each, dtype, mesh) for each in sums), _rounded(whole / mesh.dp, dtype)])


def _averaged(sums: Floats, dtype: np.dtype[Any], mesh: Mesh) -> Floats:
    """Sums over the number of ranks: divided exactly, or in the narrower dtype too, which shows unless the number is a
    power of two."""
    return np.concatenate([sums / mesh.dp, _rounded(sums / mesh.dp, dtype)])


def _rounded(values: Floats, dtype: np.dtype[Any]) -> Floats:
    rounded: Floats = values.astype(dtype).astype(np.float64)
    return rounded


def _reduced_in_replicas(ranks: Floats, dtype: np.dtype[Any], mesh: Mesh) -> Floats:
    """The sum over each replica's ranks, rounded after every addition, then that of the replicas' sums: exact, or
    rounded too. Shape (alternatives, numel)."""
    replicas = [reduced_in(own, dtype) for own in ranks.reshape(mesh.dp_replicate, mesh.dp_shard, -1)]
    exact: Floats = np.sum(replicas, axis=0)
    return np.concatenate([exact, exact.astype(dtype).astype(np.float64)])


def reduced_in(ranks: Floats, dtype: np.dtype[Any]) -> Floats:
    """The sum over ranks, rounded after every addition: a ring adds each of its chunks from another rank on, in one
    direction. Shape (alternatives, numel)."""
    sums = []
    for order in (ranks, ranks[::-1]):
        for first in range(len(ranks)):
            reduced = np.zeros_like(ranks[0])
            for rank in np.roll(order, -first, axis=0):
                reduced = (reduced + rank).astype(dtype).astype(np.float64)
            sums.append(reduced)
    return np.stack(sums)


def no_gradient(difference: Difference, context: Context) -> Finding | None:
    """A parameter that a step must have had a gradient of had none, while others had theirs: it was cut off from the
    graph, or the optimizer held another object (TE-2713e)."""
    key = difference.key
    if difference.kind != "missing" or key.role != "grad" or context.op_kind(key.op) != "step":
        return None
    param = key._replace(role="param")
    before, after = (context.observed.get(param._replace(op=op)) for op in (key.op - 1, key.op))
    unmoved = after is not None and after == before
    if not any(other[:3] == key[:3] for other in context.observed) and not (unmoved and _stateless(key, context)):
        return None  # no gradient was observed of any parameter: the step may have been skipped
    clause = f"{tensor(key)} was not there in {context.op_name(key.op)}"
    clause += ", and the parameter is as before it" if unmoved else ""
    return Finding("certain" if unmoved else "likely", clause, {"name": key.fqn, "unmoved": unmoved})


def _stateless(key: Key, context: Context) -> bool:
    """Whether a parameter that must have optimizer state by now has none."""
    kept = [key._replace(role=role) for role in ("exp_avg", "exp_avg_sq", "momentum")]
    wanted = [state for state in kept if state in context.expected]
    return bool(wanted) and not any(state in context.observed for state in wanted)


def skipped_again(difference: Difference, context: Context) -> Finding | None:
    """The step after one that overflowed is skipped as well, and halves the loss scale once more: the gradient that
    overflowed is still there (MLM-6871)."""
    key, pair = difference.key, context.pair(difference)
    if (key.role, key.fqn, key.where) != ("scaler", "scale", "live") or pair is None:
        return None
    taken = [op.kind for op in context.ops[: key.op + 1] if op.kind in STEPS]
    if context.op_kind(key.op) != "step" or taken[-2:-1] != ["overflow"]:
        return None
    before = context.observed.get(key._replace(op=key.op - 1))
    if before is None or float(as_numbers(before)[0]) != 2 * pair.got[0]:
        return None
    clause = f"{context.op_name(key.op)} halved the loss scale to {pair.got[0]:g}, as the overflow before it did"
    return Finding("certain", clause, {"name": key.fqn, "expected": pair.wanted[0], "observed": pair.got[0]})


def stepped_without_gradient(difference: Difference, context: Context) -> Finding | None:
    """A parameter that had a gradient before and has none in a step was stepped all the same (MLM-6871)."""
    key = difference.key
    if key.where != "live" or key.role not in MOVED or context.op_kind(key.op) != "step":
        return None
    was, must, seen = key._replace(op=key.op - 1), context.expected.get(key), context.observed.get(key)
    stays = must is not None and must == context.expected.get(was) == context.observed.get(was)
    gradients = [key._replace(op=op, role="grad") in context.expected for op in range(key.op + 1)]
    if not stays or seen is None or gradients[-1] or not any(gradients):
        return None
    clause = f"{tensor(key)} moved in {context.op_name(key.op)}, in which nothing has a gradient of it"
    return Finding("certain", clause, {"name": key.fqn})


MOVED = ("step", "exp_avg", "exp_avg_sq", "momentum", "master", "param")
"""Roles that a step changes, and a step without a gradient leaves alone."""


def gradient_kept(difference: Difference, context: Context) -> Finding | None:
    """The gradient of an earlier step was added, or not yet cleared."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or key.role != "grad":
        return None
    total = as_numbers(pair.expected).astype(np.float64)
    for index, value in context.earlier(key):
        total = total + as_numbers(value).astype(np.float64)
        if pair.explained_by(value._replace(data=total.astype(numpy_dtype(value.dtype)).tobytes())):
            clause = (
                f"{tensor(key)} after {context.op_name(key.op)} contains the gradients since {context.op_name(index)}"
            )
            return Finding(pair.strength, clause, {"name": key.fqn, "since_op": index})
    return _kept_and_clipped(difference, context, pair) if context.scenario.optimizer.clip else None


def _kept_and_clipped(difference: Difference, context: Context, pair: Pair) -> Finding | None:
    """As above where both steps clip: what was kept is the sum before clipping, known from the contributions."""
    key, got = difference.key, as_numbers(pair.observed).astype(np.float64)
    steps = [op for op in context.ops[: key.op + 1] if op.kind == "step"][::-1]
    if not steps or steps[0].index != key.op or len(np.unique(got)) <= DISTINCT:
        return None
    close = CLIPPED[pair.expected.dtype]
    total = _average(key.fqn, steps[0], context)
    if times_a_factor(total[None], got, close):
        return None  # only the norm was wrong
    for op in steps[1:]:
        total = total + _average(key.fqn, op, context)
        if times_a_factor(total[None], got, close):
            clause = f"{tensor(key)} after {context.op_name(key.op)} contains the gradients since "
            clause += f"{context.op_name(op.index)}, and was clipped"
            return Finding("likely", clause, {"name": key.fqn, "since_op": op.index})
    return None


def _average(fqn: str, op: Op, context: Context) -> Floats:
    """What a step's gradient is before it is clipped, shape (numel,)."""
    average: Floats = _contributions(fqn, op, context).sum(axis=(0, 1)) / op.mesh.dp
    return average


def overflow_not_skipped(difference: Difference, context: Context) -> Finding | None:
    """A step with an infinite gradient left a trace in the state instead of being skipped."""
    key, pair = difference.key, context.pair(difference)
    stepped = ("param", "master", "exp_avg", "exp_avg_sq", "momentum", "step")
    if context.op_kind(key.op) != "overflow" or key.role not in stepped:
        return None
    if pair is None and difference.kind not in ("extra", "missing", "replica_conflict"):
        return None
    broken = pair is not None and pair.is_float and not np.isfinite(pair.got).all()
    where = f" on ranks {list(difference.ranks)}" if difference.ranks else ""
    clause = (
        f"{tensor(key)} {'became infinite or NaN' if broken else 'was changed'} by {context.op_name(key.op)}{where}"
    )
    return Finding("certain", clause, {"name": key.fqn, "role": key.role, "ranks": list(difference.ranks)})


RULES = (
    Rule("no_gradient", "Parameters had no gradient", no_gradient, ("TE-2713e", "ACC-3835")),
    Rule(
        "missing_contribution",
        "A gradient lacks contributions",
        missing_contribution,
        ("DS-7981", "DS-7985", "AM-3135", "PT-102901"),
    ),
    Rule(
        "reduced_twice",
        "Gradients were reduced more than once",
        reduced_twice,
        ("MLM-6357", "MLM-6660", "MLM-6773"),
    ),
    Rule("gradient_kept", "Gradients of earlier steps were not cleared", gradient_kept, ("MLM-6871",)),
    Rule("narrowed_sum", "Gradients were added in a narrower dtype", narrowed_sum, ("AM-2484", "PT-186998", "AM-3540")),
    Rule("scaled", "Values have the wrong scale", scaled, ("TT-1551", "MLM-3023")),
)

ABSENT = (
    Rule(
        "stepped_without_gradient",
        "A parameter without a gradient was stepped",
        stepped_without_gradient,
        ("MLM-6871",),
    ),
)

OVERFLOW = (
    Rule("overflow_not_skipped", "A step that overflowed was not skipped", overflow_not_skipped, ("ACC-4289",)),
    Rule("skipped_again", "A step was skipped for an overflow before it", skipped_again, ("MLM-6871",)),
)
