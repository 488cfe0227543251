"""What a shell offers when Tab is pressed, and `--quiet`.

*Verifies*: the script of every shell; words of each kind, as click gives them to a shell.
*Does not verify*: that a shell inserts them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.completion import SHELLS


def completed(line: str) -> list[str]:
    """What bash is told of a line that ends where the cursor is."""
    environment = {
        **os.environ, "_SHARDPROOF_COMPLETE": "bash_complete", "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }  # fmt: skip
    program = "import sys; from harness.cli import entry; sys.argv[0] = 'shardproof'; sys.exit(entry([]))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return [row.partition(",")[2] for row in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "completion", shell], capture_output=True, text=True, check=True
    )
    assert "_SHARDPROOF_COMPLETE" in done.stdout
    assert SHELLS[shell] in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_takes_its_script(tmp_path: Path) -> None:
    script = tmp_path / "complete.sh"
    with script.open("w") as file:
        subprocess.run([sys.executable, "-m", "harness", "completion", "bash"], stdout=file, check=True)
    subprocess.run(["bash", "-n", str(script)], check=True)
    told = subprocess.run(["bash", "-c", f". {script}; complete -p shardproof"], capture_output=True, text=True)
    assert "shardproof" in told.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("shardproof swe", "sweep"),
        ("shardproof run nigh", "nightly"),
        ("shardproof run regressions/torch-fsdp2-1649", "regressions/torch-fsdp2-164929"),
        ("shardproof run --system torch-", "torch-fsdp2"),
        ("shardproof plan --system megatron-core@0.16", "megatron-core@0.16.1"),
        ("shardproof run --set mes", "mesh="),
        ("shardproof run --fault stale-mas", "stale-masters"),
    ],
)
def test_words_are_completed(line: str, expected: str) -> None:
    assert expected in completed(line)


def test_a_quiet_run_that_passes_says_nothing(tmp_path: Path) -> None:
    words = ("run", "--system", "reference", "--set", "mesh=1x2x1", "--sample", "2", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words, "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "index.html").is_file()


def test_a_quiet_run_that_fails_reports(tmp_path: Path) -> None:
    chosen = ("--set", "mesh=1x2x1", "--set", "program=resume", "--set", "model=dense", "--fault", "no-op-load")
    words = ("run", "--system", "reference", *chosen, "--sample", "1", "-q")
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words, "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "mismatch" in done.stdout
    assert done.stderr == ""
