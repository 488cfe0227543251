"""A comparison with a difference of every kind and hostile text wherever text comes out of a file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from report_samples import HOSTILE
from shardproof.compare.differences import STRUCTURE, Comparison, EntryDifference, Side

BITS = EntryDifference(
    f"optim.state.{HOSTILE}.exp_avg", "exp_avg", "bits", "fp32 4×4", "fp32 4×4", 3, 16, (0, 1), (3, 3),
    "1.5 (0x3fc00000)", "nan (0x7fc00001)", 12, 1, (("0", 1), ("8-15", 1), ("nan", 1)), 2, 4,
    mechanism="swapped", explanation=f"B has here what A has under {HOSTILE}.",
)  # fmt: skip


def comparison() -> Comparison:
    structure = [
        EntryDifference(
            f"model.{kind}.{HOSTILE}", "param", kind, f"fp32 {HOSTILE}", "bf16 3", detail=f"in B, {HOSTILE}"
        )
        for kind in STRUCTURE
    ]
    value = EntryDifference(f"lr.{HOSTILE}", "hyperparameter", "value", f"{HOSTILE} (str)", "0.1 (float)")
    side = Side(f"a/{HOSTILE}", "file of torch.save", 9, 1, 1234567, (f"os.{HOSTILE}",))
    compared = Counter(param=8, exp_avg=2, hyperparameter=1)
    found = (*structure, BITS, replace(BITS, name="t" * 300), value)
    return Comparison(side, side, found, compared, 160, f"try {HOSTILE}", 10, checksums=False, left_out=3)
