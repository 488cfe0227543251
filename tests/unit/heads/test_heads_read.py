"""What is read of a head without running anything: signatures against what our driver calls, and a clone's log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.heads.calls import Call, Taken, driver_calls, driver_modules
from shardproof.heads.log import Log, log_between, name_clone_of, numbers_of, revision_of, tag_of
from shardproof.heads.signatures import Changed, Tree, changes
from shardproof.issues.cures import cures_of
from shardproof.issues.findings import Finding, section_of
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.world.overlay import clone_variable

from tests.conformance.built_in import BUILT_IN
from tests.unit.heads_system import DEFECTS, HEADS_SYSTEM, REPAIRED, TRAIN, commit, write_tree

PACKAGE = package_of(HEADS_SYSTEM)


def finding(name: str) -> Finding:
    return next(each for each in section_of(HEADS_SYSTEM).findings if each.id == name)


# --- what our driver calls -----------------------------------------------------------------------------------


def test_the_calls_of_a_driver_have_full_names_and_arguments() -> None:
    calls, taken = driver_calls(HEADS_SYSTEM, "headslib.core")
    found = next(call for call in calls if call.name == "headslib.core.train")
    assert (found.keywords, found.positional, found.complete, found.asked) == (("depth",), 1, False, False)
    assert found.place.startswith("tests/unit/heads_system.py:")
    assert {each.name for each in taken} == {"headslib.core.train", "headslib.core.defects"}


LIBRARIES = [system.name for system in BUILT_IN if system.package]


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_driver_of_a_library_is_found_and_takes_something_of_it(name: str) -> None:
    system = system_named(name)
    calls, taken = driver_calls(system, package_of(system).tree.replace("/", "."))
    assert any(module.endswith(".rank") for module in driver_modules(system))
    assert calls
    assert taken


# --- signatures ----------------------------------------------------------------------------------------------


def changed(tmp_path: Path, before: str, after: str, *calls: Call) -> list[Changed]:
    trees = []
    for name, text in (("before", before), ("after", after)):
        write_tree(tmp_path / name, train=text)
        trees.append(Tree((tmp_path / name,), "headslib.core"))
    return changes(calls, [], *trees)


def call(*keywords: str, name: str = "headslib.core.train", positional: int = 1, method: bool = False) -> Call:
    return Call(name, method, keywords, positional, complete=True, asked=False, place="ours.py:3")


def test_a_renamed_argument_is_one_line_with_its_place_and_the_new_name(tmp_path: Path) -> None:
    found = changed(tmp_path, TRAIN, TRAIN.replace("depth", "layers"), call("depth"), call("depth"))
    assert [(each.what, each.place) for each in found] == [
        ("train() takes no 'depth' any more; new there: 'layers'", "headslib/core/loop.py:1")
    ]
    assert found[0].explains("TypeError: train() got an unexpected keyword argument 'depth'")
    assert not found[0].explains("TypeError: train() got an unexpected keyword argument 'other'")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (TRAIN, []),
        ("def train(width, **anything):\n    pass\n", []),
        ("def train(width, *, depth=1, more=2):\n    pass\n", []),
        ("def train(width, more, *, depth=1):\n    pass\n", ["train() asks for 'more', which it did not"]),
        ("if True:\n    def train(width, *, depth=1):\n        pass\n", []),
        ("def train(", []),
    ],
    ids=["same", "anything", "an option more", "an argument more", "under an if", "no python"],
)
def test_what_a_function_takes(tmp_path: Path, after: str, said: list[str]) -> None:
    assert [each.what for each in changed(tmp_path, TRAIN, after, call("depth"))] == said


def test_a_dataclass_and_its_bases_take_their_fields(tmp_path: Path) -> None:
    base = "import dataclasses\n@dataclasses.dataclass\nclass Base:\n    width: int\n    tall: bool = False\n"
    before = f"{base}@dataclasses.dataclass\nclass train(Base):\n    depth: int = 1\n"
    after = before.replace("depth", "layers").replace("tall", "high")
    found = changed(tmp_path, before, after, call("depth", "tall"))
    assert [each.argument for each in found] == ["depth", "tall"]
    assert found[0].place == "headslib/core/loop.py:7"


def test_a_class_takes_what_its_initialiser_takes(tmp_path: Path) -> None:
    before = "class train:\n    def __init__(self, width, depth=1):\n        pass\n"
    found = changed(tmp_path, before, before.replace("depth", "layers"), call("depth"))
    assert [each.place for each in found] == ["headslib/core/loop.py:2"]


def test_a_method_is_told_where_no_function_of_that_name_takes_the_argument(tmp_path: Path) -> None:
    before = (
        "class A:\n    def train(self, depth):\n        pass\nclass B:\n    def train(self, depth):\n        pass\n"
    )
    asks = call("depth", name="train", method=True)
    one = before.replace("depth", "layers", 1)
    assert changed(tmp_path, before, one, asks) == []
    (found,) = changed(tmp_path / "both", before, before.replace("depth", "layers"), asks)
    assert found.what == "train() takes no 'depth' any more"
    (gone,) = changed(tmp_path / "gone", before, "class A:\n    pass\n", asks)
    assert gone.what == "there is no train() any more"


def test_a_name_that_moved_and_a_module_that_went_are_told(tmp_path: Path) -> None:
    write_tree(tmp_path / "before")
    write_tree(tmp_path / "after")
    (tmp_path / "after/headslib/core/defects.py").unlink()
    (tmp_path / "after/headslib/core/__init__.py").write_text("")
    base, head = (Tree((tmp_path / name,), "headslib.core") for name in ("before", "after"))
    taken = [Taken(name, asked=False, place="ours.py:1") for name in
             ("headslib.core.train", "headslib.core.defects.OTHER", "headslib.core.never")]  # fmt: skip
    found = changes([call("depth")], taken, base, head)
    assert [(each.what, each.place) for each in found] == [
        ("train is not in headslib.core any more", "headslib/core/__init__.py"),
        ("there is no headslib.core.defects any more", "headslib/core/__init__.py"),
    ]


# --- the log -------------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with the release 1.0 as a tag, and five commits after it."""
    folder = write_tree(tmp_path / "clone")
    commit(folder, "Before (#77)")
    commit(folder, "Release", tag="core_v1.0")
    commit(folder, "Something else (#771)")
    commit(folder, "Repair it (#80)", "Fixes #77.")
    write_tree(folder, defects=REPAIRED)
    commit(folder, "No number at all")
    write_tree(folder, defects=f"{REPAIRED}MORE = 1\n")
    commit(folder, "Touches the file only")
    monkeypatch.setenv(clone_variable("heads-lib"), str(folder))
    return folder


