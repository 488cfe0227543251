"""In which epoch a step has its samples, and what a resumed run has lost that has those of another place."""

from __future__ import annotations

import pytest
from shardproof.trainer.data.epochs import ends_apart, epochs_of, first_epoch_alone, later_program, other_place

STEPS = dict(enumerate(["ab", "cd", "da", "cb", "bd", "ac"]))


def test_a_new_epoch_begins_with_a_sample_that_comes_again() -> None:
    assert epochs_of(STEPS) == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (2, 0), 5: (2, 1)}


@pytest.mark.parametrize(
    ("given", "step", "told"),
    [
        ("ab", 2, "the same place in epoch 0: the number of the epoch, or the random state that shuffles it, is not"),
        ("dc", 3, "step 3 is step 1 of epoch 1, and these are the samples of the same place in epoch 0"),
        ("da", 3, "step 3 is step 1 of epoch 1, and these are the samples of step 0 of it: the order is right"),
        ("ab", 3, "step 3 is step 1 of epoch 1, and these are the samples of step 0 of epoch 0."),
        ("cb", 3, ""),
        ("xy", 3, ""),
        ("cd", 0, ""),
        ("", 3, ""),
    ],
)
def test_what_a_resumed_run_has_lost(given: str, step: int, told: str) -> None:
    found = other_place(given, step, STEPS)
    assert told in found
    assert bool(told) == bool(found)


def test_an_offset_that_is_applied_to_each_epoch() -> None:
    steps = {0: "a", 1: "b", 2: "c", 3: "a", 4: "b", 5: "c", 6: "a"}
    assert other_place("c", 6, steps, 5) == (
        "In the uninterrupted run step 6 is step 0 of epoch 2, and these are the samples of step 2 of an epoch, at "
        "which place the resume began: what was skipped there is skipped in the new epoch again, so that the first 2 "
        "of its steps never come."
    )
    assert "and these are the samples of step 2 of epoch" in other_place("c", 6, steps, 4)


def test_ranks_whose_data_overlap_are_in_no_new_epoch() -> None:
    assert epochs_of({0: "ac", 1: "bd", 2: "ce", 3: "df"}) == {step: (0, step) for step in range(4)}


def test_a_program_that_saves_in_a_later_epoch_is_read_off_the_note() -> None:
    notes = ["something else", first_epoch_alone({0: "ab", 1: "cd", 2: "ad"}, 1)]
    assert later_program(notes) == "arms 3 4 twice resumed second-resume alike"
    assert later_program([first_epoch_alone({0: "a", 1: "b"}, 1)]) == "arms 8 8 twice resumed second-resume alike"
    assert later_program(notes[:1]) == ""
    assert later_program(["`--program 'arms 16 4 resumed alike'` may try it"]) == "arms 16 4 resumed alike"


def test_a_save_in_the_first_epoch_leaves_later_ones_untried() -> None:
    assert "first epoch of the data, which ends with step 1: a resume in a later one" in first_epoch_alone(STEPS, 1)
    assert "first epoch of the data: a resume" in first_epoch_alone({0: "a", 1: "b"}, 0)
    assert first_epoch_alone(STEPS, 2) == first_epoch_alone({0: "", 1: ""}, 0) == first_epoch_alone({}, 0) == ""


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            {0: {0: "a", 1: "b"}, 1: {0: "c", 1: "a"}},
            "In step 1 of the uninterrupted run rank 1 was given samples that ",
        ),
        ({0: {0: "a", 1: "b"}, 1: {0: "b", 1: "a"}, 2: {0: "a", 1: "b"}}, ""),
        ({0: {0: "a", 1: "b"}, 1: {0: "b", 1: "a"}, 2: {0: "a", 1: "c"}}, "In step 2 "),
        ({0: {0: "ab"}, 1: {0: "ac"}}, ""),
    ],
)
def test_ranks_that_come_to_the_end_of_an_epoch_in_other_steps_are_told(
    steps: dict[int, dict[int, str]], said: str
) -> None:
    told = ends_apart(steps)
    assert told.startswith(said)
    assert bool(told) is bool(said)
