"""The elements that are kept of a failure: what is chosen, how much, and that it comes back as it was.

*Verifies*: both sides, owners, holes, copies that differ, the bounds, and the order in which tensors find a place.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.diff import Difference, diff
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import Record, whole
from shardproof.tensor_pictures import (
    FAILURE_BYTES,
    TENSOR_ELEMENTS,
    Elements,
    Holder,
    Picture,
    Side,
    pack_elements,
    unpack_elements,
)  # fmt: skip


def value(numbers: list[float], *shape: int) -> Value:
    return Value("fp32", shape or (len(numbers),), np.array(numbers, np.float32).tobytes())


def kept(expected: Logical, records: list[Record]) -> Elements:
    observed, problems = assemble(records)
    found = diff(expected, observed, problems, (), records)
    return unpack_elements(pack_elements(found, expected, observed, records))


def half(rank: int, numbers: list[float]) -> Record:
    """Row `rank` of a tensor of two rows and two columns."""
    data = np.array(numbers, np.float32).tobytes()
    return Record(1, rank, "live", "param", "w", "fp32", (2, 2), (rank, 0), (1, 2), data)


KEY = Key(1, "live", "param", "w")
TRUTH = {KEY: value([1, 2, 3, 4], 2, 2)}


def test_both_sides_and_who_holds_what() -> None:
    found = kept(TRUTH, [half(0, [1, 2]), half(1, [3, 5])])
    (picture,) = found.pictures
    assert found.by_key == {KEY: picture}
    assert picture.expected == Side("fp32", (2, 2), value([1, 2, 3, 4]).data)
    assert picture.observed == Side("fp32", (2, 2), value([1, 2, 3, 5]).data)
    assert picture.owners == (Holder((0,), (0, 0), (1, 2), False), Holder((1,), (1, 0), (1, 2), False))
    assert picture.expected.bits(3) == 0x40800000
    with pytest.raises(IndexError, match="4 is not among the 4"):
        picture.expected.bits(4)


def test_one_side_alone() -> None:
    step = whole(1, 0, "step", "w", "fp32", (), value([1]).data)
    (extra,) = kept(TRUTH, [half(0, [1, 2]), half(1, [3, 4]), step]).pictures
    assert (extra.expected, extra.observed) == (None, Side("fp32", (), value([1]).data))
    (missing,) = kept({**TRUTH, Key(1, "live", "step", "w"): Value("fp32", (), value([2]).data)},
                      [half(0, [1, 2]), half(1, [3, 4])]).pictures  # fmt: skip
    assert (missing.expected, missing.observed) == (Side("fp32", (), value([2]).data), None)


def test_a_value_that_is_not_whole_has_holes() -> None:
    (picture,) = kept(TRUTH, [half(0, [1, 2])]).pictures
    assert picture.observed is not None
    assert picture.observed.holes == ((2, 2),)


def test_of_copies_the_deviating_one_is_shown() -> None:
    records = [whole(1, rank, "param", "w", "fp32", (2, 2), TRUTH[KEY].data) for rank in (0, 1)]
    records.append(whole(1, 2, "param", "w", "fp32", (2, 2), value([1, 2, 9, 4]).data))
    (picture,) = kept(TRUTH, records).pictures
    assert picture.copies == (2,)
    assert picture.observed == Side("fp32", (2, 2), value([1, 2, 9, 4]).data)
    assert picture.owners == (Holder((0, 1, 2), (0, 0), (2, 2), False),)


def test_what_is_written_is_held_as_the_live_value_is() -> None:
    written = KEY._replace(where="written")
    records = [
        half(0, [1, 2]),
        half(1, [3, 4]),
        whole(1, 0, "param", "w", "fp32", (2, 2), value([0] * 4).data, "written"),
    ]
    (picture,) = kept({**TRUTH, written: TRUTH[KEY]}, records).pictures
    assert picture.key == written
    assert [holder.ranks for holder in picture.owners] == [(0,), (1,)]


def test_a_large_tensor_is_cut_at_the_row_that_deviates() -> None:
    many = np.arange(3 * TENSOR_ELEMENTS, dtype=np.float32)
    wrong = many.copy()
    wrong[1001] = -1
    shape = (len(many) // 10 + 1, 10)
    size = shape[0] * 10
    many, wrong = np.resize(many, size), np.resize(wrong, size)
    wrong[5:] = np.where(np.arange(5, size) == 1001, -1, many[5:])
    wrong[:5] = many[:5]
    key = Key(0, "live", "param", "big")
    truth = {key: Value("fp32", shape, many.tobytes())}
    (picture,) = kept(truth, [whole(0, 0, "param", "big", "fp32", shape, wrong.tobytes())]).pictures
    assert picture.first == 1000
    assert picture.expected is not None
    assert len(picture.expected.data) == 4 * TENSOR_ELEMENTS
    assert picture.expected.data == many[1000 : 1000 + TENSOR_ELEMENTS].tobytes()


def test_a_failure_keeps_something_of_every_role_first() -> None:
    numbers = np.zeros(TENSOR_ELEMENTS // 2, np.float32)
    truth: Logical = {}
    records = []
    for op in (1, 2):
        for role in ("exp_avg", "param"):
            for name in ("a", "b"):
                truth[Key(op, "live", role, name)] = Value("fp32", numbers.shape, numbers.tobytes())
                records.append(whole(op, 0, role, name, "fp32", numbers.shape, (numbers + 1).tobytes()))
    found = kept(truth, records)
    assert [(p.key.op, p.key.role, p.key.fqn) for p in found.pictures] == [
        (1, "exp_avg", "a"), (1, "param", "a"), (1, "exp_avg", "b")
    ]  # fmt: skip
    assert found.left_out == 5
    assert sum(picture.size for picture in found.pictures) <= FAILURE_BYTES


def test_text_and_nothing_have_no_elements() -> None:
    text = Key(0, "live", "resolved", "dtype")
    truth = {text: Value("utf8", (4,), b"bf16")}
    assert kept(truth, [whole(0, 0, "resolved", "dtype", "utf8", (4,), b"fp32")]) == Elements()
    lost = Difference(Key(-1, "live", "", ""), "missing", detail="nothing to compare")
    assert pack_elements([lost], {}, {}, []) == b""


@given(st.binary(max_size=200))
def test_damage_costs_the_pictures_and_no_more(blob: bytes) -> None:
    assert unpack_elements(blob) == Elements()


def test_pieces_that_contradict_each_other_are_not_joined() -> None:
    other = half(1, [3, 4])._replace(dtype="fp16", data=b"\0" * 4)
    (picture,) = kept(TRUTH, [half(0, [1, 2]), other]).pictures
    assert picture == Picture(KEY, 0, Side("fp32", (2, 2), TRUTH[KEY].data), None, picture.owners)
