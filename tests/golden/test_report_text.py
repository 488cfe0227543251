"""What a user reads on the terminal, word for word."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import report_samples as samples
from shardproof.report.text import render_result, render_text, wants_colour
from shardproof.verdict import Verdict

RUN = """\
run 20260102-030405-abcd   seed 7   torch 2.13.0
emulated: CUDA streams

system       version  pass  unsupported  mismatch  crash  hang  unknown  total  seconds
-----------  -------  ----  -----------  --------  -----  ----  -------  -----  -------
torch-fsdp2  2.13.0      2            2         2      1     1        1      9     23.2
reference    2.13.0      1            0         0      0     0        0      1      0.2

1. No verdict, since shardproof itself failed: twin and reference disagree  [1 scenario]
   torch-fsdp2 unknown: twin and reference disagree
   twin and reference disagree
   scenario: system=torch-fsdp2 seed=7
   replay: shardproof replay {unknown}

2. Loading: state was cast to the parameter's dtype: first moments of embed.weight, bf16 instead of fp32  [2 scenarios, 1 first seen, 1 seen before]
   torch-fsdp2 mismatch: load: exp_avg dtype, param bits, written step missing
   wrong_dtype (certain; compare https://github.com/NVIDIA/Megatron-LM/issues/1842)
   State was cast to the parameter's dtype: exp_avg of embed.weight <script>alert(1)</script>.
   smallest: system=torch-fsdp2 dtype=bf16 mesh=1x2x1 offload=cpu
   where: dtype=bf16: 2 such scenarios fail and none passes; 2 others pass
   failed at operation 8 (load)
     exp_avg embed.weight, operation 8 on ranks 0, 1: dtype
       dtype bf16 instead of fp32
       Expected 0.125 (0x3e000000) but got 0.125 (0x3e00)
     step norm.<script>alert(1)</script> (written), operation 8: missing
       Expected 2.0 (0x40000000) but got nothing
     param up.weight, operation 8 on rank 1: bits
       Mismatched elements: 37 / 112 (33.0%), from index (8, 0) to (15, 6)
       Greatest difference: 513 ULP
       Expected 0.5 (0x3f000000) but got 0.5000001 (0x3f000001)
   replay: shardproof replay {mismatch}

3. Saving raised RuntimeError: size of tensor a (3) must match b (4) <script>alert(1)</script>  [1 scenario, 1 first seen, emulated only: not seen on a GPU yet]
   {crash_signature}
   builtins.RuntimeError on rank 5: size of tensor a (3) must match b (4) <script>alert(1)</script>\x00
   scenario: system=torch-fsdp2 mesh=1x8x1
   failed at operation 3 (save)
   replay: shardproof replay {crash}

4. Loading never ended  [1 scenario, 1 first seen, known issue torch-fsdp2-1]
   torch-fsdp2 hang: load: deadline: rank N did not answer for N s
   deadline on rank 3: rank 3 did not answer for 20 s
   scenario: system=torch-fsdp2 program=unfreeze
   failed at operation 8 (load)
   replay: shardproof replay {hang}

not finished: 1 planned scenarios have no verdict ({missing})
unsupported: 2 × torch-fsdp2: FSDP2 offloads all of a unit or nothing
equivalent: 1 × torch-fsdp2: exp_avg: zeros
excluded: 120 combinations for 1 reason, see the report

3 pass, 3 new, 1 known, 2 unsupported, 1 unknown
by cause: 1 unknown, 2 new, 1 known
report: reports/nightly/index.html
"""  # noqa: E501


def test_a_run_with_everything() -> None:
    expected = RUN.format(
        unknown=samples.unknown().id,
        mismatch=samples.mismatch().id,
        crash_signature=samples.crash().signature,
        crash=samples.crash().id,
        hang=samples.hang().id,
        missing=samples.scenario(seed="99").id,
    )
    assert render_text(samples.report(), Path("reports/nightly/index.html")) == expected.replace("\x00", "")


def test_a_clean_run_is_short() -> None:
    clean = replace(samples.report(samples.passing()), missing=(), before={})
    clean = replace(clean, run=replace(clean.run, exclusions={}))
    assert render_text(clean) == (
        "run 20260102-030405-abcd   seed 7   torch 2.13.0\n\n"
        "system       version  pass  total  seconds\n"
        "-----------  -------  ----  -----  -------\n"
        "torch-fsdp2  2.13.0      1      1      0.2\n\n"
        "1 pass\n"
    )


def test_an_empty_run_says_so() -> None:
    text = render_text(replace(samples.report(), results=(), missing=()))
    assert "nothing was run" in text
    assert "no results" in text


def test_one_result_in_full() -> None:
    result = replace(samples.crash(), error=replace(samples.crash().error, message="broken", traceback="A\n  B"))  # type: ignore[type-var]
    assert render_result(result) == (
        f"crash  torch-fsdp2 2.13.0  {result.id}\n"
        "  Saving raised RuntimeError: broken\n"
        "  scenario: system=torch-fsdp2 mesh=1x8x1\n"
        "  failed at operation 3 (save)\n"
        "  emulated: CUDA streams\n"
        "  builtins.RuntimeError on rank 5: broken\n\n"
        "  A\n    B\n"
    )
    on_gpu = render_result(replace(result, device="1 x H200"), emulated_only=True)
    assert "  device: 1 x H200\n  emulated only: not seen on a GPU yet\n" in on_gpu
    compared = "wrong_dtype (certain; compare https://github.com/NVIDIA/Megatron-LM/issues/1842): State was cast"
    assert compared in render_result(samples.mismatch())


def test_colour_changes_nothing_but_colour() -> None:
    coloured = render_text(samples.report(), colour=True)
    assert "\x1b[31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_text(samples.report())


def test_hostile_text_cannot_control_the_terminal() -> None:
    sneaky = replace(samples.unknown(), reason="\x1b[2J\x07gone", verdict=Verdict.UNKNOWN)
    text = render_text(samples.report(sneaky))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x1b" not in render_result(sneaky)


def test_when_to_colour() -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    assert wants_colour(terminal, {})
    assert wants_colour(terminal, {"NO_COLOR": ""})
    assert not wants_colour(terminal, {"NO_COLOR": "1"})
    assert not wants_colour(terminal, {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {})


def test_a_failure_on_what_upstream_never_supported_says_so_and_cures_that_do_not_apply_are_counted() -> None:
    pair = "torch 2.15.0: upstream tested with 2.10"
    left = {"2874": "the code moved: a.py, line 1640", "3882": "the code moved: b.py, line 341"}
    told = render_text(samples.report(replace(samples.crash(), outside_support=(pair,), not_cured=left)))
    assert "   Upstream does not say that it works with torch 2.15.0\n" in told
    assert "; 2 cures do not apply to this release, which the report names\n" in told
    assert "line 1640" not in told
    assert "\nit ran on torch 2.15.0; upstream does not say that the release works with it: `--torch VERSION`" in told


def test_a_traceback_in_the_reason_is_folded() -> None:
    reason = (
        "lib 1 cannot be imported here: ValueError: S\nTraceback (most recent call last):\n  File x\nValueError: S\n"
    )
    told = render_text(samples.report(replace(samples.unknown(), reason=reason)))
    assert "   lib 1 cannot be imported here: ValueError: S (4 lines in the report)\n" in told
    assert "Traceback" not in told
