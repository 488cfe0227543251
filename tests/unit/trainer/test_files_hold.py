"""What a checkpoint's files hold of the live values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.files_hold import written


def value_of(count: int) -> Value:
    data = np.arange(1, count + 1, dtype=np.float32).tobytes()
    return Value("fp32", (count,), data)


KEY = ("param", "w")
LARGE = value_of(64)


def test_what_lies_in_pieces_is_held(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"{rank}.bin").write_bytes(b"head" + LARGE.data[64 * rank : 64 * rank + 64] + b"tail")
    assert written(tmp_path, {KEY: LARGE}, (), 4).missing == ()


def test_what_is_in_no_file_is_missing(tmp_path: Path) -> None:
    other = ("exp_avg", "w")
    (tmp_path / "a.bin").write_bytes(LARGE.data)
    moments = Value("fp32", (64,), np.arange(1000, 1064, dtype=np.float32).tobytes())
    held = written(tmp_path, {KEY: LARGE, other: moments}, (), 2)
    assert (held.missing, held.looked_for) == ((other,), 2)
    assert written(tmp_path, {KEY: LARGE, other: moments}, ("exp_avg *",), 2).missing == ()


def test_an_empty_folder_holds_no_parameter(tmp_path: Path) -> None:
    held = written(tmp_path, {KEY: LARGE}, ())
    assert (held.missing, held.empty) == ((KEY,), True)


@pytest.mark.parametrize(("ranks", "missing"), [(1, True), (2, True), (4, False)])
def test_nothing_is_claimed_of_a_value_whose_pieces_are_too_short(ranks: int, missing: bool, tmp_path: Path) -> None:
    small = ("exp_avg", "w")
    (tmp_path / "a.bin").write_bytes(LARGE.data)
    moments = Value("fp32", (8,), np.arange(1000, 1008, dtype=np.float32).tobytes())
    held = written(tmp_path, {KEY: LARGE, small: moments}, (), ranks)
    assert (held.missing, held.looked_for) == (((small,), 2) if missing else ((), 1))


def test_parameters_in_another_form_say_nothing_of_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(1000))
    assert written(tmp_path, {KEY: LARGE, ("exp_avg", "w"): LARGE}, ()).converted
