"""Stacks of ranks that wait: what is kept of them, and what a reader is told."""

from __future__ import annotations

import pytest
from shardproof.observe.stacks import fatal_traceback_in, in_one_text, stack_in, waits_in
from shardproof.result import Failure
from shardproof.wording.waits import are_apart, told_waits

C10D = "/site-packages/torch/distributed"
OURS = '  File "/x/shardproof/world/rank.py", line 75 in run_rank\n  File "<string>", line 1 in <module>\n'
GATHERS = (
    f'  File "{C10D}/distributed_c10d.py", line 4025 in all_gather\n'
    f'  File "{C10D}/c10d_logger.py", line 83 in wrapper\n'
    f'  File "{C10D}/distributed_c10d.py", line 3251 in all_gather_object\n'
    f'  File "{C10D}/fsdp/_optim_utils.py", line 1254 in _map_param_key\n'
    '  File "/home/me/mine.py", line 45 in save\n'
)
WAITS = (
    f'  File "{C10D}/distributed_c10d.py", line 4976 in barrier\n'
    f'  File "{C10D}/c10d_logger.py", line 83 in wrapper\n'
    '  File "/home/me/mine.py", line 47 in save\n'
)
SLEEPS = '  File "/home/me/mine.py", line 31 in step\n'


def hung(*stacks: str) -> Failure:
    logs = {rank: f"[Gloo] hello\nStack (most recent call first):\n{stack}{OURS}" for rank, stack in enumerate(stacks)}
    text = in_one_text({rank: stack_in(log) for rank, log in logs.items()}, 12_000)
    return Failure("deadline", "no end after 11 s", None, text)


@pytest.mark.parametrize(
    ("stacks", "told"),
    [
        (
            (GATHERS, GATHERS, WAITS, WAITS),
            "Ranks 0 and 1 wait in all_gather_object (fsdp/_optim_utils.py, line 1254, called from mine.py, line 45), "
            "ranks 2 and 3 in barrier (mine.py, line 47). They are in different collectives",
        ),
        ((WAITS, WAITS), "Ranks 0 and 1 wait in barrier (mine.py, line 47)."),
        ((WAITS, SLEEPS), "Rank 0 waits in barrier (mine.py, line 47), rank 1 is in step (mine.py, line 31)."),
        ((SLEEPS, WAITS), "Rank 0 is in step (mine.py, line 31), rank 1 waits in barrier (mine.py, line 47)."),
        (("", ""), ""),
    ],
)  # fmt: skip
def test_each_group_of_ranks_is_told_where_it_waits(stacks: tuple[str, ...], told: str) -> None:
    error = hung(*stacks)
    said = told_waits(error, "/home/me/mine.py")
    assert said.startswith(told)
    assert are_apart(error) == (len(set(stacks)) > 1)


def test_ranks_at_one_place_share_a_stack_and_our_own_frames_are_left_out() -> None:
    text = hung(GATHERS, WAITS, GATHERS).traceback
    assert [wait.ranks for wait in waits_in(text)] == [(0, 2), (1,)]
    assert text.startswith("ranks 0 and 2:\n  File ")
    assert "run_rank" not in text


def test_long_stacks_keep_their_innermost_frames_and_each_rank_its_line() -> None:
    deep = "\n".join(f'File "/x.py", line {n} in f{n}' for n in range(1000))
    text = in_one_text(dict(enumerate((deep, f"{deep}\n"))), 4_000)
    assert [wait.frames[0].function for wait in waits_in(text)] == ["f0", "f0"]
    assert "frames left out" in text
    assert len(text) < 4_100


def test_the_frames_of_a_rank_that_a_signal_ended_are_those_of_its_operation() -> None:
    """Gloo aborts in a thread of its own, which runs no Python."""
    log = (
        "what(): 192 vs 96\nFatal Python error: Aborted\n\n"
        "Thread 0x1 (most recent call first):\n  <no Python frame>\n\n"
        'Current thread 0x2 (most recent call first):\n  File "/src/library/layer.py", line 7 in all_to_all\n'
        '  File "/home/me/mine.py", line 3 in step\n  File "/x/shardproof/world/rank.py", line 9 in run_rank\n'
    )
    assert fatal_traceback_in(log) == (
        '  File "/home/me/mine.py", line 3, in step\n  File "/src/library/layer.py", line 7, in all_to_all\n'
    )
    assert fatal_traceback_in(log.replace("Fatal Python error: ", "")) == ""
    assert fatal_traceback_in(log.replace("world/rank.py", "other.py")) == ""