def test_commits_are_found_by_number_since_the_release(clone: Path) -> None:
    log = log_between(PACKAGE, "git:main", "1.0")
    assert log is not None
    assert log.base == "core_v1.0"
    assert [(number, c.subject) for number, c in log.naming([77, 771])] == [
        (77, "Repair it (#80)"), (771, "Something else (#771)"),
    ]  # fmt: skip
    assert [landed.why for landed in log.explaining(finding("heads-77"), None)] == ["names #77"]


def test_without_a_number_the_lines_of_the_cure_name_the_commit_and_then_the_file(clone: Path) -> None:
    log = log_between(PACKAGE, "git:main", "1.0")
    assert log is not None
    (cure,) = cures_of(HEADS_SYSTEM)
    entry = finding("heads-elsewhere")
    by_lines = log.explaining(entry, cure)
    assert [(landed.commit.subject, landed.why) for landed in by_lines] == [
        ("No number at all", "changed the lines that the cure changes")
    ]
    by_file = log.explaining(entry, None)
    assert [landed.commit.subject for landed in by_file] == ["Touches the file only", "No number at all"]
    assert by_file[0].why == "one of 2 that touched headslib/core/defects.py"


def test_a_number_of_another_repository_is_none(clone: Path) -> None:
    assert numbers_of(finding("heads-77"), PACKAGE) == (77,)
    assert numbers_of(finding("heads-elsewhere"), PACKAGE) == ()
    fixed = replace(finding("heads-elsewhere"), fixed="1.1, by pull request 90")
    assert numbers_of(fixed, PACKAGE) == (90,)
    assert numbers_of(finding("heads-77"), replace(PACKAGE, repository="")) == ()


def test_the_tag_of_a_release_is_that_which_has_the_library(clone: Path) -> None:
    commit(clone, "Another project's release", tag="v1.0")
    assert tag_of(PACKAGE, "1.0") == "core_v1.0"
    assert tag_of(PACKAGE, "0.1") == ""
    assert tag_of(replace(PACKAGE, tree="not/there"), "1.0") == ""
    assert revision_of(PACKAGE, "1.0") == "core_v1.0"
    with pytest.raises(UsageError, match="a commit of the clone"):
        revision_of(PACKAGE, "git:v99")


def test_a_working_tree_that_is_a_repository_is_its_own_clone(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(clone_variable("heads-lib"))
    assert log_between(PACKAGE, f"path:{clone}", "1.0") is None
    name_clone_of(PACKAGE, f"path:{clone}")
    log = log_between(PACKAGE, f"path:{clone}", "1.0")
    assert isinstance(log, Log)
    assert len(log.commits) == 4
    monkeypatch.delenv(clone_variable("heads-lib"))


def test_the_shipped_packages_say_where_their_numbers_are() -> None:
    packages = {system.name: package_of(system) for system in BUILT_IN if system.under_test}
    assert [name for name, package in packages.items() if package.repository.count("/") != 1] == []


def test_the_tree_of_this_test_is_what_the_cure_is_of() -> None:
    assert DEFECTS.splitlines()[0] == "DEFECT = 7  # parameters are zero"
