"""What sequences of operations say of their loads."""

from __future__ import annotations

from shardproof import sequences


def test_what_had_joined_at_each_load() -> None:
    words = "build save unfreeze step load save load_previous load keep build load_model_only recall save_kept load"
    assert list(sequences.joined_at_loads(words.split(), ("unfreeze",))) == [
        ("load", False, True),
        ("load_previous", False, True),
        ("load", True, True),
        ("load_model_only", True, False),
        ("recall", True, False),
        ("load", True, False),
    ]
