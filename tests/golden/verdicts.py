"""What a run's `--json` says of each scenario, without what two runs of the same code may differ in.

    python -m tests.golden.verdicts run.json > tests/golden/verdicts/smoke.json

`test_verdicts.py` compares: a change of the house must change no verdict, no evidence and no explanation.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "verdicts"
_OF_A_DIFFERENCE = ("name", "role", "kind", "ranks", "op_index", "mismatched", "total", "max_ulp", "expected_digest",
                    "observed_digest")  # fmt: skip


def facts(result: Mapping[str, Any]) -> list[Any]:
    """What must stay of one result: system, verdict, operation, signature, a digest of every difference, the mechanisms
    of its explanations, known issue.

    Of a scenario that crashed, how far the other ranks came is a matter of timing: only the error counts.
    """
    failed = result["failed_op"]
    place = f"{failed['index']} {failed['name']}" if failed else ""
    if result["error"] is not None:
        first = next(iter(result["error"]["message"].splitlines()), "")
        text = re.sub(r"\d+|/\S+", "N", f"{result['error']['type']}: {first}")[:160]
        return [result["system"], result["verdict"], place, text, "", [], result["known_issue"]]
    rows = sorted(json.dumps([d[key] for key in _OF_A_DIFFERENCE]) for d in result["differences"])
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16] if rows else ""
    mechanisms = [e["mechanism"] for e in result["explanations"]]
    return [result["system"], result["verdict"], place, result["signature"], digest, mechanisms, result["known_issue"]]


def record(document: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Scenario id → its facts, in order, of a run's document."""
    return dict(sorted((result["id"], facts(result)) for result in document["results"]))


def text(recorded: Mapping[str, list[Any]]) -> str:
    """One line a scenario."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in recorded.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(text(record(json.loads(Path(sys.argv[1]).read_text("utf-8")))))
