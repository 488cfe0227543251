"""What an arm says of what it found: the numbers, where a library raised, and what to write where ranks differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Problem, Value
from shardproof.observe.record import LIVE
from shardproof.program import Op
from shardproof.result import Failure
from shardproof.scenario import Mesh
from shardproof.trainer.arms import WHOLE, Session
from shardproof.trainer.described import described
from shardproof.trainer.judge.after_load import Loaded, of_resumed
from shardproof.trainer.values import wording
from shardproof.trainer.values.every_mesh import of_both
from trainer_texts import text_of_trainer


@pytest.mark.parametrize(
    ("wrong", "right", "told"),
    [
        ("-9.536743306171047e-08", "-0.0062500000931322575", ", 65536 times as much"),
        ("1024.0", "1.0", ", 1/1024 of it"),
        ("2.0", "1.0", ""),
        ("3.0", "1.0", ""),
        ("-8.0", "1.0", ""),
        ("0.0", "1.0", ""),
        ("nan", "1.0", ""),
        ("nothing", "1.0", ""),
    ],
)
def test_a_loss_scale_is_told_as_a_factor(wrong: str, right: str, told: str) -> None:
    assert wording._as_a_factor(wrong, right) == told


def test_a_crash_names_the_line_of_the_library_that_raised(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text_of_trainer("steps = (1, 0)"))
    lines = [
        f'  File "{file}", line 9, in build',
        '  File "/x/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in _call_impl',
        '  File "/src/megatron/core/buffer.py", line 341, in start_param_sync',
        '  File "/x/lib/python3.11/site-packages/torch/_tensor.py", line 2, in __len__',
        '  File "/usr/lib/python3.11/functools.py", line 3, in wrapper',
    ]
    error = Failure("TypeError", "no len", 0, "\n".join(lines))
    resumed, trainer = Session("resumed", ()), "build (mine.py, line 9)"
    crash = wording.of_failure(resumed, error, described(str(file))).sentence
    assert crash == f"TypeError on rank 0 in {trainer}, raised by start_param_sync (core/buffer.py, line 341): no len"
    own = wording.of_failure(resumed, Failure("TypeError", "no len", 0, lines[0]), described(str(file)))
    assert own.sentence == f"TypeError on rank 0 in {trainer}: no len"


def test_a_crash_names_who_called_the_wrapper_that_raised(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text_of_trainer("steps = (1, 0)"))
    lines = [
        f'  File "{file}", line 9, in step',
        '  File "/src/deepspeed/pipe/engine.py", line 384, in train_batch',
        '  File "/src/deepspeed/pipe/engine.py", line 290, in _exec_reduce_tied_grads',
        '  File "/src/deepspeed/comm/comm.py", line 117, in log_wrapper',
        '  File "/src/deepspeed/comm/comm.py", line 496, in all_reduce',
        '  File "/src/deepspeed/comm/torch.py", line 152, in all_reduce',
    ]
    error = Failure("TypeError", "None", 0, "".join(f"{line}\n    call()\n" for line in lines))
    assert wording.of_failure(Session("resumed", ()), error, described(str(file))).sentence.endswith(
        "raised by all_reduce (comm/torch.py, line 152), called by _exec_reduce_tied_grads (pipe/engine.py, line 290), "
        "called by train_batch (pipe/engine.py, line 384): None"
    )


def test_what_to_write_where_each_rank_has_a_parameter_of_its_own() -> None:
    of = {role: Problem(Key(1, "live", role, "w"), "replica_conflict", (0, 1), "x") for role in ("param", "exp_avg")}
    assert "local" in wording.of_problems([of["param"]], [])
    assert "local" not in wording.of_problems([of["exp_avg"]], [])


def test_two_ways_are_not_compared_in_what_is_each_ranks_own() -> None:
    value = Value("fp32", (1,), bytes(4))
    whole = {("param", "head"): value, ("param", "experts"): value, ("exp_avg", "experts"): value}
    apart = {("param", "head"): value, ("param", "rank0.experts"): value, ("exp_avg", "rank0.experts"): value}
    both = of_both(whole, apart)
    assert both.one == both.other == {("param", "head"): value}
    assert both.left_out == {("param", "experts"), ("exp_avg", "experts")}
    assert both.settings == set()


def test_two_ways_are_compared_in_the_trainers_own_tensors() -> None:
    """A list of losses, or a moving average; numbers and texts that are not alike are named."""
    value, other, words = Value("fp32", (1,), bytes(4)), Value("fp32", (1,), b"1234"), Value("utf8", (3,), b"int")
    one = {("extra_state", "rank0.loss"): value, ("extra_state", "longer"): value, ("scheduler", "best"): words}
    one |= {("extra_state", "rank1.loss"): value, ("extra_state", "rank0.part"): value}
    apart = {("extra_state", "rank0.part"): other, ("extra_state", "rank1.part"): value}
    losses = {("extra_state", "rank0.loss"): other, ("extra_state", "rank1.loss"): other}
    both = of_both({**one, ("extra_state", "rank1.part"): other}, {**losses, **apart, ("scheduler", "best"): value})
    assert both.one == {("extra_state", "loss"): value}
    assert both.other == {("extra_state", "loss"): other}
    assert both.left_out == {("extra_state", "longer")}
    assert both.settings == {("scheduler", "best"), ("extra_state", "rank0.part"), ("extra_state", "rank1.part")}


def test_ranks_that_part_in_a_step_have_gradients_of_their_own() -> None:
    ops = [Op(index, kind, "main", 0, Mesh(1, 2, 1), 0, 0) for index, kind in enumerate(("build", "step"))]
    sessions = [Session(WHOLE, tuple(ops))]
    apart = [Problem(Key(op, "live", "param", "w"), "replica_conflict", (0, 1), "x") for op in (0, 1)]
    assert "gradient of its own" in wording.of_problems(apart[1:], sessions)
    assert "gradient of its own" not in wording.of_problems(apart, sessions)


def missing_schedule(*keys: tuple[str, str]) -> str:
    """What an arm says of a load after which these values are as they were before it."""
    found = [Difference(Key(7, "live", *key), "bits", total=1, mismatched=1, expected_first="'float 0.006'",
                        observed_first="'float 0.002'") for key in keys]  # fmt: skip
    kept = dict.fromkeys(keys, Value("utf8", (1,), b"0"))
    saved = {("param", "restored"): Value("utf8", (1,), b"1")}
    return of_resumed(found, Loaded(saved, kept, kept | saved), after_load=True)


def test_a_schedule_that_starts_again_is_told_in_plain_english() -> None:
    rate, count = ("scheduler", "scheduler._last_lr.0"), ("scheduler", "scheduler.last_epoch")
    assert missing_schedule(rate, count) == (
        "The learning-rate schedule starts again from the beginning: `load` does not restore 2 values of scheduler; "
        "what is there is a fresh trainer's. scheduler._last_lr.0 is 0.002, and should be 0.006."
    )
    assert missing_schedule(rate, ("param", "w")).startswith("`load` does not restore param of w, scheduler._last")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ([("exp_avg", "a"), ("step", "a")], "exp_avg and step of a"),
        ([("exp_avg", "a"), ("exp_avg", "b"), ("step", "a"), ("step", "b")], "exp_avg and step of 2 parameters"),
        ([("exp_avg", "a"), ("exp_avg", "b"), ("step", "a")], "exp_avg of 2 parameters, step of a"),
        ([("param", "a"), ("param", "b")], "2 parameters"),
        ([("setting", "group0.lr"), ("setting", "group1.lr")], "2 settings of param groups"),
        ([("extra_state", "a"), ("extra_state", "b")], "2 values of the trainer's own (a, b)"),
    ],
)
def test_values_are_counted_by_what_they_are(keys: list[tuple[str, str]], told: str) -> None:
    assert wording._named(keys) == told


def test_one_rank_is_not_asked_of_a_trainer_that_cannot_be_built_there(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text_of_trainer("axes = {'mesh': ['2', '4']}"))
    trainer = described(str(tmp_path / "mine.py"))
    ops = tuple(Op(index, kind, "main", 0, Mesh(1, 1, 1), 0, 0) for index, kind in ((7, "build"), (8, "load")))
    told = [
        wording.of_failure(Session(f"other mesh {mesh}", ops), Failure("ValueError", "no", 0, "", op), trainer).verdict
        for mesh, op in (("1", 7), ("1", 8), ("2", 7))
    ]
    assert told == ["unsupported", "crash", "crash"]
    hung = Failure("deadline", "no end", None, "", 7)
    assert wording.of_failure(Session("other mesh 1", ops), hung, trainer).verdict == "hang"


CHAINED = """Traceback (most recent call last):
  File "{file}", line 21, in update
    loss.backward()
  File "/x/site-packages/torch/autograd/graph.py", line 829, in _engine_run_backward
    return Variable._execution_engine.run_backward(
RuntimeError: grad can be implicitly created only for scalar outputs

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "{file}", line 9, in build
    step()
  File "/x/site-packages/torch/distributed/pipelining/_backward.py", line 4, in stage_backward
    raise RuntimeError(text) from e
RuntimeError: Failed to run stage backward:
Stage output: 1
Exception raised from f at x.cpp
frame #0: c10::Error
"""


def test_a_crash_has_all_lines_of_its_message_and_its_direct_cause(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text_of_trainer("steps = (1, 0)"))
    said = "Failed to run stage backward:\nStage output: 1\nException raised from f at x.cpp\nframe #0: c10::Error"
    error = Failure("RuntimeError", said, 0, CHAINED.format(file=file))
    crash = wording.of_failure(Session("resumed", ()), error, described(str(file))).sentence
    assert crash.endswith(
        "raised by stage_backward (pipelining/_backward.py, line 4): Failed to run stage backward: Stage output: 1; "
        "caused by RuntimeError: grad can be implicitly created only for scalar outputs in _engine_run_backward "
        "(autograd/graph.py, line 829), called in update (mine.py, line 21)"
    )
    told_already = replace(error, message="no: grad can be implicitly created only for scalar outputs")
    assert "caused by" not in wording.of_failure(Session("resumed", ()), told_already, described(str(file))).sentence
    long = wording.of_failure(Session("resumed", ()), Failure("E", "word " * 500, 0), described(str(file))).sentence
    assert len(long) < 350
    assert long.endswith(" …")


@pytest.mark.parametrize(
    ("detail", "expected", "observed", "told"),
    [
        ("dtype fp16 instead of utf8, shape [] instead of [5]", "'int 2'", "2.0 (0x4000)",
         "is 2.0, and should be 2. It is of the type fp16, which has whole numbers up to 2048 only, and should be of"),
        ("dtype bf16 instead of fp32", "2.0", "2.5", "of w: dtype bf16 instead of fp32. A count of bf16 stops at 256"),
    ],
)  # fmt: skip
def test_a_value_that_came_back_in_another_type(detail: str, expected: str, observed: str, told: str) -> None:
    key = Key(3, LIVE, "step", "w")
    one = Difference(
        key, "dtype", total=1, mismatched=1, expected_first=expected, observed_first=observed, detail=detail
    )
    assert told in wording.first_of([one])
