"""Titles in plain words: what went wrong, on one line, for every verdict, mechanism and kind of difference.

*Verifies*: the sentence of a dozen failures, that nothing is too long or breaks a line, and that every mechanism of the
built-in rules has a phrase. *Does not verify*: that a reader likes them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import report_samples as samples
from shardproof.diagnosis import Explanation
from shardproof.diagnosis.rules.engine import BUILT_IN
from shardproof.diff import STRUCTURE, Difference
from shardproof.observe.courses import RankCourse
from shardproof.observe.logical import Key
from shardproof.result import FailedOp, Failure, Result
from shardproof.verdict import Verdict
from shardproof.wording.error_place import place_of
from shardproof.wording.titles import KINDS, LONGEST, PHRASES, shortened, title

TRACE = """Traceback (most recent call last):
  File "/home/me/harness/shardproof/world/rank.py", line 10, in run
    system.load()
  File "/x/site-packages/torch/distributed/checkpoint/state_dict.py", line 612, in _init_optim_state
    assert state.step == 0
  File "/usr/lib/python3.11/contextlib.py", line 81, in inner
    return func()
"""


def failure(
    *differences: Difference, mechanism: str = "", text: str = "", evidence: tuple[dict[str, object], ...] = (),
    op: str = "save",
) -> Result:  # fmt: skip
    explanations = (Explanation(mechanism, "certain", text, evidence, ()),) if mechanism else ()
    return replace(
        samples.passing(), verdict=Verdict.MISMATCH, failed_op=FailedOp(1, op), differences=differences,
        explanations=explanations,
    )  # fmt: skip


def difference(role: str, name: str, kind: str = "bits", where: str = "live", **fields: object) -> Difference:
    return Difference(Key(1, where, role, name), kind, **fields)  # type: ignore[arg-type]


def crash(message: str, kind: str = "builtins.AssertionError", traceback: str = TRACE) -> Result:
    error = Failure(kind, message, 0, traceback, 1)
    return replace(samples.passing(), verdict=Verdict.CRASH, failed_op=FailedOp(1, "load"), error=error)


CREATED = failure(
    *(difference(role, name, "extra", observed_first=f"{float(role == 'step')} (0x00000000)")
      for name in ("a", "b") for role in ("exp_avg", "exp_avg_sq", "step")),
    mechanism="initialising_step", text="State was created: a.",
    evidence=tuple({"name": name, "role": role} for name in ("a", "b") for role in ("exp_avg", "exp_avg_sq", "step")),
)  # fmt: skip
MOMENTUM = failure(
    difference("momentum", "a", "extra"), mechanism="initialising_step", text="State was created: a.",
    evidence=({"name": "a", "role": "momentum"},),
)  # fmt: skip
SCALED = failure(
    *(difference(role, name) for role in ("exp_avg", "grad") for name in ("a", "b")), op="step",
    mechanism="scaled", text="Values have the wrong scale: a.", evidence=({"name": "a", "factor": 0.5}, {"name": "b"}),
)  # fmt: skip
SWAPPED = failure(
    *(difference(role, name, where="written") for role in ("exp_avg", "exp_avg_sq", "param") for name in ("a", "b")),
    mechanism="permuted_parameters", text="Whole tensors are stored under each other's names: a.",
    evidence=({"name": "a", "holds": "b", "roles": ["exp_avg", "exp_avg_sq"]}, {"name": "b", "holds": "a"}),
)  # fmt: skip
COUNTED = failure(
    difference("step", "a", total=1, mismatched=1, expected_first="2.0 (0x4)", observed_first="1.0 (0x3)"),
    difference("step", "b", total=1, mismatched=1), op="load",
    mechanism="counter_off", text="A counter does not count: a.", evidence=({"name": "a"}, {"name": "b"}),
)  # fmt: skip
PLUGIN = failure(
    difference("param", "a", mismatched=2, total=6, max_ulp=7), mechanism="of_a_plugin",
    text="Rows were {lost}: row 3.", evidence=({"name": "a"},),
)  # fmt: skip
ALONE = failure(difference("norm", "total_norm", "norm", total=1, mismatched=1, expected_first="2.0 (0x1)",
                           observed_first="3.0 (0x2)"), op="step")  # fmt: skip
BOTH = failure(
    difference("param", "a", "dtype", detail="dtype bf16 instead of fp32"), difference("master", "a", "dtype"),
    op="build",
)  # fmt: skip


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (CREATED, "Saving created optimizer state: AdamW's step is 1 for 2 parameters that never stepped"),
        (replace(CREATED, differences=CREATED.differences[:3]),
         "Saving created optimizer state: AdamW's step is 1 for a, which never stepped"),
        (MOMENTUM, "Saving created momentum of a that never stepped"),
        (SCALED, "The step gave gradients of 2 parameters the wrong scale: 0.5 times what it must be"),
        (SWAPPED, "Saving stored moments of 2 parameters under each other's names: a holds b's"),
        (COUNTED, "Loading left step counters of 2 parameters with a wrong count: a is 1 instead of 2"),
        (PLUGIN, "Saving: rows were {lost}: a, 2 of 6 elements, up to 7 ULP off"),
        (ALONE, "The gradient norm is off: 3 instead of 2"),
        (BOTH, "Building the model left a and its masters in another dtype: bf16 instead of fp32"),
        (failure(difference("exp_avg", "a", "missing", "written")), "The checkpoint lacks first moments of a"),
        (failure(difference("of_a_plugin", "a", "gap")), "Saving left parts of of_a_plugin of a that no rank holds"),
        (crash(""), "Loading failed an assertion in _init_optim_state (state_dict.py:612)"),
        (crash("", "builtins.KeyError", ""), "Loading raised KeyError"),
        (crash("no such key."), "Loading raised AssertionError: no such key in _init_optim_state (state_dict.py:612)"),
        (crash("tensor([1., 2.])", "KeyError", ""), "Loading raised KeyError: tensor(…)"),
        (crash("Errors:\n\n  size", "X.Y", ""), "Loading raised Y: Errors: size"),
        (crash("no /a/very/long/path/file.pt", "OSError", ""), "Loading raised OSError: no …/file.pt"),
        (crash("rank 2 ended", "died", ""), "Rank 0 died: loading did not end"),
        (replace(crash("rank 2 ended", "died", ""), failed_op=None, courses=(
            RankCourse(0, ((0, "op", 0.1),), "died", 0.2, "signal SIGKILL", first=True),)),
         "Rank 0 died: building the model did not end"),
        (crash("no end after 20 s, in load (op)\nrank 0 in load (op); rank 1 in load (op)", "deadline", ""),
         "Loading never ended: 2 ranks were still in it after 20 s"),
        (samples.hang(), "Loading never ended"),
        (samples.unknown(), "No verdict, since shardproof itself failed: twin and reference disagree"),
        (samples.unsupported(), "Refused: FSDP2 offloads all of a unit or nothing"),
        (samples.passing(), "Every compared bit is as expected"),
        (replace(CREATED, verdict=Verdict.NONDETERMINISTIC, explanations=()),
         "Not the same in fresh ranks: Saving created optimizer state of 2 parameters that must not exist"),
        (
            replace(samples.unknown(), reason="automodel 0.7.0 cannot be imported with triton 3.9.0: ValueError: S\nx"),
            "No verdict, since automodel 0.7.0 cannot be imported with triton 3.9.0: ValueError: S",
        ),
        (replace(samples.unknown(), reason=""), "No verdict, since shardproof itself failed: it does not say how"),
    ],
)  # fmt: skip
def test_titles(result: Result, expected: str) -> None:
    assert title(result) == expected


@pytest.mark.parametrize("result", samples.every_kind())
def test_a_title_is_one_short_line(result: Result) -> None:
    told = title(result)
    assert 0 < len(told) <= LONGEST
    assert told.isprintable()


@pytest.mark.parametrize("length", [10, 119, 120, 121, 5000])
@pytest.mark.parametrize("text", ["x", "word ", "a\nb\x1b[31m", "\u202egnp.exe "])
def test_whatever_a_library_says_fits(text: str, length: int) -> None:
    told = title(crash(text * length))
    assert len(told) <= LONGEST
    assert told.isprintable()


def test_a_long_text_is_cut_between_words() -> None:
    assert shortened("one two three four", 12) == "one two…"
    assert shortened("x" * 20, 12) == "x" * 11 + "…"


def test_every_rule_and_every_kind_has_a_phrase() -> None:
    assert {rule.mechanism for rule in BUILT_IN} <= PHRASES.keys()
    assert {*STRUCTURE, "bits", "norm", "direction"} == KINDS.keys()


@pytest.mark.parametrize("mechanism", PHRASES)
def test_a_phrase_needs_nothing_that_evidence_may_lack(mechanism: str) -> None:
    bare = failure(difference("param", "a"), mechanism=mechanism, text="Something: a.", evidence=({"name": "a"},))
    assert title(bare)
    assert "{" not in title(bare)


def test_the_place_of_an_error_is_the_library_s_innermost_frame() -> None:
    place = place_of(Failure("AssertionError", "", 0, TRACE))
    assert place is not None
    assert place.full == "torch/distributed/checkpoint/state_dict.py:612, in _init_optim_state"
    assert place.code == "assert state.step == 0"
    assert place_of(Failure("deadline", "no end", 0, TRACE)) is None
    assert place_of(Failure("KeyError", "x")) is None


def test_shardproof_is_no_library_once_it_is_installed() -> None:
    """An emulated device stands between a library and torch; with `pip install` it lies below site-packages, too."""
    device = '  File "/home/me/harness/shardproof/ownership.py", line 5, in hand_on\n    return function()\n'
    moved = device.replace("/home/me/harness/", "/home/me/.venv/lib/python3.11/site-packages/")
    found = [Failure("RuntimeError", "no", 0, TRACE + text) for text in ("", device, moved)]
    assert len({replace(failure(op="load"), verdict=Verdict.CRASH, error=error).signature for error in found}) == 1
    assert len({place_of(error) for error in found}) == 1
