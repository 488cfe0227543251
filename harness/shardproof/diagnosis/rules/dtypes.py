"""Rules for values in a dtype other than the contract's, or rounded through a narrower dtype on the way.

For example, an fp32 moment whose low 16 bits are all zero, and whose upper bits are the expected ones rounded, went
through bf16.
"""

from __future__ import annotations

import numpy as np

from shardproof.diagnosis.explanation import Context, Finding, Rule, tensor
from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.assemble import as_bits

NARROWER = {"fp64": ("fp32", "fp16", "bf16"), "fp32": ("fp16", "bf16"), "fp16": ("bf16",), "bf16": (), "fp8e4m3": ()}


def other_dtype(difference: Difference, context: Context) -> Finding | None:
    """A tensor has another dtype than its contract says (AM-2419a, TT-4615, MLM-3014)."""
    expected, observed = context.expected.get(difference.key), context.observed.get(difference.key)
    if difference.kind != "dtype" or expected is None or observed is None:
        return None
    values = "with other values"
    if expected.shape == observed.shape and "utf8" not in (expected.dtype, observed.dtype):
        wanted, got = as_numbers(expected), as_numbers(observed)
        with np.errstate(over="ignore", invalid="ignore"):
            rounded, unrounded = wanted.astype(got.dtype), got.astype(wanted.dtype)
            equal = np.array_equal(wanted.astype(np.float64), got.astype(np.float64))
        if equal:
            values = "with equal values"
        elif rounded.tobytes() == got.tobytes():
            values = "with the values rounded to it"
        elif unrounded.tobytes() == wanted.tobytes():
            values = f"with values that were not rounded to {expected.dtype}"
    clause = f"{tensor(difference.key)} is {observed.dtype} instead of {expected.dtype}, {values}"
    evidence = {"name": difference.key.fqn, "expected": expected.dtype, "observed": observed.dtype, "values": values}
    return Finding("certain", f"{clause}, after {context.op_name(difference.key.op)}", evidence)


def narrowed(difference: Difference, context: Context) -> Finding | None:
    """The bits are the expected ones rounded to a narrower dtype and widened again (FO-2, AM-2549, ORB-2714)."""
    pair = context.pair(difference)
    if pair is None:
        return None
    for name in NARROWER.get(pair.expected.dtype, ()):
        own = as_numbers(pair.expected)
        with np.errstate(over="ignore", invalid="ignore"):
            through = own.astype(numpy_dtype(name)).astype(own.dtype)
        if through.tobytes() == pair.observed.data:
            key = difference.key
            clause = f"{tensor(key)} was rounded to {name} by {context.op_name(key.op)}"
            evidence = {"name": key.fqn, "role": key.role, "through": name, "elements": len(pair.at)}
            return Finding(pair.strength, clause, evidence)
    return None


def partly_narrowed(difference: Difference, context: Context) -> Finding | None:
    """As `narrowed`, but only some elements: one rank's shard, or one bucket, took a narrower path (MLM-2895)."""
    pair = context.pair(difference)
    if pair is None or narrowed(difference, context) is not None:
        return None
    for name in NARROWER.get(pair.expected.dtype, ()):
        own = as_numbers(pair.expected)
        with np.errstate(over="ignore", invalid="ignore"):
            through = own.astype(numpy_dtype(name)).astype(own.dtype)
        if (np.frombuffer(through.tobytes(), as_bits(pair.expected).dtype)[pair.at] == pair.observed_bits).all():
            key = difference.key
            clause = f"{len(pair.at)} of {difference.total} elements of {tensor(key)} were rounded to {name}"
            evidence = {"name": key.fqn, "role": key.role, "through": name, "ranks": list(difference.ranks)}
            return Finding(pair.strength, f"{clause} by {context.op_name(key.op)}", evidence)
    return None


RULES = (
    Rule(
        "other_dtype",
        "A dtype is not the one that the contract says",
        other_dtype,
        ("AM-2419a", "TT-4615", "MLM-3014", "FS-56", "AM-1896", "TT-4166", "FS-427", "FS-705", "MLM-RX67"),
    ),
    Rule(
        "narrowed",
        "Values went through a narrower dtype",
        narrowed,
        ("FO-2", "AM-2549", "AM-2484", "AM-2419c", "ORB-2714", "PT-186998", "TT-4166", "FS-56", "TT-4615"),
    ),
    Rule("partly_narrowed", "Some elements went through a narrower dtype", partly_narrowed, ("MLM-2895",)),
)
