"""The records of what is said in unit tests (`tests/recorded_texts.py`) are of tests that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import recorded_texts

UNIT = Path(__file__).parents[1] / "unit"


@pytest.mark.parametrize("file", [recorded_texts.EXPLANATIONS, recorded_texts.REFUSALS], ids=lambda file: file.stem)
def test_every_record_is_of_a_test_that_there_is(file: Path) -> None:
    recorded = recorded_texts.blocks(file)
    assert recorded
    for name in recorded:
        module, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in next(UNIT.rglob(module)).read_text("utf-8"), name


def test_a_word_that_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDPROOF_ACCEPT", raising=False)
    (tmp_path / "said.txt").write_text("# first\nno \\n word\n\n# second\nother\n", "utf-8")
    recorded_texts.check(tmp_path / "said.txt", "first", ["no \n word"])
    recorded_texts.check(tmp_path / "said.txt", "third", [])
    for test, said in (("first", ["no word"]), ("first", []), ("third", ["no word"])):
        with pytest.raises(AssertionError):
            recorded_texts.check(tmp_path / "said.txt", test, said)
