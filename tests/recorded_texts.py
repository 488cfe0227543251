"""What diagnosis and readers say in unit tests, word for word: files of blocks, one for each test.

A test says which mechanism comes first, or which word a refusal has; the files beside it say all of it, so that no
word, number or order changes without being read. SHARDPROOF_ACCEPT=1 writes the blocks of the tests that run anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FOLDER = Path(__file__).with_name("golden")
EXPLANATIONS = FOLDER / "explanations.txt"
REFUSALS = FOLDER / "refusals.txt"


def blocks(file: Path) -> dict[str, str]:
    """Test → what is said in it."""
    found: dict[str, str] = {}
    for block in file.read_text("utf-8").split("\n\n") if file.exists() else ():
        name, _, text = block.strip().partition("\n")
        found[name.removeprefix("# ")] = text
    found.pop("", None)
    return found


def check(file: Path, test: str, said: list[str]) -> None:
    """Compare what was said in a test with what is recorded of it."""
    text = "\n".join(json.dumps(line, ensure_ascii=False)[1:-1].replace('\\"', '"') for line in said)
    recorded = blocks(file)
    if os.environ.get("SHARDPROOF_ACCEPT") == "1":
        recorded |= {test: text}
        kept = sorted((name, text) for name, text in recorded.items() if text)
        file.write_text("\n\n".join(f"# {name}\n{text}" for name, text in kept) + "\n", "utf-8")
    assert text == recorded.get(test, ""), f"{file.name}: {test}"
