"""Which tests of a long run have no result yet: a night that was cut off goes on where it ended.

    python -m pytest -n 3 --dist loadgroup --report-log=night.jsonl -m nightly tests/conformance
    python -m tests.unfinished_tests night.jsonl -- -m nightly tests/conformance > left.txt
    python -m pytest -n 3 --dist loadgroup --report-log=night-2.jsonl @left.txt

Before `--` stand the logs of all runs so far, behind it what pytest was told to run. A test that failed has a result;
`--lf` is for those.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable

_GROUP = re.compile(r"@[^\]]*$")
"""What `--dist loadgroup` puts behind an id."""


def ended(lines: Iterable[str]) -> set[str]:
    """The node ids that have an outcome in a log of pytest-reportlog. Its last line may be cut off."""
    found = set()
    for line in lines:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue
        if told.get("$report_type") == "TestReport" and (told["when"] == "call" or told["outcome"] != "passed"):
            found.add(_GROUP.sub("", told["nodeid"]))
    return found


def main(arguments: list[str]) -> None:
    """Print the node ids of what is left, one a line, in the order in which pytest collects them."""
    at = arguments.index("--")
    done: set[str] = set()
    for log in arguments[:at]:
        with open(log, encoding="utf-8") as lines:
            done |= ended(lines)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments[at + 1 :]]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print("\n".join(name for name in told.splitlines() if "::" in name and name not in done))


if __name__ == "__main__":
    main(sys.argv[1:])
