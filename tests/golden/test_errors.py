"""The messages a user gets for bad input, word for word, in `errors.txt`. SHARDPROOF_ACCEPT=1 rewrites it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.program import operations
from shardproof.scenario import Scenario
from shardproof.space.files import load_space, parse_settings, parse_strength
from shardproof.space.plan import Selection, make_plan, parse_shard
from shardproof.tables import load_toml

pytestmark = pytest.mark.usefixtures("shipped")

GOLDEN = Path(__file__).with_name("errors.txt")
SPACE = "schema = 1\n[space]\n[axes]\n"
SYSTEM = "[system.torch-fsdp2]\n"


def planned(text: str, **axes: tuple[str, ...]) -> Callable[[], object]:
    """Planning a space file of that text."""

    def plan() -> object:
        Path("mine.toml").write_text(text)
        return make_plan([load_space("mine.toml")], Selection(axes=axes))

    return plan


def with_axis(axis: str, text: str) -> Callable[[], object]:
    return lambda: Scenario().with_axes({axis: text})


CASES: dict[str, Callable[[], object]] = {
    "impossible mesh": with_axis("mesh", "0x2x1"),
    "mesh of two sizes": with_axis("mesh", "2x2"),
    "unknown axis": with_axis("colour", "red"),
    "unknown dtype stage": with_axis("dtype", "fp32/moment=bf16"),
    "unknown storage dtype": with_axis("dtype", "fp8"),
    "unknown optimizer": with_axis("optimizer", "lion"),
    "loss scale that is no power of two": with_axis("optimizer", "adamw/loss_scale=1000.0"),
    "unknown load relation": with_axis("load", "bigger"),
    "too many microbatches": with_axis("microbatches", "4"),
    "illegal program": lambda: operations("build load"),
    "malformed TOML": planned("schema = 1\n[scenario\n"),
    "another schema": lambda: load_toml("schema = 9", "mine.toml"),
    "neither space nor scenario": planned("schema = 1\n"),
    "unknown key": planned("schema = 1\n[space]\nstrenght = 2\n"),
    "unknown axis of a space": planned(f'{SPACE}dtypes = ["fp32"]\n{SYSTEM}'),
    "unknown value of a space": planned(f'{SPACE}model = ["dense", "sparse"]\n{SYSTEM}'),
    "value that is no list": planned(f'{SPACE}model = "dense"\n{SYSTEM}'),
    "repeated value": planned(f'{SPACE}mesh = ["world<=2", "1x2x1"]\n{SYSTEM}'),
    "negative budget": planned(f"{SPACE}{SYSTEM}budget_s = -1\n"),
    "space without systems": planned(f'{SPACE}model = ["dense"]\n'),
    "scenario that is no table": planned("schema = 1\nscenario = 3\n"),
    "excluded scenario": planned('schema = 1\n[scenario]\nsystem = "torch-fsdp2"\nmesh = "1x8x1"\nload = "grow"\n'),
    "scenario that no system supports": planned(
        'schema = 1\n[scenario]\nsystem = "torch-fsdp2"\nmodel = "mixed_unit"\ndtype = "mixed"\n'
    ),
    "nothing left of a space": planned(f'{SPACE}model = ["unused"]\n{SYSTEM}', mesh=("1x1x2",)),
    "setting without a value": lambda: parse_settings(["dtype"]),
    "setting of the system": lambda: parse_settings(["system=reference"]),
    "strength": lambda: parse_strength("most"),
    "shard": lambda: parse_shard("3/2"),
}


def message(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


def test_error_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = "".join(f"# {case}\n{message(call)}\n\n" for case, call in CASES.items())
    if os.environ.get("SHARDPROOF_ACCEPT"):
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text("utf-8")


@pytest.mark.parametrize("name", ["smokey", "absent.toml", "../pyproject", "known_issues"])
def test_an_unknown_name_lists_the_known_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = message(lambda: load_space(name))
    assert repr(name) in text
    assert "nightly, smoke, weekly" in text
    assert text.endswith("for example: shardproof run smoke")


@pytest.mark.parametrize("name", ["torch-fsdp2-164929", "164929"])
def test_the_bare_name_of_a_regression_leads_to_it(name: str) -> None:
    assert "regressions/torch-fsdp2-164929" in message(lambda: load_space(name)).partition("for example")[0]


def test_a_folder_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    folder, binary = tmp_path / "folder.toml", tmp_path / "binary.toml"
    folder.mkdir()
    binary.write_bytes(b"\xff\xfe\x00")
    assert "Is a directory" in message(lambda: load_space(str(folder)))
    assert "a text file in UTF-8" in message(lambda: load_space(str(binary)))
