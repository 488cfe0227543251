"""How much work things are, against what is recorded in `work.toml`: calls of our functions, modules imported.

A count that is 10 % above the record fails, and so does one above its ceiling, whatever is recorded. A record may be
renewed only with the reason in the commit; a ceiling stays. See benchmarks/work.py, also for what is counted and how to
record it.
"""

from __future__ import annotations

import pytest

from benchmarks import work
from benchmarks.work import MEASURES, Count, count, recorded

EVERY = [(kind, name) for kind, measures in MEASURES.items() for name in measures]


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=[name for _, name in EVERY])
def test_nothing_has_become_more_work(kind: str, name: str) -> None:
    found = count(kind, name)
    print(found.line)  # a hint where it has become less
    assert not found.is_too_much, found.line
    assert not found.is_above_ceiling, found.line


def test_everything_recorded_is_counted() -> None:
    assert {(kind, name) for kind, counts in recorded().items() for name in counts} == set(EVERY)


def test_a_count_says_what_to_do() -> None:
    assert Count("calls", "plan", 110, 100).line == "plan: 110 calls, recorded 100 (+10.0 %)"
    assert "+11.0 %); too many: find out why, or record them" in Count("calls", "plan", 111, 100).line
    assert "-11.0 %); fewer: record them with python -m benchmarks.work --renew" in Count("calls", "plan", 89, 100).line
    assert Count("calls", "new", 5, None).is_too_much


def test_no_record_lifts_a_ceiling() -> None:
    assert work.CEILINGS["calls", "plan nightly"] == (70, work.planned_nightly)
    assert work.ceiling("modules", "list") is None
    assert not Count("calls", "plan", 70, 70, ceiling=70).is_above_ceiling
    above = Count("calls", "plan", 71, 71, ceiling=70)
    assert above.is_above_ceiling
    assert not above.is_too_much
    assert "above the ceiling of 70, which no record lifts" in above.line
    written = work.RECORD.read_text("utf-8") if work.RECORD.is_file() else ""
    assert "ceiling" not in written, "a renewal writes the record, and no ceiling may lie in it"
