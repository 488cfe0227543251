"""The measured rows of the pages on resilience: each stands in the data of the system that it is of.

    python -m docs.written.resilience_rows DIR/resilience.toml FILE.json

puts what `shardproof resilience --out DIR` and `shardproof faults --strike SYSTEM --json FILE.json` have found into
these files, in place of earlier rows of the same stack or fault:

    scenarios/<system>/resilience/stacks.toml    [[stack]] tables, cured ones under names such as dcp+cured
    scenarios/<system>/resilience/struck.json    what came of each boundary fault
    docs/resilience.toml                         [[stack]] tables of stacks that are of no system
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.system import System
from shardproof.resilience.scorecard import Document
from shardproof.resilience.stacks import STACKS, all_stacks, stacks_of
from shardproof.versions import split_cures

HOUSE = Path("docs/resilience.toml")
_WRITTEN = "# Written by python -m docs.written.resilience_rows\n\n"


def stack_rows() -> Document:
    """The rows of all stacks, in the order of `all_stacks`, cured ones behind their plain ones."""
    places = [HOUSE, *map(_stacks_of, all_systems())]
    found = [row for place in places if place.is_file() for row in tomllib.loads(place.read_text("utf-8"))["stack"]]
    order = list(all_stacks())
    return {"stack": sorted(found, key=lambda row: (order.index(split_cures(row["name"])[0]), row["name"]))}


def home_of_stacks(stack: str) -> str:
    """The system that a stack, cured or not, is of; empty for one of no system."""
    name = split_cures(stack)[0]
    return next((system.name for system in all_systems() if name in {one.name for one in stacks_of(system)}), "")


def struck_rows() -> list[Mapping[str, Any]]:
    """What came of each boundary fault, system by system, as their names go."""
    systems = sorted(all_systems(), key=lambda system: system.name)
    places = [place for system in systems if (place := _struck_of(system)).is_file()]
    return [row for place in places for row in json.loads(place.read_text("utf-8"))["struck"]]


def take_stacks(rows: Iterable[Document]) -> None:
    """Put rows of stacks where they belong."""
    homes = {stack.name: HOUSE for stack in STACKS}
    homes |= {stack.name: _stacks_of(system) for system in all_systems() for stack in stacks_of(system)}
    for row in rows:
        place = homes[split_cures(row["name"])[0]]
        kept = tomllib.loads(place.read_text("utf-8"))["stack"] if place.is_file() else []
        _write(place, _WRITTEN + tomli_w.dumps({"stack": _with(kept, row, ("name",))}))


def take_struck(rows: Iterable[Mapping[str, Any]]) -> None:
    """Put what came of boundary faults where it belongs."""
    for row in rows:
        place = _struck_of(system_named(row["system"]))
        kept = json.loads(place.read_text("utf-8"))["struck"] if place.is_file() else []
        _write(place, json.dumps({"struck": _with(kept, row, ("id", "system"))}, indent=1) + "\n")


def _with(kept: Sequence[Document], row: Document, names: Sequence[str]) -> list[Document]:
    """The rows with another one, in the place of an earlier one of that name."""
    key = [row[name] for name in names]
    places = [index for index, one in enumerate(kept) if [one[name] for name in names] == key]
    return [*kept[: places[0]], row, *kept[places[0] + 1 :]] if places else [*kept, row]


def _stacks_of(system: System) -> Path:
    return Path(str(system.folder.joinpath("resilience", "stacks.toml")))


def _struck_of(system: System) -> Path:
    return Path(str(system.folder.joinpath("resilience", "struck.json")))


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(exist_ok=True)
    place.write_text(text, "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        text = Path(name).read_text("utf-8")
        if name.endswith(".toml"):
            take_stacks(tomllib.loads(text)["stack"])
        else:
            take_struck(json.loads(text)["struck"])
