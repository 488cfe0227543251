"""A defect is found by its number, its address or words, and is told with commands that can be typed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from shardproof.cli.main import entry
from shardproof.issues.lookup import described, lookup, planted
from shardproof.protocol.registry import all_systems
from shardproof.space.files import load_space
from shardproof.verdict import ExitStatus


def ids(*words: str) -> tuple[list[str], list[str]]:
    findings, faults = lookup(words, all_systems())
    return [finding.id for finding in findings], [fault.id for fault in faults]


def test_a_number_is_found_whole_in_ids_and_addresses() -> None:
    findings, faults = ids("2777")
    assert "megatron-core-2777" in findings
    assert "stale-index-map" in faults
    assert ids("#2777") == (findings, faults)
    assert ids("277") == ([], [])


def test_an_address_and_words_are_found() -> None:
    assert "megatron-core-2777" in ids("https://github.com/NVIDIA/Megatron-LM/issues/2777/")[0]
    assert "megatron-core-2777" in ids("NVIDIA/Megatron-LM#2777")[0]
    assert ids("DeepSpeed#2777") == ([], [])
    found = ids("deepspeed", "OFFLOAD")[0]
    assert found
    assert all(name.startswith("deepspeed") for name in found)


def test_a_word_is_found_with_another_ending_and_in_the_name_of_a_regression() -> None:
    assert "megatron-core-2777" in ids("swapped", "moments")[0]
    assert ids("swapping") == ids("swaps") == ids("swap")


def test_words_that_no_entry_has_together_are_counted_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry(["known", "moments", "gremlins"]) == ExitStatus.USAGE
    assert re.search(
        r"; 'moments' is in \d\d entries, 'gremlins' is in no entries; for example: ", capsys.readouterr().err
    )


def test_without_words_every_entry_and_no_fault() -> None:
    findings, faults = ids()
    assert len(findings) > 100
    assert not faults


def test_trainers_that_ship_have_their_entries_looked_through() -> None:
    command = [sys.executable, "-m", "shardproof", "known", "expert_mesh", "167178"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("expert_mesh-divided-twice")
    named = re.search(r"shows it: +shardproof run regressions/expert_mesh:\S+ --plugin (\S+)", ran.stdout)
    assert named is not None
    assert Path(named[1]).is_file()


def test_the_commands_name_scenarios_that_are_there() -> None:
    findings, faults = lookup(("3949",), all_systems())
    lines = [line for finding in findings for line in described(finding)]
    shown = [line.split("run ")[1] for line in lines if "shows it:" in line]
    assert shown
    for name in shown:
        assert load_space(name).scenarios
    assert any("shardproof faults --fault stale-host-copies" in line for fault in faults for line in planted(fault))


@pytest.mark.parametrize(("words", "status", "said"), [(["2777"], 0, "shows it:"), (["2777888"], 2, "2777888")])
def test_the_command(words: list[str], status: int, said: str) -> None:
    command = [sys.executable, "-m", "shardproof", "known", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == status
    assert said in ran.stdout + ran.stderr


@pytest.mark.parametrize(("number", "scripted"), [("8439", False), ("143580", True)])
def test_no_script_is_offered_where_two_ways_are_compared(number: str, scripted: bool) -> None:
    command = [sys.executable, "-m", "shardproof", "known", number]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{number} " in done.stdout
    assert ("shardproof export" in done.stdout) == scripted
