"""What happened to a generator is read off its seed and its place, for any seed and any number of draws."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardproof.diff import Difference
from shardproof.observe.generators import state_value, torch_value
from shardproof.observe.logical import Key, Value
from shardproof.trainer.values.streams import of_streams

NAME = ("rng", "rank0.torch")
FOUND = [Difference(Key(3, "live", *NAME), "bits", total=4, mismatched=2)]


def drawn(seed: int, count: int) -> Value:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        torch.rand(1, generator=generator)
    return torch_value(generator.get_state().numpy().tobytes())


def told(expected: Value, observed: Value) -> str:
    return of_streams(FOUND, {NAME: expected}, {NAME: observed})


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 1300), st.integers(0, 1300))
def test_numbers_that_were_drawn_too_often_or_not_at_all_are_counted(seed: int, wanted: int, got: int) -> None:
    said = told(drawn(seed, wanted), drawn(seed, got))
    if wanted == got:
        assert said == ""
    else:
        which = "more" if got > wanted else "fewer"
        assert f"{abs(wanted - got)} {which} numbers were drawn from it than should have been ({got}, " in said


def test_another_seed_is_told() -> None:
    assert told(drawn(1, 3), drawn(2**40, 3)).startswith(
        "The generator rank0.torch was seeded with 1099511627776, and should have been with 1"
    )


def test_a_gpu_s_generator_has_a_seed_and_an_offset() -> None:
    one, other = (torch_value((7).to_bytes(8, "little") + offset.to_bytes(8, "little")) for offset in (8, 12))
    assert "the right seed, and 4 more numbers" in told(one, other)


def test_what_is_no_state_of_torch_is_not_explained() -> None:
    one, other = state_value(b"a"), torch_value(b"b")
    assert (other.shape, told(one, other)) == ((16,), "")
    assert of_streams(FOUND, {}, {NAME: drawn(1, 1)}) == ""


def test_a_generator_that_goes_on_from_the_seed_of_its_own_run_is_not_restored() -> None:
    expected, observed = {NAME: drawn(1, 3)}, {NAME: drawn(2, 3)}
    told = of_streams(FOUND, expected, observed, begun=2)
    assert "goes on from the seed 2 that this run was begun with, and should from 1, that of the run that saved" in told
    assert "was seeded with 2" in of_streams(FOUND, expected, observed, begun=5)


def test_a_generator_that_has_another_rank_s_state_is_told() -> None:
    other = (NAME[0], "rank1.torch")
    found = [replace(FOUND[0], key=FOUND[0].key._replace(fqn=other[1]))]
    expected = {NAME: drawn(1, 5), other: drawn(2, 5)}
    assert of_streams(found, expected, {**expected, other: expected[NAME]}).startswith(
        f"The generator rank1.torch has the state that {NAME[1]} should have: the checkpoint has one rank's alone"
    )
