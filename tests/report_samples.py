"""Results of every verdict, with hostile text, and a report made of them: input of the report tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from shardproof.diagnosis import Explanation
from shardproof.diff import Difference, diff, numpy_dtype
from shardproof.issues.known_issues import KnownIssue, KnownIssues, Pattern
from shardproof.observe.assemble import assemble
from shardproof.observe.courses import RankCourse
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import Record, whole
from shardproof.report.model import Report
from shardproof.result import ArmResult, FailedOp, Failure, Reproduced, Result
from shardproof.scenario import Scenario
from shardproof.store import Run
from shardproof.store_history import Past
from shardproof.tensor_pictures import pack_elements
from shardproof.verdict import Verdict

HOSTILE = "<script>alert(1)</script>"


def scenario(**axes: str) -> Scenario:
    return Scenario().with_axes(axes)


def passing(seed: int = 0, system: str = "torch-fsdp2", **axes: str) -> Result:
    return Result(scenario(system=system, seed=str(seed), **axes), system, "2.13.0", Verdict.PASS, duration_s=0.25)


def mismatch(**axes: str) -> Result:
    differences = (
        Difference(
            Key(8, "live", "exp_avg", "embed.weight"), "dtype", (0, 1), 60, 60, expected_digest="a" * 16,
            observed_digest="b" * 16, expected_first="0.125 (0x3e000000)", observed_first="0.125 (0x3e00)",
            detail="dtype bf16 instead of fp32",
        ),
        Difference(
            Key(8, "written", "step", f"norm.{HOSTILE}"), "missing", (), 1, 1, expected_digest="c" * 16,
            expected_first="2.0 (0x40000000)",
        ),
        Difference(
            Key(8, "live", "param", "up.weight"), "bits", (1,), 37, 112, (8, 0), (15, 6), 513, 2,
            (("1", 11), ("2-3", 14), ("512-1023", 10), ("nan", 2)), "d" * 16, "e" * 16,
            "0.5 (0x3f000000)", "0.5000001 (0x3f000001)", "", ((56, 20), (78, 17)),
        ),
    )  # fmt: skip
    explanation = Explanation(
        "wrong_dtype", "certain", f"State was cast to the parameter's dtype: exp_avg of embed.weight {HOSTILE}.",
        ({"name": "embed.weight", "expected": "fp32", "observed": "bf16", "ranks": [0, 1]},), ("MLM-1842",),
    )  # fmt: skip
    return Result(
        scenario(system="torch-fsdp2", dtype="bf16", mesh="1x2x1", offload="cpu", **axes), "torch-fsdp2", "2.13.0",
        Verdict.MISMATCH, 0.5, FailedOp(8, "load"), differences, (explanation,), reproduced=Reproduced(1, 1),
        phases_s={"session 0": 0.4, "judge": 0.1},
    )  # fmt: skip


def crash(**axes: str) -> Result:
    error = Failure(
        "builtins.RuntimeError", f"size of tensor a (3) must match b (4) {HOSTILE}\x00\nsecond line", 5,
        f"Traceback:\n  File 'state_dict.py'\n{HOSTILE}", 3,
    )  # fmt: skip
    return Result(
        scenario(system="torch-fsdp2", mesh="1x8x1", **axes), "torch-fsdp2", "2.13.0", Verdict.CRASH, 1.5,
        FailedOp(3, "save"), error=error, reproduced=Reproduced(1, 1), emulated=("CUDA streams",),
    )  # fmt: skip


def struck() -> Result:
    """A crash whose ranks left a trace: one raised, one echoed it, one was killed and one was done."""
    begun = ((-1, "start", 0.01), (-1, "construct", 0.02), (0, "op", 0.05), (0, "observe", 0.06), (0, "record", 0.07))
    stepped = (*begun, (1, "op", 0.08))
    return replace(crash(), courses=(
        RankCourse(0, stepped, "raised", 0.26, f"RuntimeError: Connection closed by peer {HOSTILE}"),
        RankCourse(1, (*stepped, (1, "observe", 0.2)), "raised", 0.21, f"KeyError: {HOSTILE}", first=True),
        RankCourse(2, stepped, "killed", 1.22),
        RankCourse(3, begun, "killed", 1.22),
        RankCourse(4, stepped, "killed", 1.22),
        RankCourse(5, begun, "done", 0.2),
    ))  # fmt: skip


def hang(known: str | None = "torch-fsdp2-1") -> Result:
    return Result(
        scenario(system="torch-fsdp2", program="unfreeze"), "torch-fsdp2", "2.13.0", Verdict.HANG, 20.0,
        FailedOp(8, "load"), error=Failure("deadline", "rank 3 did not answer for 20 s", 3, op=8), known_issue=known,
    )  # fmt: skip


def unsupported(seed: int = 0) -> Result:
    reason = "FSDP2 offloads all of a unit or nothing"
    return replace(passing(seed, offload="cpu=0.5"), verdict=Verdict.UNSUPPORTED, reason=reason, duration_s=0.0)


def unknown() -> Result:
    return replace(passing(7), verdict=Verdict.UNKNOWN, reason="twin and reference disagree")


def equivalent() -> Result:
    lazy = Difference(Key(5, "live", "exp_avg", "dead.weight"), "equivalent", mismatched=12, total=12, detail="zeros")
    return replace(passing(8), normalisations=(lazy,))


def cell() -> Result:
    """A trainer's cell that failed. Its system is known to no process here, as for a reader without the file."""
    gone = tuple(Difference(Key(op, "live", "exp_avg", "0.weight"), "missing", total=8, mismatched=8) for op in (7, 12))
    return Result(
        scenario(system="my_trainer:Mine", program="arms", options="mesh=4+forgets=true"), "my_trainer:Mine", "2.13.0",
        Verdict.MISMATCH, 3.5, FailedOp(7, "load"), gone,
        arms=(
            ArmResult("twice", "pass", ""),
            ArmResult("resumed", "mismatch", f"`load` restored no {HOSTILE} of 1 parameter.", (f"rng {HOSTILE}",)),
            ArmResult("used", "mismatch", "A trainer that has stepped is left with its own exp_avg."),
        ),
        state=("found: model: module, Linear", f"hidden: cache: iterator {HOSTILE}", "gradients are exact"),
        sessions={
            "uninterrupted": ("build", "step", "step", "save", "step", "step"), "resumed": ("build", "load", "step"),
            "used": ("build", "step", "load", "load"),
        },
    )  # fmt: skip


