"""Parameters of several names, in two ways to compute the same."""

from __future__ import annotations

from shardproof.trainer.step.shared import differs_where_shared, tied_in_one

WAYS = ("shard=no", "shard=yes")
TIED = frozenset({"head", "embed"})


def test_a_parameter_that_only_one_way_ties_is_named() -> None:
    told = "embed and head are one parameter with shard={}, and with shard={} they are not: each is stepped there with"
    assert tied_in_one([{TIED}, set()], WAYS, {"head", "embed"}).startswith(told.format("no", "yes"))
    assert tied_in_one([set(), {TIED}], WAYS, {"head", "embed"}).startswith(told.format("yes", "no"))


def test_nothing_is_said_where_both_tie_it_or_one_has_not_both_names() -> None:
    assert tied_in_one([{TIED}, {TIED | {"more"}}], WAYS, {"head", "embed"}) == ""
    assert tied_in_one([{TIED}, set()], WAYS, {"head"}) == ""


def test_what_differs_may_be_what_is_used_more_than_once() -> None:
    every = {"head", "embed", "norm"}
    assert differs_where_shared({"head", "embed"}, every, {TIED}).startswith("The parameters that differ are those")
    assert differs_where_shared({"head", "embed", "norm"}, every, {TIED}) == ""
    assert differs_where_shared({"head"}, every, set()) == ""
    assert differs_where_shared(TIED, TIED, {TIED}) == ""
