"""Plain numbers that come back as a number of another type."""

from __future__ import annotations

import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.values.retyped import of_another_type, same_number


def plain(text: str) -> Value:
    return Value("utf8", (len(text),), text.encode())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("int 4", "float 4.0", True),
        ("float 4.0", "int 4", True),
        ("int 4", "float 4.5", False),
        ("int 4", "int 5", False),
        ("int 9007199254740993", "float 9007199254740992.0", False),
        ("int 0", "float -0.0", False),
        ("int 0", "float 0.0", True),
        ("int 4", "float nan", False),
        ("int 1", "bool True", False),
        ("str 4", "int 4", False),
    ],
)
def test_one_number_of_two_types(one: str, other: str, *, same: bool) -> None:
    assert same_number(plain(one), plain(other)) is same


def test_tensors_are_no_plain_numbers() -> None:
    assert not same_number(Value("int64", (), bytes(8)), plain("float 0.0"))
    assert not same_number(None, plain("int 4"))


def test_the_note_names_them() -> None:
    assert of_another_type({"b", "a"}) == "equal, and a number of another type: a, b"