def every_kind() -> tuple[Result, ...]:
    return (
        passing(1), passing(2, "reference"), mismatch(), mismatch(seed="3"), crash(), hang(), unsupported(),
        unsupported(1), unknown(), equivalent(),
    )  # fmt: skip


ISSUES = KnownIssues(
    (
        KnownIssue(
            "torch-fsdp2-1", "Loading after unfreezing hangs.", "torch-fsdp2", "state_dict.py:612 (2.13.0)", "2.6.0",
            "https://github.com/pytorch/pytorch/issues/1", "regressions/torch-fsdp2-1.toml",
            Pattern(("load",), ("deadline: *",), {"program": ("unfreeze",)}),
        ),
    )
)  # fmt: skip

RUN = Run(
    "20260102-030405-abcd", "2026-01-02T03:04:05.000+00:00", "2026-01-02T03:14:05.000+00:00",
    ("shardproof", "run", "nightly"), 7, {"torch": "2.13.0"}, {"world above 8": 120},
)  # fmt: skip


def report(*results: Result) -> Report:
    shown = results or every_kind()
    before = {mismatch().id: Past("20260101-030405-abcd", "2.13.0", Verdict.MISMATCH, mismatch().signature)}
    return Report(RUN, shown, (scenario(seed="99"),), before, ISSUES)


