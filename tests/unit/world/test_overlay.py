"""Overlays: what is built, what is found again, what is refused, and that the ranks run what was asked for.

Wheels of a fake library stand for releases; a folder of them is pip's only index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.folders import CACHE_VARIABLE
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.releases import Package, Release, package, parse
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from shardproof.world import environments, overlay, preflight
from shardproof.world.commands import OverlayError, said
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import build, clone_variable, is_cached, is_imported, is_release
from shardproof.world.server import ForkServer

from tests.unit.overlay_system import FAKE, FAKE_SYSTEM, isolate, write_library

PLUGINS = ("tests.unit.overlay_system",)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An own cache, and no index but wheels of the fake library."""
    with pytest.MonkeyPatch.context() as patch:
        yield isolate(patch, tmp_path_factory.mktemp("overlays"))


@pytest.fixture
def fake() -> Package:
    return package("fake-lib")


@pytest.fixture(scope="module")
def lab(cache: Path) -> Iterator[Laboratory]:
    with Laboratory(jobs=2, deadline_s=30.0, plugins=PLUGINS) as running:
        yield running


# --- building ----------------------------------------------------------------------------------------------


def test_a_release_is_installed_once_and_then_needs_no_index(
    fake: Package, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not is_cached(fake, "1.0", interpreter())
    first = build(fake, "1.0", interpreter())
    assert first.version == "1.0"
    assert (first.paths[0] / "fakelib" / "core" / "__init__.py").is_file()
    assert first.paths[0].name == "site-packages"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert build(fake, "1.0", interpreter()) == first
    assert is_cached(fake, "1.0", interpreter())
    assert not list(cache.glob(".*"))


def test_a_library_that_cannot_be_imported_by_itself_has_an_importer(fake: Package) -> None:
    with pytest.raises(OverlayError, match="no_such_dependency"):
        build(fake, "1.2", interpreter())
    helped = replace(fake, importer="tests.unit.overlay_system:import_with_dependency")
    assert build(helped, "1.2", interpreter()).version == "1.2"
    for note in build(helped, "1.2", interpreter()).paths[0].parent.glob("imported-*"):
        note.unlink()


def test_another_interpreter_has_another_overlay(fake: Package) -> None:
    other = replace(interpreter(), tag="cpython-399")
    assert build(fake, "1.0", other).paths != build(fake, "1.0", interpreter()).paths


def test_what_upstream_never_supported_is_said(fake: Package) -> None:
    python = replace(interpreter(), installed={"torch": "2.13.0+cpu", "numpy": "2.4.6"})
    assert fake.release("1.0").outside(python.installed) == ("numpy 2.4.6: upstream asks for <2.0.0",)
    assert fake.release("1.1").outside(python.installed) == ("torch 2.13.0+cpu: upstream tested with 2.5",)
    assert fake.release("2.0").outside(python.installed) == ()
    assert fake.release("1.0").outside({}) == ()
    beside = replace(fake.release("1.0"), beside=("numpy==1.26.4",))
    assert beside.outside(python.installed) == (), "what is installed beside the library comes first"


@pytest.mark.parametrize(
    ("version", "asked", "same"),
    [
        ("0.11.0", "0.11.0", True), ("0.11.0+cpu", "0.11.0", True), ("0.11.0+cpu", "0.11.0+cpu", True),
        ("0.11.0+cpu", "0.11.0+cu128", False), ("0.11.0", "0.11.0+cpu", False), ("0.11.1", "0.11.0", False),
    ],
)  # fmt: skip
def test_a_local_label_does_not_count_where_none_was_asked_for(version: str, asked: str, same: bool) -> None:
    assert is_release(version, asked) is same


@pytest.mark.parametrize("harm", ["cut", "removed", "added", "manifest", "no manifest"])
def test_a_damaged_overlay_is_built_again(fake: Package, harm: str) -> None:
    site = build(fake, "1.0", interpreter()).paths[0]
    file, manifest = site / "fakelib" / "core" / "__init__.py", site.parent / "overlay.json"
    match harm:
        case "cut":
            file.write_text("__ver")
        case "removed":
            file.unlink()
        case "added":
            file.with_name("stray.py").write_text("")
        case "manifest":
            manifest.write_text("{")
        case "no manifest":
            manifest.unlink()
    assert build(fake, "1.0", interpreter()).version == "1.0"
    assert file.read_text().startswith("__version__ = '1.0'")
    assert not file.with_name("stray.py").exists()
    assert manifest.is_file()


def test_a_damaged_overlay_that_cannot_be_built_again_is_said(
    fake: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = build(fake, "1.0", interpreter()).paths[0]
    (site / "fakelib" / "core" / "__init__.py").write_text("")
    with monkeypatch.context() as offline:
        offline.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(OverlayError, match=r"damaged \(.* is not as installed\)"):
            build(fake, "1.0", interpreter())
    build(fake, "1.0", interpreter())


def test_what_a_killed_process_left_is_cleared(fake: Package, cache: Path) -> None:
    site = build(fake, "1.0", interpreter()).paths[0]
    left = cache / f".{site.parent.name}.abc"
    left.mkdir()
    (site.parent / "overlay.json").unlink()
    build(fake, "1.0", interpreter())
    assert not left.exists()


def test_two_at_once_install_once(fake: Package, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    calls: list[str] = []
    real = said

    def counted(command: list[str], limit_s: float, what: str, environment: dict[str, str], **limit: bool) -> str:
        calls.append(command[2])
        return real(command, limit_s, what, environment, **limit)

    monkeypatch.setattr(overlay, "said", counted)
    python = interpreter()
    threads = [threading.Thread(target=build, args=(fake, "1.0", python)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.count("pip") == 1


def test_a_cache_that_cannot_be_written_is_said(fake: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(OverlayError, match=r"cannot be written.*SHARDPROOF_CACHE"):
        build(fake, "1.0", interpreter())


def test_a_release_for_another_python_says_how_to_give_it_one() -> None:
    pip = (
        "import sys; sys.exit('ERROR: Ignored the following versions: 0.17.0 Requires-Python >=3.12; 0.18.0 Requires')"
    )
    with pytest.raises(OverlayError, match=r"(?s)Requires-Python >=3.12.*--python PATH"):
        said([sys.executable, "-c", pip, "fake-lib==0.17.0"], 30.0, "fake-lib", {})
    with pytest.raises(OverlayError, match=r"(?s)Requires-Python >=3.12") as no_such_release:
        said([sys.executable, "-c", pip, "fake-lib==7.0"], 30.0, "fake-lib", {})
    assert "--python" not in str(no_such_release.value)


def test_a_release_that_is_not_on_the_index_says_what_pip_says(fake: Package) -> None:
    with pytest.raises(OverlayError, match=r"(?s)fake-lib==9\.9 cannot be installed .*No matching distribution found"):
        build(fake, "9.9", interpreter())


def test_a_release_that_does_not_import_says_why(fake: Package) -> None:
    with pytest.raises(OverlayError, match=r"(?s)fake-lib 1\.2 cannot be imported .*no_such_dependency"):
        build(fake, "1.2", interpreter())


def test_a_release_that_does_not_import_leaves_the_others_of_a_run(fake: Package) -> None:
    broken, sound = replace(FAKE, version="1.2"), replace(FAKE, version="1.0")
    assert preflight.require_releases([broken, sound], None) == {"fake-lib": "1.0"}
    with pytest.raises(UsageError, match=r"(?s)^--system: given 'fake@1\.2'; .* cannot be imported with torch "):
        preflight.require_releases([broken], None)
    assert is_imported(fake, "1.0", interpreter())
    assert is_cached(fake, "1.2", interpreter())
    assert not is_imported(fake, "1.2", interpreter())


def test_a_library_from_elsewhere_is_refused(fake: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OverlayError, match=r"comes from .*, not from"):
        build(replace(fake, imports="json"), "1.0", replace(interpreter(), tag="cpython-398"))


@pytest.mark.parametrize("version", ["1.0.x", "latest", "path", "pth:/x", "1.0 ; import os"])
def test_what_is_no_version_is_refused(fake: Package, version: str) -> None:
    with pytest.raises(UsageError, match=r"given .*; allowed: .*path:DIR.*; for example: fake-lib@2\.0"):
        build(fake, version, interpreter())


# --- working trees and commits -------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "src"])
def test_a_working_tree_is_linked_and_follows_its_edits(fake: Package, tmp_path: Path, below: str) -> None:
    write_library(tmp_path / below, "1.3")
    (tmp_path / "tests").mkdir()
    first = build(fake, f"path:{tmp_path}", interpreter())
    assert first.version.startswith("1.3+path.")
    assert first.live
    assert not (first.paths[0] / "tests").exists()
    core = tmp_path / below / "fakelib" / "core"
    (core / "__init__.py").write_text("__version__ = '1.4'\n")
    second = build(fake, f"path:{tmp_path}", interpreter())
    assert second.version.startswith("1.4+path.")
    assert second.version.split("+")[1] != first.version.split("+")[1]
    assert second.paths == first.paths
    assert not (core / "__pycache__").exists(), "a working tree is not written to"


def test_a_folder_without_the_library_is_refused(fake: Package, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"allowed: a folder with fakelib/core or src/fakelib/core"):
        build(fake, f"path:{tmp_path}", interpreter())


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone whose commits v1 … v3 hold the library at its root, v4 below src, v5 no more."""
    where = tmp_path / "clone"
    write_library(where, "1.0")
    commands = [["init", "-q", "-b", "main"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]]
    for command in commands:
        subprocess.run(["git", "-C", str(where), *command], check=True)
    for n in range(1, 4):
        (where / "fakelib" / "core" / "n.py").write_text(f"N = {n}\n")
        commit(where, f"v{n}")
    (where / "src").mkdir()
    (where / "fakelib").rename(where / "src" / "fakelib")
    commit(where, "v4")
    (where / "src" / "fakelib").rename(where / "other")
    commit(where, "v5")
    monkeypatch.setenv(clone_variable("fake-lib"), str(where))
    return where


def commit(where: Path, tag: str) -> None:
    for command in (["add", "-A"], ["commit", "-q", "-m", tag], ["tag", tag]):
        subprocess.run(["git", "-C", str(where), *command], check=True)


def test_a_commit_is_exported_once_and_its_clone_is_not_touched(fake: Package, clone: Path) -> None:
    found = build(fake, "git:v2", interpreter())
    head = subprocess.run(
        ["git", "-C", str(clone), "rev-parse", "v2"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert found.version == f"1.0+git.{head[:7]}"
    assert (found.paths[0] / "fakelib" / "core" / "n.py").read_text() == "N = 2\n"
    assert build(fake, f"git:{head}", interpreter()) == found
    assert (build(fake, "git:v4", interpreter()).paths[0] / "fakelib" / "core" / "n.py").is_file()
    status = ["git", "-C", str(clone), "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == ""


def test_a_commit_without_the_library_is_no_pass(fake: Package, clone: Path) -> None:
    with pytest.raises(OverlayError, match=r"has no tree fakelib/core or src/fakelib/core"):
        build(fake, "git:v5", interpreter())


@pytest.mark.parametrize("revision", ["v99", "--version", "", "v1:fakelib"])
def test_a_revision_that_is_not_there_is_refused(fake: Package, clone: Path, revision: str) -> None:
    with pytest.raises(UsageError, match="a commit of the clone"):
        build(fake, f"git:{revision}", interpreter())


def test_a_clone_that_was_not_named_or_is_none_is_refused(
    fake: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(clone_variable("fake-lib"), raising=False)
    with pytest.raises(UsageError, match=r"--clone fake-lib=DIR or SHARDPROOF_CLONE_FAKE_LIB"):
        build(fake, "git:v1", interpreter())
    monkeypatch.setenv(clone_variable("fake-lib"), str(tmp_path))
    with pytest.raises(UsageError, match="a git repository"):
        build(fake, "git:v1", interpreter())


def test_a_commit_is_read_from_its_clone_whatever_git_is_told_by_the_environment(
    fake: Package, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert build(fake, "git:v3", interpreter()).version.startswith("1.0+git.")


def test_a_tree_gets_what_the_newest_release_before_it_needs(fake: Package, clone: Path, tmp_path: Path) -> None:
    releases = (Release("1.0", beside=("fake-lib==1.0",), torch="2.0"), Release("1.1", beside=("fake-lib==1.1",)))
    declared = replace(fake, releases=releases)
    core = write_library(tmp_path / "tree", "1.1") / "fakelib" / "core"
    for text, beside in (("MAJOR = 1\nMINOR = 0\nPATCH = 7\nPRE_RELEASE = ''", "fake_lib-1.0"),
                         ("MAJOR = 1\nMINOR = 1\nPATCH = 0\nPRE_RELEASE = 'rc0'", "fake_lib-1.1"),
                         ("MAJOR = 2\nMINOR = 1\nPATCH = 0", "fake_lib-1.1"),
                         ("MAJOR = 0\nMINOR = 1\nPATCH = 0", "fake_lib-1.0")):  # fmt: skip
        (core / "package_info.py").write_text(text)
        found = build(declared, f"path:{tmp_path / 'tree'}", interpreter())
        assert (found.paths[1] / f"{beside}.dist-info").is_dir()
        assert bool(found.outside) is (beside == "fake_lib-1.0")
    (clone / "other" / "core" / "package_info.py").write_text("MAJOR = 1\nMINOR = 0\nPATCH = 9\n")
    (clone / "other").rename(clone / "fakelib")
    commit(clone, "v6")
    assert len(build(declared, "git:v6", interpreter()).paths) == 2
    assert len(build(declared, "git:v1", interpreter()).paths) == 1, "it does not say what it is"


def test_an_empty_note_of_an_import_is_none(fake: Package) -> None:
    site = build(fake, "1.0", interpreter()).paths[0]
    (note,) = site.parent.glob("imported-*")
    note.write_text("")
    assert build(fake, "1.0", interpreter()).version == "1.0"
    assert note.read_text() == "1.0\n"
    assert not [*site.parent.glob(".imported-*")]


# --- ranks ---------------------------------------------------------------------------------------------------


def test_ranks_run_the_release_that_was_asked_for(lab: Laboratory) -> None:
    right = lab.examine_one(replace(FAKE, version="1.0"))
    assert (right.verdict, right.version) == (Verdict.PASS, "1.0"), right
    assert right.emulated == ("everything",)
    assert right.outside_support == ("numpy " + str(interpreter().release("numpy")) + ": upstream asks for <2.0.0",)
    wrong = lab.examine_one(replace(FAKE, version="1.1"))
    assert (wrong.verdict, wrong.version) == (Verdict.MISMATCH, "1.1")
    assert {d.key.role for d in wrong.differences} == {"param"}


@pytest.mark.nightly
def test_no_version_is_the_newest_and_its_errors_name_files_below_the_overlay(lab: Laboratory) -> None:
    result = lab.examine_one(FAKE)
    assert (result.verdict, result.version) == (Verdict.CRASH, "2.0")
    assert result.signature == "fake crash: step: ArithmeticError: raises at fakelib/core/__init__.py, check"


def test_what_cannot_be_imported_is_unknown_and_never_a_pass(lab: Laboratory) -> None:
    result = lab.examine_one(replace(FAKE, version="1.2"))
    assert result.verdict is Verdict.UNKNOWN
    assert result.version == "1.2"
    assert "no_such_dependency" in result.reason
    assert lab.examine_one(replace(FAKE, version="nonsense")).verdict is Verdict.UNKNOWN


def test_each_variant_has_its_own_server(lab: Laboratory) -> None:
    with served(lab._environments, replace(FAKE, version="1.0")) as even:
        with served(lab._environments, replace(FAKE, version="1.0", seed=1)) as odd:
            assert even is not odd
        with served(lab._environments, replace(FAKE, version="1.0", seed=4)) as again:
            assert again is even
    assert lab.examine_one(replace(FAKE, version="1.0", seed=1)).verdict is Verdict.PASS
    assert lab.examine_one(replace(FAKE, version="1.0", seed=2)).not_exercised == ("overlap",)


def served(own: environments.Environments, scenario: Scenario) -> AbstractContextManager[ForkServer]:
    """The server of a scenario's software."""
    return own.server(own.resolve(FAKE_SYSTEM, scenario.version), scenario)


@pytest.mark.nightly
def test_the_library_in_the_current_folder_does_not_come_first(
    lab: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_library(tmp_path, "6.6", "wrong")
    monkeypatch.chdir(tmp_path)
    own = environments.Environments(None, PLUGINS)
    monkeypatch.setattr(lab, "_environments", own)
    assert lab.examine_one(replace(FAKE, version="1.0")).verdict is Verdict.PASS
    own.close()


def test_a_working_tree_runs(lab: Laboratory, tmp_path: Path) -> None:
    write_library(tmp_path, "1.5", "wrong")
    result = lab.examine_one(replace(FAKE, version=f"path:{tmp_path}"))
    assert result.verdict is Verdict.MISMATCH
    assert result.version.startswith("1.5+path.")
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_few_servers_are_alive_and_the_idle_ones_make_room(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ALIVE", 2)
    own = environments.Environments(None, PLUGINS)
    scenarios = [replace(FAKE, version=version) for version in ("1.0", "1.1", "2.0")]
    with served(own, scenarios[0]) as kept, served(own, scenarios[1]):
        pass
    with served(own, scenarios[0]) as again:
        assert again is kept
        entered: list[str] = []
        with served(own, scenarios[2]):
            assert [key[0] for key in own._places] == [
                own.install(own.resolve(FAKE_SYSTEM, v)).paths for v in ("1.0", "2.0")
            ]
            waiting = threading.Thread(target=lambda: entered.append(_enter(own)))
            waiting.start()
            waiting.join(0.2)
            assert not entered, "all servers are in use"
        waiting.join(5.0)
        assert entered == ["1.1"]
    own.close()


def _enter(own: environments.Environments) -> str:
    with served(own, replace(FAKE, version="1.1")):
        return "1.1"


# --- declarations and interpreters ---------------------------------------------------------------------------


def test_shipped_declarations_are_sound() -> None:
    core = package("megatron-core")
    assert core.newest.version == "0.16.1"
    assert all("==" in requirement for release in core.releases for requirement in release.beside)
    with pytest.raises(UsageError, match=r"package: given 'none'; allowed: .*megatron-core"):
        package("none")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("release = [{version='1'}]", "tree"),
        ("tree = 'a'\nrelease = []\nhue = 1", "hue"),
        ("tree = 'a'\nrelease = [{version='2'}, {version='1'}]", "oldest first"),
        ("tree = 'a'\nrelease = [{versions='2'}]", "versions"),
    ],
)
def test_declarations_that_are_wrong_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(f"schema = 1\npackage = 'a'\nimports = 'a'\n{text}", "here")


def test_an_interpreter_is_asked_once() -> None:
    own = interpreter()
    assert own.python == sys.version.split()[0]
    assert own.release("ml-dtypes") == own.release("ml_dtypes") is not None
    assert interpreter() is own


@pytest.mark.parametrize("program", ["exit 3", "echo nothing", "echo '[]'"])
def test_what_is_no_interpreter_is_refused(tmp_path: Path, program: str) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    with pytest.raises(UsageError, match="--python: given"):
        interpreter(str(script))


def test_the_manifest_says_what_was_installed(fake: Package) -> None:
    site = build(fake, "1.0", interpreter()).paths[0]
    files = json.loads((site.parent / "overlay.json").read_text())
    assert "fakelib/core/__init__.py" in files
    assert not any("__pycache__" in name for name in files)


def test_a_limit_of_processor_time_is_not_one_of_the_clock() -> None:
    """Under load an import takes minutes by the clock; one that computes for ever is ended all the same."""
    waits, computes = "import time; time.sleep(1.5); print('done')", "while True: pass"
    assert said([sys.executable, "-c", waits], 1.0, "a wait", dict(os.environ), of_cpu=True) == "done\n"
    with pytest.raises(OverlayError, match="a wait: no end after 1 s"):
        said([sys.executable, "-c", waits], 1.0, "a wait", dict(os.environ))
    with pytest.raises(OverlayError, match="a loop: no end after 1 s of processor time"):
        said([sys.executable, "-c", computes], 1.0, "a loop", dict(os.environ), of_cpu=True)
