"""Working trees and commits: the version that their project keeps, what links in them lead to, and what their limits
are asked."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.protocol.features import Feature
from shardproof.protocol.releases import Package, package
from shardproof.versions import TREE_VERSION
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import Overlay, build, clone_variable

from tests.unit.overlay_system import isolate, write_library


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield isolate(patch, tmp_path_factory.mktemp("overlays"))


@pytest.fixture
def fake() -> Package:
    return replace(package("fake-lib"), version_file="build/VERSION.txt")


def committed(tree: Path) -> str:
    """A commit of all that lies in a folder, as `git:`."""
    for command in (["init", "-q", "-b", "main"], ["add", "-A"],
                    ["-c", "user.email=a@b", "-c", "user.name=a", "commit", "-q", "-m", "all"]):  # fmt: skip
        subprocess.run(["git", "-C", str(tree), *command], check=True)
    return "git:HEAD"


def built_in_all_ways(
    fake: Package, tree: Path, patch: pytest.MonkeyPatch, features: tuple[Feature, ...] = ()
) -> list[Overlay]:
    """A tree's overlays: as a commit of a clone, of a bare clone, as a folder from elsewhere, and from inside."""
    revision = committed(tree)
    bare = tree.with_name(f"{tree.name}.git")
    subprocess.run(["git", "clone", "-q", "--bare", str(tree), str(bare)], check=True)
    found = []
    for clone in (tree, bare):
        patch.setenv(clone_variable("fake-lib"), str(clone))
        found.append(build(fake, revision, interpreter(), features))
    found.append(build(fake, f"path:{tree}", interpreter(), features))
    patch.chdir(tree)
    return [*found, build(fake, "path:.", interpreter(), features)]


def test_a_tree_has_the_version_of_its_projects_own_file(
    fake: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = write_library(tmp_path / "clone", "0.0.0")
    (tree / "build").mkdir()
    (tree / "build" / "VERSION.txt").write_text("1.3.0.dev0\n")
    found = built_in_all_ways(fake, tree, monkeypatch)
    assert [overlay.version.partition("+")[0] for overlay in found] == ["1.3.0.dev0"] * 4
    assert [overlay.asked for overlay in found] == ["1.3.0.dev0+has"] * 4
    assert not any(overlay.walked for overlay in found)


def test_a_file_that_says_no_version_is_passed_over(
    fake: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = write_library(tmp_path / "clone", "1.7")
    (tree / "build").mkdir()
    (tree / "build" / "VERSION.txt").write_text("see setup.py\n")
    assert {o.version.partition("+")[0] for o in built_in_all_ways(fake, tree, monkeypatch)} == {"1.7"}


def test_links_of_a_tree_lead_to_what_they_lead_to_in_its_repository(
    fake: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = write_library(tmp_path / "clone", "1.0")
    core = tree / "fakelib" / "core"
    for folder in ("accelerator", "parts/deep"):
        (tree / folder).mkdir(parents=True)
        (tree / folder / "__init__.py").write_text(f"NAME = {folder!r}\n")
    (tree / "accelerator" / "deep").symlink_to("../parts/deep")
    (tree / "notes.py").write_text("NOTES = 1\n")
    (core / "own.py").write_text("OWN = 1\n")
    (core / "accelerator").symlink_to("../../accelerator")
    (core / "notes.py").symlink_to("../../notes.py")
    (core / "also_own.py").symlink_to("own.py")
    with (core / "__init__.py").open("a") as file:
        file.write("from fakelib.core.accelerator.deep import NAME\n")
        file.write("from fakelib.core.notes import NOTES\nfrom fakelib.core.also_own import OWN\n")
    for overlay in built_in_all_ways(fake, tree, monkeypatch):
        found = overlay.paths[0] / "fakelib" / "core"
        assert (found / "accelerator" / "deep" / "__init__.py").read_text() == "NAME = 'parts/deep'\n"
        assert not (overlay.paths[0] / "accelerator").exists(), "only the library comes onto the path"
        assert os.readlink(found / "also_own.py") == "own.py"


def test_no_link_leads_out_of_a_repository(fake: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = write_library(tmp_path / "clone", "1.0")
    core = tree / "fakelib" / "core"
    (tmp_path / "secret.py").write_text("SECRET = 1\n")
    (core / "up.py").symlink_to("../../../secret.py")
    (core / "absolute.py").symlink_to(tmp_path / "secret.py")
    (core / "around").symlink_to("../..")
    (core / "nowhere.py").symlink_to("../../no_such.py")
    monkeypatch.setenv(clone_variable("fake-lib"), str(tree))
    found = build(fake, committed(tree), interpreter()).paths[0] / "fakelib" / "core"
    assert not any((found / name).is_file() for name in ("up.py", "absolute.py", "nowhere.py"))
    assert not any("secret" in path.name for path in found.parent.parent.rglob("*"))


def test_a_change_behind_a_link_is_another_state_of_a_working_tree(fake: Package, tmp_path: Path) -> None:
    tree = write_library(tmp_path / "clone", "1.0")
    (tree / "accelerator").mkdir()
    (tree / "accelerator" / "a.py").write_text("A = 1\n")
    (tree / "fakelib" / "core" / "accelerator").symlink_to("../../accelerator")
    first = build(fake, f"path:{tree}", interpreter())
    (tree / "accelerator" / "a.py").write_text("A = 2\n")
    assert build(fake, f"path:{tree}", interpreter()).version != first.version


def test_limits_of_a_tree_are_asked_about_what_its_source_shows(
    fake: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = write_library(tmp_path / "clone", "1.0")
    asked = (Feature("checks", "2.0", "__init__.py: check"), Feature("saves", "1.0", "__init__.py: save"))
    found = built_in_all_ways(fake, tree, monkeypatch, asked)
    assert {overlay.asked for overlay in found} == {"1.0+has.checks"}


def test_the_newest_declared_release_is_walked_and_no_older_one(fake: Package) -> None:
    older = build(fake, "1.0", interpreter())
    assert (older.walked, older.asked, older.offers) == (False, "1.0", None)
    releases = tuple(release for release in fake.releases if release.version == "1.0")
    assert build(replace(fake, releases=releases), "1.0", interpreter()).walked


def test_ranks_of_a_tree_are_told_its_version_and_those_of_a_release_are_not(fake: Package, tmp_path: Path) -> None:
    tree = write_library(tmp_path / "clone", "1.0")
    assert build(fake, f"path:{tree}", interpreter()).environment[TREE_VERSION] == "1.0"
    assert TREE_VERSION not in build(fake, "1.0", interpreter()).environment
