"""What a run that was cut off has left to do.

*Verifies*: that a test counts as done once it was called, or was skipped or failed before; and that a line which was
being written when the run ended is no error. *Does not verify*: the list that pytest collects.
"""

from __future__ import annotations

import json

from tests.unfinished_tests import ended


def line(nodeid: str, when: str, outcome: str) -> str:
    return json.dumps({"$report_type": "TestReport", "nodeid": nodeid, "when": when, "outcome": outcome})


def test_what_has_a_result() -> None:
    lines = [
        json.dumps({"$report_type": "SessionStart"}),
        line("a::begun", "setup", "passed"),
        line("a::passed", "call", "passed"),
        line("a::failed[x@0.16.1]@group", "call", "failed"),
        line("a::skipped", "setup", "skipped"),
        line("a::cut", "call", "passed")[:-9],
    ]
    assert ended(lines) == {"a::passed", "a::failed[x@0.16.1]", "a::skipped"}
