"""`run`, `replay`, `sweep` and `bisect` on releases of a library, with the fake one; ranks in another interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardproof.cli.main import entry
from shardproof.folders import CACHE_VARIABLE
from shardproof.protocol.releases import package
from shardproof.verdict import ExitStatus
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import build

from tests.unit.overlay_system import FAKE, isolate, write_library

ROOT = Path(__file__).parents[3]
PLUGIN = ("--plugin", "tests.unit.overlay_system")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield isolate(patch, tmp_path_factory.mktemp("overlays"))


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fake.toml"
    path.write_text(FAKE.to_toml())
    return path


@pytest.mark.nightly
@pytest.mark.real
def test_a_sweep_is_a_table_and_a_document(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", str(scenario), "--versions", "1.0..1.2", "--json", "sweep.json", *PLUGIN]
    assert entry(words) == ExitStatus.FAILURE
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines() if line[:2] == "1."}
    assert rows == {"1.0": "pass", "1.1": "mismatch", "1.2": "unknown"}
    assert "no_such_dependency" in out
    document = json.loads(Path("sweep.json").read_text())
    assert [(row["asked"], row["version"], row["verdict"]) for row in document["rows"]] == [
        ("1.0", "1.0", "pass"), ("1.1", "1.1", "mismatch"), ("1.2", "1.2", "unknown"),
    ]  # fmt: skip
    page = Path("reports/sweep-fake/releases.html").read_text("utf-8")
    assert "came with 1.1" in page
    failed = document["rows"][1]["id"]
    assert f'href="failures/{failed}.html"' in page
    assert entry(["explain", failed, "--page"]) == ExitStatus.OK
    assert capsys.readouterr().out == f"reports/sweep-fake/failures/{failed}.html\n"


@pytest.mark.nightly
@pytest.mark.real
def test_a_bisection_says_where_it_changed(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bisect", str(scenario), "--good", "1.0", "--bad", "1.1", "--json", "found.json", *PLUGIN]
    assert entry(words) == ExitStatus.OK
    said = capsys.readouterr()
    assert said.out.startswith("last good  1.0\nfirst bad  1.1\n")
    assert said.err.splitlines()[-2:] == ["1.1: bad (mismatch: build: param bits)", "1.0: good (pass)"]
    assert json.loads(Path("found.json").read_text())["first_bad"] == "1.1"


@pytest.mark.real
def test_a_run_on_a_release_names_it_and_replays(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(scenario), "--system", "fake@1.0", "--system", "fake@1.1", "--out", "out", "--json", "run.json"]
    assert entry([*words, *PLUGIN]) == ExitStatus.FAILURE
    document = json.loads(Path("run.json").read_text())
    assert document["run"]["versions"]["fake-lib"] == "1.0, 1.1"
    assert document["run"]["outside_support"].keys() == {"fake 1.0", "fake 1.1"}
    failed = next(result["id"] for result in document["results"] if result["verdict"] == "mismatch")
    capsys.readouterr()
    assert entry(["replay", failed, "--out", "out", *PLUGIN]) == ExitStatus.FAILURE
    assert capsys.readouterr().out.startswith("mismatch  fake 1.1")


@pytest.mark.parametrize(
    ("version", "said"),
    [("1.2", "no_such_dependency"), ("9.9", "No matching distribution found"), ("path:/nowhere", "a folder with"),
     ("git:main", "--clone fake-lib=DIR"), ("newest", "declared releases: 1.0")],
)  # fmt: skip
def test_a_release_that_cannot_run_is_bad_usage_and_nothing_runs(
    scenario: Path, capsys: pytest.CaptureFixture[str], version: str, said: str
) -> None:
    assert entry(["run", str(scenario), "--system", f"fake@{version}", "--out", "out", *PLUGIN]) == ExitStatus.USAGE
    err = capsys.readouterr().err
    assert said in err
    assert "given" in err
    assert "allowed" in err
    assert not Path("out").exists()


@pytest.mark.real
def test_a_working_tree_is_named_from_anywhere(scenario: Path, tmp_path: Path) -> None:
    write_library(tmp_path / "tree", "1.9")
    words = ["run", str(scenario), "--system", "fake@path:tree", "--out", "out", "--json", "run.json", *PLUGIN]
    assert entry(words) == ExitStatus.OK
    (result,) = json.loads(Path("run.json").read_text())["results"]
    assert result["scenario"]["version"] == f"path:{tmp_path / 'tree'}"
    assert result["version"].startswith("1.9+path.")


@pytest.mark.parametrize("text", ["[space]\ntitle = 'x'\n[system.fake]", "[[scenario]]\n[[scenario]]\nseed = 1"])
def test_a_file_that_is_no_single_scenario_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "several.toml"
    path.write_text(f"schema = 1\n{text}\n")
    assert entry(["sweep", str(path), "--system", "fake", *PLUGIN]) == ExitStatus.USAGE
    assert "a file with one [scenario]" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_real_release_is_installed_imported_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the package index, into an empty cache, and a second time without the index."""
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    core = package("megatron-core")
    found = build(core, "", interpreter())
    assert found.version == core.newest.version
    assert (found.paths[0] / "megatron" / "core" / "optimizer").is_dir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert build(core, core.newest.version, interpreter()) == found


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another interpreter: an own environment that finds our packages, and another release of one of them."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--symlinks", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    (Path(site) / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    info = Path(site) / "ml_dtypes-0.99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ml_dtypes\nVersion: 0.99\n")
    return python


@pytest.mark.real
def test_ranks_run_in_another_interpreter_and_its_releases_are_named(
    scenario: Path, other_python: Path, cache: Path
) -> None:
    assert interpreter(str(other_python)).release("ml_dtypes") == "0.99"
    words = ["run", str(scenario), "--system", "fake@1.0", "--python", str(other_python), "--out", "out"]
    assert entry([*words, "--json", "run.json", *PLUGIN]) == ExitStatus.OK
    document = json.loads(Path("run.json").read_text())
    assert document["run"]["versions"]["ml_dtypes"] == "0.99"
    assert interpreter().release("ml_dtypes") != "0.99"


def test_an_interpreter_without_torch_is_refused(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    assert entry(["run", str(scenario), "--python", str(python), *PLUGIN]) == ExitStatus.USAGE
    assert "without torch, numpy, ml_dtypes, tomli_w" in capsys.readouterr().err
