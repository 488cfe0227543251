"""The pickle machine, opcode by opcode: what each puts on the stack, and what a stream that breaks its rules is told.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

import pytest

from harness.readers.symbolic import parse, parse_first

pytestmark = pytest.mark.usefixtures("refused_word_for_word")

START = b"\x80\x02"


def parsed(code: bytes) -> object:
    return parse(START + code + b".", "it")


def test_a_pickle_that_other_bytes_follow_says_where_it_ends() -> None:
    assert parse_first(START + b"K\x07.more", "it") == (7, 5)
