"""What a run's `--json` says of each scenario, without what two runs of the same code may differ in.

    python -m tests.golden.verdicts run.json > tests/golden/verdicts/smoke.json

`test_verdicts.py` compares: a change of the house must change no verdict, no evidence and no explanation. Three things
differ between runs of the same code and are left out or made equal here: the bits of what depends on a square root, the
order in which an error message prints a Python set, and which of two verdicts a race comes to.
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
_OF_A_DIFFERENCE = ("name", "role", "kind", "ranks", "op_index", "mismatched", "total")
_OF_WHAT_IS_STEPPED = ("name", "role", "kind", "op_index", "total")
_STEPPED = ("param", "compute_param", "master")
"""What is recorded of a difference: which elements are wrong, and where. Not the bits that they have: torch takes fp32
square roots from MKL, which rounds other elements up on AMD's CPUs than on Intel's
(`harness/shardproof/world/server.py`). Of what an optimizer steps, not even how many: an update that is wrong by little
may round to the same bits on one of them. Nor of anything behind a gradient that was clipped: its norm is a square
root."""
_RACES = {"ed1610516a16": {"crash": "nondeterministic"}}
"""Scenario id → a verdict that it has as often as another, and that other one. In megatron-fsdp-clip-empty-rank a rank
fails while others wait for it: whether the second attempt fails in the same place is chance."""
_PEER_LEFT = re.compile(r"RuntimeError: \[.*(Connection closed by peer|Connection reset by peer).*")
"""What gloo says of a peer that went away: which of the two, is chance."""


def facts(result: Mapping[str, Any]) -> list[Any]:
    """What must stay of one result: system, verdict, operation, signature, a digest of every difference, the mechanisms
    of its explanations, known issue.

    Of a scenario that crashed, how far the other ranks came is a matter of timing: only the error counts.
    """
    failed = result["failed_op"]
    place = f"{failed['index']} {failed['name']}" if failed else ""
    verdict = _RACES.get(result["id"], {}).get(result["verdict"], result["verdict"])
    if result["error"] is not None:
        return [result["system"], verdict, place, _message(result["error"]), "", [], result["known_issue"]]
    clipped = "/clip=" in result["scenario"]["optimizer"]
    rows = sorted(json.dumps([d[key] for key in _recorded(d, clipped)]) for d in result["differences"])
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16] if rows else ""
    mechanisms = [e["mechanism"] for e in result["explanations"]]
    return [result["system"], verdict, place, result["signature"], digest, mechanisms, result["known_issue"]]


def _recorded(difference: Mapping[str, Any], clipped: bool) -> tuple[str, ...]:
    by_value = difference["kind"] == "bits" or (difference["kind"] == "dtype" and difference["op_index"] > 0)
    rounded = by_value and (clipped or difference["role"] in _STEPPED)
    return _OF_WHAT_IS_STEPPED if rounded else _OF_A_DIFFERENCE


def _message(error: Mapping[str, Any]) -> str:
    """Type and first line of an error, without numbers and paths, and with the elements of sets in order."""
    first = next(iter(error["message"].splitlines()), "")
    plain = _PEER_LEFT.sub("RuntimeError: a peer went away", re.sub(r"\d+|/\S+", "N", f"{error['type']}: {first}"))
    return re.sub(r"\{([^{}]*)\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", plain)[:160]


def record(document: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Scenario id → its facts, in order, of a run's document."""
    return dict(sorted((result["id"], facts(result)) for result in document["results"]))


def text(recorded: Mapping[str, list[Any]]) -> str:
    """One line a scenario."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in recorded.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(text(record(json.loads(Path(sys.argv[1]).read_text("utf-8")))))
