"""What the command line prints, word for word, in `cli/*.txt`. SHARDPROOF_ACCEPT=1 rewrites them.

Each text is printed by a process of its own (`command_outputs.py`), so that what other tests register is not in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from shardproof.cli.main import cli

from tests.paths import PYTHONPATH

GOLDEN = Path(__file__).with_name("cli")
ROOT = Path(__file__).parents[2]
COMMANDS = (
    "trainer",
    "init",
    "run",
    "plan",
    "list",
    "replay",
    "sweep",
    "bisect",
    "explain",
    "report",
    "history",
    "merge",
    "faults",
    "doctor",
    "inspect",
    "known",
    "cures",
    "shrink",
    "explore",
    "export",
    "conformance",
    "optimizer",
    "diff",
    "resilience",
    "port",
    "claims",
    "night",
    "completion",
)
DEFECT = "regressions/torch-fsdp2-164929"

PRINTED: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    **{f"help-{command}": (command, "--help") for command in COMMANDS},
    "list": ("list",),
    "plan-smoke": ("plan", "smoke"),
    "plan-shard": ("plan", "--system", "reference", "--set", "mesh=1x2x1", "--sample", "5", "--shard", "1/2"),
}
REFUSED: dict[str, tuple[str, ...]] = {
    "no such command": ("rum",),
    "no such option": ("run", "--sytem", "reference"),
    "no such scenario": ("run", "smokey"),
    "no such system": ("run", "--system", "torch-fsdp3"),
    "no system for a stack": ("run", "--system", "accelerate"),
    "no such optimizer": ("run", "--system", "torch-fsdp2", "--set", "optimizer=lion"),
    "no such format": ("run", "--system", "torch-fsdp2", "--set", "checkpoint=orbax"),
    "a script for a scenario": ("run", "train.py"),
    "no stack of that format": ("resilience", "orbax"),
    "no such axis": ("run", "--set", "colour=red"),
    "no such value": ("run", "--set", "dtype=fp8"),
    "no such fault": ("run", "--fault", "gremlins"),
    "no such plugin": ("run", "--plugin", "no_such_module"),
    "no such interpreter": ("run", "--python", "/nowhere/python"),
    "no releases": ("sweep", DEFECT, "--system", "reference"),
    "no such release": ("sweep", DEFECT, "--system", "megatron-core", "--versions", "newest"),
    "no release in a range": ("sweep", DEFECT, "--system", "megatron-core", "--versions", "1.0..2.0"),
    "no chain": ("bisect", DEFECT, "--system", "megatron-core", "--good", "0.13.0", "--bad", "git:main"),
    "no clone": ("bisect", DEFECT, "--system", "megatron-core", "--good", "git:v1", "--bad", "git:v2"),
    "a port without a version": ("port", "megatron-core"),
    "a port of torch": ("port", "torch-fsdp2@2.13.0"),
    "claims without a clone": ("claims", "megatron-core"),
    "no such torch": ("run", "--torch", "1.13"),
    "a range without a release of torch": ("sweep", DEFECT, "--versions", "2.16..2.17"),
    "no such clone": ("run", "--clone", "megatron-core=/nowhere"),
    "another release of what is installed": ("run", "--system", "torch-fsdp2@1.0"),
    "no such scenario to sweep": ("sweep", "1a2b", "--system", "megatron-core"),
    "no cuda": ("run", "--device", "cuda"),
    "no such shard": ("run", "--shard", "4/3"),
    "unwritable folder": ("run", "--out", "/proc/nothing"),
    "unwritable file": ("run", "--json", "/proc/nothing/run.json"),
    "no runs": ("explain", "1a2b"),
    "no such run": ("report", "reports/nightly"),
    "no such history": ("history", "reports/nightly"),
    "no night of a history": ("history", "reports/nightly", "--nights", "0"),
    "nothing to merge": ("merge", "part1", "part2", "--out", "all"),
    "no such system to check": ("conformance", "torch-fsdp3"),
    "no path of an optimizer": ("optimizer", "AdamW"),
    "an argument of an optimizer that is none": ("optimizer", "torch.optim.SGD", "--arg", "momentum"),
    "a mesh that does not shard": ("optimizer", "torch.optim.AdamW", "--mesh", "1x1x1"),
    "no such checkpoint": ("inspect", "checkpoints/step-100"),
    "no such stack": ("resilience", "torch.save"),
    "a trial of no one stack": ("resilience", "--trial", "killed@1"),
    "no such checkpoint to compare": ("diff", "checkpoints/step-100", "checkpoints/step-200"),
    "a rename that is none": ("diff", "a.pt", "b.pt", "--rename", "module"),
}


Said = tuple[int, str, str]
"""Exit status, standard output, standard error."""


def shardproof(folder: Path, commands: Iterable[tuple[str, ...]]) -> list[Said]:
    """What each command says, in that folder."""
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR") and "CLONE" not in k}
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.command_outputs"], input=json.dumps(list(commands)),
        cwd=folder, env={**environment, "PYTHONPATH": PYTHONPATH}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return [(status, out, err) for status, out, err in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    return dict(zip(PRINTED, shardproof(tmp_path_factory.mktemp("printed"), PRINTED.values()), strict=True))


def golden(name: str, found: str) -> str:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("SHARDPROOF_ACCEPT"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    return path.read_text("utf-8")


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed(name: str, printed: dict[str, Said]) -> None:
    status, out, err = printed[name]
    assert (status, err) == (0, "")
    out = re.sub(r"(  regressions/\S+\n)+", "  regressions/…\n", out)
    assert out == golden(name, out)


def test_what_refused_commands_say(tmp_path: Path) -> None:
    texts = []
    said = shardproof(tmp_path, REFUSED.values())
    for (case, words), (status, out, err) in zip(REFUSED.items(), said, strict=True):
        assert (status, out) == (2, ""), case
        texts.append(f"# {case}: shardproof {' '.join(words)}\n{err}\n")
    found = re.sub(r"--python /\S+", "--python PYTHON", "".join(texts).replace("/nowhere/python", "NOWHERE"))
    found = re.sub(r"2\.\d+\.\d+(\+cpu)?, which is installed", "2.N, which is installed", found)
    found = re.sub(r"(regressions/\S+, )+", "regressions/…, ", found)
    assert found == golden("refused", found)
    assert [p for p in tmp_path.iterdir() if not p.name.startswith(".coverage")] == []


def test_every_command_has_a_golden_help(printed: dict[str, Said]) -> None:
    _, out, _ = printed["help"]
    listed = re.findall(r"^  (\w+)  ", out.partition("\nWhether a library")[2], re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS) == sorted(cli.commands)


def test_the_version_is_printed(tmp_path: Path) -> None:
    ((status, out, _),) = shardproof(tmp_path, [("--version",)])
    assert status == 0
    assert re.fullmatch(r"shardproof, version \d+\.\d+\.\d+\n", out)