def many(passes: int = 9_500, failures: int = 500) -> Report:
    """A run as large as a nightly of everything: results of a few axes, and failures of 21 causes, most of them known.
    The same in every call."""
    axes = [
        {"dtype": dtype, "mesh": mesh, "offload": offload, "optimizer": optimizer, "program": program}
        for dtype in ("fp32", "bf16", "mixed", "fp32/param=bf16/reduce=fp32")
        for mesh in ("1x2x1", "2x2x1", "1x4x1", "1x8x1", "2x2x2", "1x1x4")
        for offload in ("none", "cpu")
        for optimizer in ("adamw", "sgd", "adamw/impl=fused")
        for program in ("resume", "rollback", "twice", "model_only")
    ]
    results = [
        replace(
            passing(n // len(axes), SYSTEMS[n % 3], **axes[n % len(axes)]),
            verdict=Verdict.UNSUPPORTED if n % 20 == 0 else Verdict.PASS,
            duration_s=0.2 + n % 97 / 50,
        )
        for n in range(passes)
    ]
    for n in range(failures):
        cause = n % 21
        given = {**axes[(7 * n) % len(axes)], "program": "resume"}
        kept = scenario(system=SYSTEMS[cause % 3], seed=str(1000 + n), **given)
        sample = crash() if cause % 2 else mismatch()
        error = replace(sample.error, message=f"cause {chr(97 + cause)}") if sample.error else None
        shown = () if error else sample.differences[: 1 + cause % 3]
        told = () if error else (replace(sample.explanations[0], mechanism=f"mechanism_{cause}"),)
        known = None if cause < 3 else "torch-fsdp2-1"
        results.append(replace(sample, scenario=kept, system=kept.system, error=error, differences=shown,
                               explanations=told, known_issue=known))  # fmt: skip
    return Report(RUN, tuple(results), (), {}, ISSUES)


SYSTEMS = ("torch-fsdp2", "reference", "of-a-plugin")


def pictured(name: str = "up.weight") -> Result:
    """A mismatch with the elements of tensors of every dtype, among them what is easily lost: a NaN's payload, the sign
    of a zero, infinities, a value of one side alone, holes and copies that differ."""
    sides = {
        ("bits", "param", name, "fp32", (4, 6)): (range(24), {1: -1.0, 7: 7.000001, 23: float("inf")}),
        ("bits", "exp_avg", name, "bf16", (40,)): (range(40), {3: 9.0, 39: -0.0}),
        ("bits", "exp_avg_sq", name, "fp16", (2, 3, 4)): (range(24), {5: float("nan")}),
        ("bits", "quant", name, "fp8e4m3", (3, 3)): (range(9), {0: -0.0, 8: 448.0}),
        ("bits", "counts", name, "int64", (5,)): (range(5), {2: -(1 << 62)}),
        ("bits", "host", name, "bool", (2, 2)): ((0, 1, 1, 0), {0: 1}),
    }
    expected: Logical = {}
    records: list[Record] = []
    for (_, role, fqn, dtype, shape), (numbers, changed) in sides.items():
        right = np.array(list(numbers)).astype(numpy_dtype(dtype)).reshape(shape)
        wrong = right.copy()
        for at, value in changed.items():
            wrong.reshape(-1)[at] = value
        expected[Key(8, "live", role, fqn)] = Value(dtype, shape, right.tobytes())
        rows = shape[0] // 2
        for rank, (start, size) in enumerate(((0, rows), (rows, shape[0] - rows))):
            data = wrong[start : start + size].tobytes()
            box = (start, *(0 for _ in shape[1:])), (size, *shape[1:])
            records.append(Record(8, rank, "live", role, fqn, dtype, shape, *box, data))
    expected[Key(9, "live", "step", name)] = Value("fp32", (), np.float32(2).tobytes())
    records.append(whole(9, 0, "master", name, "fp32", (2,), np.array([np.nan, -0.0], np.float32).tobytes()))
    observed, problems = assemble(records)
    found = tuple(diff(expected, observed, problems, (), records))
    return replace(
        mismatch(), differences=found, explanations=(), elements=pack_elements(found, expected, observed, records)
    )
