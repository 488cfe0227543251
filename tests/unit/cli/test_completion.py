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

import click
import pytest
import report_samples as samples
from shardproof.cli.completion import SHELLS
from shardproof.cli.main import cli
from shardproof.folders import point_latest
from shardproof.report.html import write_html
from shardproof.store import Store
from shardproof.wording.titles import title

from tests.paths import PYTHONPATH

PROGRAM = """
import sys
from shardproof.cli.main import entry
sys.argv[0] = "shardproof"
status = entry([])
assert not {"numpy", "torch"} & set(sys.modules)
sys.exit(status)
"""


def completed(line: str) -> list[str]:
    """What bash is told of a line that ends where the cursor is."""
    environment = {
        **os.environ, "_SHARDPROOF_COMPLETE": "bash_complete", "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1), "PYTHONPATH": PYTHONPATH,
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return [row.partition(",")[2] for row in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", "completion", shell], capture_output=True, text=True, check=True
    )
    assert "_SHARDPROOF_COMPLETE" in done.stdout
    assert SHELLS[shell] in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_takes_its_script(tmp_path: Path) -> None:
    script = tmp_path / "complete.sh"
    with script.open("w") as file:
        subprocess.run([sys.executable, "-m", "shardproof", "completion", "bash"], stdout=file, check=True)
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


# --- ids of results ------------------------------------------------------------------------------------------


@pytest.fixture
def latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of every kind of result and its pages, to which `reports/latest` leads."""
    folder = tmp_path / "reports" / "mine"
    report = samples.report()
    write_html(report, folder)
    with Store(folder / "results.sqlite") as store:
        run = store.begin_run(("run", "mine"), 0, {})
        store.finished_many(run, report.results)
    point_latest(folder)
    monkeypatch.chdir(tmp_path)
    return folder


def offered(command: str, begun: str = "", **params: object) -> dict[str, str]:
    """What a command's argument offers, with what is said of each."""
    known = cli.commands[command]
    context = click.Context(known)
    context.params.update(params)
    argument = next(parameter for parameter in known.params if isinstance(parameter, click.Argument))
    return {str(item.value): item.help or "" for item in argument.shell_complete(context, begun)}


@pytest.mark.parametrize("command", ["explain", "replay"])
def test_ids_of_failures_have_their_titles(latest: Path, command: str) -> None:
    found = offered(command)
    assert set(found) == {result.id for result in samples.report().failures}
    assert found[samples.crash().id] == title(samples.crash())
    assert found[samples.mismatch().id] == title(samples.mismatch())


@pytest.mark.parametrize("command", ["shrink", "export", "sweep", "bisect"])
def test_ids_and_files_where_either_is_taken(latest: Path, command: str) -> None:
    wanted = samples.crash().id
    assert set(offered(command, wanted[:4])) == {wanted}
    assert wanted in offered(command)
    assert "regressions/torch-fsdp2-164929" in offered(command, "regressions/torch-fsdp2-1649")


def test_a_passing_result_is_offered_where_no_failure_begins_so(latest: Path) -> None:
    passed = samples.passing(1)
    assert offered("explain", passed.id[:8]) == {passed.id: "pass"}
    assert passed.id not in offered("explain")
    assert passed.id not in offered("export", passed.id[:8])


def test_another_folder_has_other_ids(latest: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "sweeps.sqlite") as store:
        store.finished_many(store.begin_run(("sweep", "x"), 0, {}), [samples.mismatch(seed="9")])
    other = samples.mismatch(seed="9")
    assert offered("explain", out=tmp_path) == {other.id: other.signature}, "without a page: the signature"


def test_what_cannot_be_read_offers_nothing(latest: Path, tmp_path: Path) -> None:
    (tmp_path / "results.sqlite").write_text("no database")
    assert offered("explain", out=tmp_path) == {}
    assert offered("explain", out=tmp_path / "nowhere") == {}


def test_ids_come_without_numpy(latest: Path) -> None:
    wanted = samples.crash().id
    assert completed(f"shardproof explain {wanted[:5]}") == [wanted]


def test_a_quiet_run_that_passes_says_nothing(tmp_path: Path) -> None:
    words = ("run", "--system", "reference", "--set", "mesh=1x2x1", "--sample", "2", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", *words, "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "index.html").is_file()


def test_a_quiet_run_that_fails_reports(tmp_path: Path) -> None:
    chosen = ("--set", "mesh=1x2x1", "--set", "program=resume", "--set", "model=dense", "--fault", "no-op-load")
    words = ("run", "--system", "reference", *chosen, "--sample", "1", "-q")
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", *words, "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "mismatch" in done.stdout
    assert done.stderr == ""
