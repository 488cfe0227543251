"""Which entry of two pickles differs, and that nothing in them runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.trainer.values.pickled import entry_apart
from shardproof.trainer.values.wording import first_in_a_step

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def blob(value: Any) -> Value:
    data = value if isinstance(value, bytes) else pickle.dumps(value, protocol=4)
    return Value("uint8", (len(data),), data)


class Touches:
    """Makes a file where somebody unpickles it."""

    def __init__(self, file: Path, number: int) -> None:
        self.file, self.number = file, number

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,), {"number": self.number}


@pytest.mark.parametrize(
    ("expected", "observed", "told"),
    [
        ({"sampler": {"yielded": 4}}, {"sampler": {"yielded": 5}}, "sampler.yielded is 5, and should be 4"),
        ([1, 2, "a"], [1, 3, "b"], "1 is 3, and should be 2, and 1 more entry differs"),
        ({"a": 1}, {"b": 1}, "a is not there, and 1 more entry differs"),
        ({"a": [1]}, {"a": None}, "a is None, and should be a list of 1"),
        (1, True, "the whole is True, and should be 1"),
        (b"no pickle", {"a": 1}, ""),
        (b"\x80\x04 broken", {"a": 1}, ""),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ""),
    ],
)
def test_the_first_entry_that_differs(expected: Any, observed: Any, told: str) -> None:
    assert entry_apart(blob(expected), blob(observed)) == told


@given(PLAIN)
def test_a_pickle_is_like_itself(value: Any) -> None:
    assert entry_apart(blob(value), blob(value)) == ""


def test_nothing_in_a_pickle_runs(tmp_path: Path) -> None:
    one, other = (blob(Touches(tmp_path / "made", number)) for number in (1, 2))
    assert entry_apart(one, other) == "state.number is 2, and should be 1"
    assert not (tmp_path / "made").exists()


def test_a_structure_that_holds_itself_has_an_end() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert entry_apart(blob(ring), blob(ring)) == ""


@pytest.mark.parametrize("name", ["rank0.loader.dp_rank_0", "train_dataloader.pos", "batch", "rank1.sampler.epoch"])
def test_data_that_differ_come_before_what_a_step_makes_of_them(name: str) -> None:
    moment = Difference(Key(3, "live", "exp_avg", "w"), "bits", total=2, expected_first="1.0", observed_first="2.0")
    data = Difference(Key(3, "live", "extra_state", name), "bits", total=9, detail="yielded is 5, and should be 4")
    what = "The data differ" if name == "batch" else "The data, or what is said of their place, differ"
    assert first_in_a_step([moment, data]) == f"{what}: {name}: yielded is 5, and should be 4."
    assert first_in_a_step([moment]).startswith("exp_avg of w is 2.0")
