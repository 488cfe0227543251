"""Extra state through saves and loads: what may change, and what may not."""

from __future__ import annotations

import pickle
import re
import struct

import torch
from shardproof.diff import diff
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import whole
from shardproof.oracle.extra_state import carried, without_addresses
from shardproof.program import expand
from shardproof.scenario import Scenario

OPS = expand(Scenario(program="build step save step build load step"))
"""Indices: 0 build, 1 step, 2 save, 3 step, 4 build, 5 load, 6 step."""

SEEN = {0: b"a", 1: b"b", 2: b"b", 3: b"c", 4: b"a", 5: b"b", 6: b"c"}


def _observed(changes: dict[int, bytes | None], written: bytes | None = b"b") -> Logical:
    seen = {Key(op, "live", "extra_state", "fc"): data for op, data in (SEEN | changes).items()}
    seen[Key(2, "written", "extra_state", "fc")] = written
    seen[Key(0, "live", "param", "fc.weight")] = b"something to compare"
    return {key: Value("uint8", (len(data),), data) for key, data in seen.items() if data is not None}


def _found(observed: Logical, *, left_out: bool = False) -> list[tuple[int, str, str]]:
    expected = carried(observed, OPS, left_out=left_out)
    expected |= {key: value for key, value in observed.items() if key.role == "param"}
    return [(d.key.op, d.key.where, d.kind) for d in diff(expected, observed)]


def test_a_sound_round_trip() -> None:
    assert _found(_observed({})) == []


def test_a_save_that_changes_it() -> None:
    assert (2, "live", "bits") in _found(_observed({2: b"x"}))


def test_a_checkpoint_without_it_or_with_something_else() -> None:
    assert _found(_observed({}, None)) == [(2, "written", "missing")]
    assert _found(_observed({}, b"longer")) == [(2, "written", "shape")]


def test_a_load_that_leaves_the_builds() -> None:
    assert _found(_observed({5: b"a"})) == [(5, "live", "bits")]


def test_a_layer_whose_state_comes_or_goes() -> None:
    assert (3, "live", "missing") in _found(_observed({3: None}))
    assert _found(_observed({0: None, 1: b"b"}))[0] == (1, "live", "extra")


def test_left_out_of_checkpoints() -> None:
    without = _observed({5: b"a"}, None)
    assert _found(without, left_out=True) == []
    assert _found(_observed({}), left_out=True) == [(2, "written", "extra"), (5, "live", "bits")]


def without(data: bytes) -> bytes:
    return without_addresses(whole(0, 0, "extra_state", "fc", "uint8", (len(data),), data)).data


def test_addresses_of_storages_are_no_difference_and_their_tensors_are() -> None:
    def saved(*values: float) -> bytes:
        return pickle.dumps([torch.tensor([value]) for value in values])

    keep = [pickle.loads(saved(1.0, 2.0)) for _ in range(3)]  # so that addresses differ
    assert len({pickle.dumps(tensors) for tensors in keep}) > 1
    assert len({without(pickle.dumps(tensors)) for tensors in keep}) == 1
    assert without(saved(1.0, 2.0)) != without(saved(1.0, 3.0))


def test_addresses_of_another_length() -> None:
    data = pickle.dumps([torch.tensor([1.0])])
    address = re.search(rb"X(.)\0\0\0(\d{8,20})", data, re.DOTALL)
    blob = re.search(rb"C(.)(?=\x80\x02\x8a)", data, re.DOTALL)
    assert address is not None
    assert blob is not None
    digits, size = address[2], blob[1][0]
    longer = data.replace(address[0], b"X" + bytes([len(digits) + 1]) + bytes(3) + digits + b"7")
    longer = longer.replace(blob[0], b"B" + struct.pack("<I", size + 2))
    longer = longer[:3] + struct.pack("<Q", len(longer) - 12) + longer[11:]
    assert without(longer) == without(data)
    assert len(longer) > len(data)


def test_zeros_after_the_end_of_a_pickle_are_no_part_of_it() -> None:
    state = pickle.dumps({"scale": 1.0})
    assert without(state.ljust(1 << 10, b"\0")) == without(state)
    assert without(bytes(8)) == bytes(8), "no pickle"
