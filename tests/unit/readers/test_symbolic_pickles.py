"""The pickle machine, opcode by opcode: what each puts on the stack, and what a stream that breaks its rules is told.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`); the refusals are in
`golden/refusals.txt`."""

from __future__ import annotations

import pytest
from shardproof.readers.errors import CheckpointError
from shardproof.readers.symbolic import PERSISTENT, Mapping, Name, Node, parse, parse_first

pytestmark = pytest.mark.usefixtures("refused_word_for_word")

START = b"\x80\x02"
SIZE, A, B = b"ctorch\nSize\n", b"\x8c\x01a", b"\x8c\x01b"


def parsed(code: bytes) -> object:
    return parse(START + code + b".", "it")


def node(code: bytes) -> Node:
    found = parsed(code)
    assert isinstance(found, Node)
    return found


def test_a_pickle_that_other_bytes_follow_says_where_it_ends() -> None:
    assert parse_first(START + b"K\x07.more", "it") == (7, 5)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (b"N", None), (b"\x88", True), (b"\x89", False), (b"K\xff", 255), (b"M\x01\x02", 513),
        (b"J\xfe\xff\xff\xff", -2), (b"\x8a\x02\x00\x80", -32768), (b"\x8a\x00", 0),
        (b"G\xbf\xe0" + bytes(6), -0.5),
        (b"X\x02\0\0\0\xc3\xa9", "é"), (b"\x8c\x02ab", "ab"), (b"\x8d\x01" + bytes(7) + b"a", "a"),
        (b"B\x02\0\0\0ab", b"ab"), (b"C\x02ab", b"ab"), (b")", ()), (b"(K\1K\2t", (1, 2)), (b"(t", ()),
        (b"K\1\x85", (1,)), (b"K\1K\2\x86", (1, 2)), (b"K\1K\2K\3\x87", (1, 2, 3)), (b"]", []), (b"]K\1a", [1]),
        (b"](K\1K\2e", [1, 2]), (SIZE, Name("torch", "Size")), (A + B + b"\x93", Name("a", "b")),
        (b"\x95" + bytes(8) + b"K\1", 1), (b"K\1q\x03h\x03\x86", (1, 1)),
        (b"K\1r\x00\x01\0\0j\x00\x01\0\0\x86", (1, 1)),
        (b"(K\1\x94K\2\x94h\0h\1t", (1, 2, 1, 2)),
    ],
)  # fmt: skip
def test_what_an_opcode_makes(code: bytes, value: object) -> None:
    assert parsed(code) == value
    assert type(parsed(code)) is type(value)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_protocols_that_are_read(version: int) -> None:
    assert parse(bytes([0x80, version]) + b"N.", "it") is None


def test_a_dict_keeps_its_pairs_in_order_and_repeated_ones_too() -> None:
    once = parsed(b"}" + A + b"K\1s")
    many = parsed(b"}(" + A + b"K\1" + A + b"K\2u")
    assert isinstance(once, Mapping)
    assert isinstance(many, Mapping)
    assert once.pairs == [("a", 1)]
    assert many.pairs == [("a", 1), ("a", 2)]


def test_calls_are_recorded_with_what_is_set_on_what_they_would_make() -> None:
    for call in (b"R", b"\x81"):
        found = node(SIZE + b"K\1\x85" + call + b"(K\2K\3e" + A + b"K\4s" + B + b"b")
        assert (found.function, found.args) == (Name("torch", "Size"), (1,))
        assert (found.items, found.pairs, found.state) == ([2, 3], [("a", 4)], "b")
    persistent = node(A + b"Q")
    assert (persistent.function, persistent.args, persistent.state) == (PERSISTENT, ("a",), None)


@pytest.mark.parametrize(
    "code",
    [
        b"", b"K\1K\2", b"(K\1", b"\1", b"\xff", b"\x80\x01N", b"\x80\x05N", b"X\x09\0\0\0ab", b"K", b"ctorch", b"h\7",
        b"K\1(a", b"](aK\1", b"\x85", b"K\1\x86", b"t", b"K\1" + A + b"\x93", A + b"K\1\x93", A + b")R", SIZE + b"]R",
        b"]Nb", SIZE + b")R" + A + b"b" + B + b"b", b"]" + A + b"K\1s", b"}(" + A + b"u", b"}K\1a", b"\x8c\x01\xff",
        b"K\1K\1Qa", b"(u", b"K\1b",
        b"K\1(\x85t\x86",
    ],
)  # fmt: skip
def test_what_breaks_the_rules_of_the_machine(code: bytes) -> None:
    with pytest.raises(CheckpointError):
        parsed(code)


def test_bytes_that_do_not_begin_as_a_pickle_are_shown() -> None:
    for data in (b"", b"\x81" + bytes(40), b"N."):
        with pytest.raises(CheckpointError):
            parse_first(data, "it")


def test_a_pickle_has_one_value_and_at_most_so_many_bytes() -> None:
    assert parse(START + b"K\x07.", "it", 5) == 7
    for data, limit in ((START + b"K\x07.", 4), (START + b"K\x07.NN", 99)):
        with pytest.raises(CheckpointError):
            parse(data, "it", limit)
