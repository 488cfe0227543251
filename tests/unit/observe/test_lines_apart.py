"""What a reader is told of settings that ranks have differently."""

from __future__ import annotations

import pytest
from shardproof.observe.settings import lines_apart


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["float 0.020833333333333332", "float 0.0625"], ["0.0208333", "0.0625"]),
        (["float 0.020833333333333332", "float 0.02083333333333333"], ["0.020833333333333332", "0.02083333333333333"]),
        (["int 3", "int 5"], ["3", "5"]),
        (["str 'a'", "str 'b'"], ["'a'", "'b'"]),
        (["int 3", "float 3.0"], ["the int 3", "the float 3.0"]),
        (["float", "tensor float32 ()"], ["a float", "a tensor of float32 and the shape ()"]),
        (["NoneType", "bool True"], ["None", "the bool True"]),
        (["a\nb", "b\na"], ["'a\\nb'", "'b\\na'"]),
    ],
)  # fmt: skip
def test_values_of_one_type_are_told_without_it(lines: list[str], told: list[str]) -> None:
    assert lines_apart(lines) == told
