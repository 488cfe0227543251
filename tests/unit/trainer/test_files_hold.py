"""Whether files hold what is live: whole, in pieces, converted, or not at all."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from shardproof.observe.logical import Value
from shardproof.trainer.values import wording
from shardproof.trainer.values.checkpoints import names_in
from shardproof.trainer.values.files_hold import Written, held_as_in, nameless, not_made_by_build, written


def value(seed: int, count: int = 16) -> Value:
    data = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return Value("fp32", (count,), data.tobytes())


LIVE = {("param", "w"): value(1), ("exp_avg", "w"): value(2), ("rng", "rank0.torch"): value(3)}


def held(folder: Path, *transient: str) -> Written:
    return written(folder, LIVE, transient)


def test_bytes_anywhere_in_any_file_are_held(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.bin").write_bytes(b"head" + LIVE["param", "w"].data + b"tail")
    (tmp_path / "deep/b.bin").write_bytes(b"x" + LIVE["exp_avg", "w"].data)
    assert held(tmp_path) == Written((), 2)  # random states are not looked for


def test_a_value_may_be_cut_into_pieces(tmp_path: Path) -> None:
    data = LIVE["exp_avg", "w"].data
    (tmp_path / "a.bin").write_bytes(LIVE["param", "w"].data + b"between" + data[32:])
    (tmp_path / "b.bin").write_bytes(data[:32])
    assert held(tmp_path).missing == ()


def test_what_is_in_no_file_is_missing_but_for_what_may_be(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(LIVE["param", "w"].data)
    assert held(tmp_path).missing == (("exp_avg", "w"),)
    assert held(tmp_path, "exp_avg *").missing == ()
    told = "`save` leaves all state of the optimizer out of the checkpoint: the bytes that were live at the save "
    assert wording.of_written(held(tmp_path)) == f"{told}are in no file."
    more = {**LIVE, ("exp_avg", "v"): value(6), ("param", "v"): value(5)}
    (tmp_path / "b.bin").write_bytes(value(5).data + value(6).data)
    told = "`save` leaves exp_avg of w out of the checkpoint: the bytes that were live at the save are in no file."
    assert wording.of_written(written(tmp_path, more, ())) == told


def test_a_lost_row_is_missing_although_nine_tenths_are_there(tmp_path: Path) -> None:
    large = value(4, 160)
    live = {("param", "w"): large, ("param", "v"): value(5)}
    (tmp_path / "b.bin").write_bytes(value(5).data)
    (tmp_path / "a.bin").write_bytes(large.data[:-64] + large.data[-128:-64])
    assert written(tmp_path, live, (), ranks=4).missing == (("param", "w"),)
    (tmp_path / "a.bin").write_bytes(large.data[:-12])  # shorter than a cut of ranks may be
    assert written(tmp_path, live, (), ranks=4).missing == ()


def test_where_no_parameter_is_in_the_files_they_are_converted(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(LIVE["exp_avg", "w"].data)
    assert held(tmp_path).converted


def test_a_folder_without_a_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").touch()
    assert held(tmp_path) == Written((("param", "w"),), 2, empty=True)
    assert wording.of_written(held(tmp_path)) == wording.EMPTY


@pytest.mark.parametrize("data", [b"\0" * 64, b"\1" * 64, b"abcd"])
def test_what_is_short_or_all_of_one_byte_is_not_looked_for(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(b"something else")
    found = written(tmp_path, {("param", "w"): Value("fp32", (len(data) // 4,), data)}, ())
    assert (found.looked_for, found.too_small) == (0, (("param", "w"),))


@pytest.mark.parametrize(("ranks", "missing"), [(1, True), (2, True), (4, False)])
def test_nothing_is_claimed_of_a_value_whose_pieces_are_too_short(ranks: int, missing: bool, tmp_path: Path) -> None:
    small = ("exp_avg", "w")
    (tmp_path / "a.bin").write_bytes(LIVE["param", "w"].data)
    found = written(tmp_path, {("param", "w"): LIVE["param", "w"], small: value(4, 8)}, (), ranks)
    assert (found.missing, found.looked_for) == (((small,), 2) if missing else ((), 1))
    assert found.too_small == (() if missing else (small,))


def test_what_was_not_looked_for_is_counted_and_named_where_no_entry_has_its_name(tmp_path: Path) -> None:
    text, count = Value("utf8", (5,), b"int 3"), Value("fp32", (), b"\0\0\0@")
    small = {("scheduler", "scheduler.last_epoch"): text, ("scheduler", "scheduler._last_lr.0"): text,
             ("step", "w"): count, ("setting", "group0.lr"): text}  # fmt: skip
    (tmp_path / "a.bin").write_bytes(LIVE["param", "w"].data + LIVE["exp_avg", "w"].data)
    found = written(tmp_path, {**LIVE, **small}, ("setting *",))
    assert found.too_small == (*small,)[:3], "neither random states nor what the trainer calls transient"
    told = wording.too_small(found.too_small, ("model.w", "optim.state.0.step", "optim.state.0.exp_avg"))
    assert told == [
        "not looked for, since texts and short values cannot be told by their bytes: 2 values of scheduler, step of w",
        "`save` may have left some of these out: no value in the checkpoint has last_epoch, _last_lr in its name",
    ]
    assert wording.too_small(found.too_small, ("sched.last_epoch", "sched._last_lr[0]", "step.w")) == told[:1]
    assert wording.too_small(found.too_small, ()) == told[:1], "names that cannot be read say nothing"
    assert wording.too_small((), ("w",)) == []


def test_the_names_of_all_files_are_read_or_none(tmp_path: Path) -> None:
    torch.save({"module": {"w": torch.ones(3)}}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"groups": [{"lr": 0.5}]}, tmp_path / "zero_rank_0_optim_states.pt")
    (tmp_path / "state.json").write_text('{"last_epoch": 2}')
    small = [("scheduler", "scheduler.last_epoch"), ("setting", "group0.lr"), ("setting", "group0.eps")]
    assert nameless(small, names_in(tmp_path)) == ("eps",)
    (tmp_path / "loop.msgpack").write_bytes(b"\x81\xa3eps\xff")
    assert names_in(tmp_path) == ()


def test_what_every_build_makes_alike_need_not_be_in_a_checkpoint() -> None:
    """The frequencies of a position embedding, which no state dict has, and a dataset that a sampler holds."""
    live = {("buffer", "rope.inv_freq"): value(1), ("extra_state", "rank0.loader.data"): value(2), **LIVE}
    fresh = dict(live)
    assert not_made_by_build(live, [fresh, fresh]) == LIVE
    assert not_made_by_build(live, [fresh, {**fresh, ("buffer", "rope.inv_freq"): value(9)}]) == {
        ("buffer", "rope.inv_freq"): value(1), **LIVE
    }  # fmt: skip
    assert not_made_by_build(live, []) == live


def test_a_frozen_parameter_that_every_build_makes_alike_need_not_be_in_a_checkpoint() -> None:
    """The base of a LoRA model, which comes from elsewhere. One build alone cannot say that all make it alike."""
    base, adapter = ("param", "base"), ("param", "adapter")
    live = {base: value(1), adapter: value(2)}
    other = {base: value(1), adapter: value(3)}
    assert not_made_by_build(live, [live, other], [base, adapter]) == {adapter: value(2)}
    assert not_made_by_build(live, [live, other]) == live, "a parameter that is not frozen"
    assert not_made_by_build(live, [live], [base]) == live


def test_files_that_have_the_parameters_of_an_earlier_moment(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(value(7).data)
    key = ("param", "w")
    assert held_as_in(tmp_path, [key, ("exp_avg", "w")], {key: value(7), ("exp_avg", "w"): value(6)})
    assert not held_as_in(tmp_path, [key], {key: value(8)})
    assert not held_as_in(tmp_path, [key], {})
    assert not held_as_in(tmp_path, [key, ("param", "v")], {key: value(7)})


def test_what_is_rounded_from_a_saved_master_counts_as_saved(tmp_path: Path) -> None:
    master = value(1, 64)
    numbers = np.frombuffer(master.data, np.float32)
    half, other = (
        Value("bf16", (32,), each.astype(ml_dtypes.bfloat16).tobytes()) for each in (numbers[:32], -numbers[32:])
    )
    live = {("param", "flat"): master, ("param", "a"): half, ("param", "b"): other, ("param", "c"): value(4)}
    (tmp_path / "a.bin").write_bytes(master.data + live["param", "c"].data)
    found = written(tmp_path, live, ())
    assert (found.rounded, found.missing) == ((("param", "a"),), (("param", "b"),))
