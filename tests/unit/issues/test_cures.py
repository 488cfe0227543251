"""Cures as text: versions that ask for them, patches laid onto a library's files, and what does not fit.

*Verifies*: parsing, choosing, applying and refusing, on small texts; that every cure which ships is sound data. *Does
not verify*: that a cure cures; `shardproof cures --run` and tests/conformance/test_cures.py do.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.errors import UsageError
from shardproof.export.description import describe_known_issues
from shardproof.export.issue import _cure
from shardproof.investigate import cure_table
from shardproof.issues import cures
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.system import System
from shardproof.versions import before, split_cures, with_cures
from shardproof.world import cure_import_hook

MOST_LINES = 26
"""A cure adds and takes away no more lines than that."""

NOT_REPAIRED = {"ragged-unit": "", "mixed-unit-scale": "It is not a repair of the cause: it takes the fused sum"}
"""Entries of Megatron-FSDP → what the text of an issue says of a cure that is no repair."""

TEXT = "".join(f"line {n}\n" for n in range(20))
CURED_SYSTEMS = [system for system in all_systems() if cures.cures_of(system)]


def patch(*hunks: str, path: str = "library/a.py") -> str:
    return f"--- a/{path}\n+++ b/{path}\n" + "".join(hunks)


def change(line: int, new: str, around: int = 1) -> str:
    """A hunk that replaces one line of TEXT."""
    before_it = "".join(f" line {n}\n" for n in range(line - around, line))
    after_it = "".join(f" line {n}\n" for n in range(line + 1, line + 1 + around))
    return f"@@ -{line - around + 1} +1 @@\n{before_it}-line {line}\n+{new}\n{after_it}"


def applied(*patches: str, text: str = TEXT) -> cures.Cured:
    parsed = [cures.parse(f"c{n}", each) for n, each in enumerate(patches)]
    return cures.apply(parsed, {"library/a.py": text}.get)


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("", ("", None)),
        ("0.16.1", ("0.16.1", None)),
        ("0.16.1+cured", ("0.16.1", "")),
        ("+cured", ("", "")),
        ("0.16.1+cured:2777,5077", ("0.16.1", "2777,5077")),
        ("path:/src/tree+cured:-2777", ("path:/src/tree", "-2777")),
        ("git:main+cured", ("git:main", "")),
        ("0.16.1+curedly", ("0.16.1+curedly", None)),
    ],
)
def test_a_version_and_its_cures(version: str, parts: tuple[str, str | None]) -> None:
    assert split_cures(version) == parts
    assert with_cures(*parts) == version


def test_cures_change_nothing_of_which_release_it_is() -> None:
    assert before("0.15.0+cured:2777", "0.16")
    assert not before("0.16.1+cured", "0.16")


def test_some_all_and_all_but_one() -> None:
    system = system_named("megatron-core")
    every = {cure.id for cure in cures.cures_of(system)}
    assert {cure.id for cure in cures.cures_asked_for(system, "")} == every
    assert {cure.id for cure in cures.cures_asked_for(system, "2777,megatron-core-5077")} == {"2777", "5077"}
    assert {cure.id for cure in cures.cures_asked_for(system, "-2777")} == every - {"2777"}
    (masking,) = cures.cures_asked_for(system, "4423")  # a cure before it hides its defect
    assert {cure.id for cure in cures.cures_asked_for(system, masking.all_but_this)} == every - {
        "4423",
        "fsdp-plain-state",
    }


@pytest.mark.parametrize(("system", "wanted"), [("megatron-core", "nothing-like-it"), ("megatron-core", "2777,-5077")])
def test_what_cannot_be_asked_for(system: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=r"allowed: ids, or ids that each follow a `-`, of: 1138"):
        cures.cures_asked_for(system_named(system), wanted)
    with pytest.raises(UsageError, match="none: reference has no cures"):
        cures.cures_asked_for(system_named("reference"), "")


def test_a_line_is_replaced() -> None:
    found = applied(patch(change(3, "other")))
    assert found == cures.Cured(("c0",), {}, {"library/a.py": TEXT.replace("line 3\n", "other\n")})


def test_code_that_moved_down_is_found() -> None:
    found = applied(patch(change(3, "other")), text="new\n" * 50 + TEXT)
    assert found.sources["library/a.py"] == "new\n" * 50 + TEXT.replace("line 3\n", "other\n")


def test_of_two_places_the_nearer_one() -> None:
    twice = TEXT + TEXT
    found = applied(patch("@@ -23 +1 @@\n line 2\n-line 3\n+other\n line 4\n"), text=twice)
    assert found.sources["library/a.py"] == TEXT + TEXT.replace("line 3\n", "other\n")


@given(st.permutations(range(5)))
def test_the_order_of_cures_does_not_matter(order: list[int]) -> None:
    patches = [patch(change(3 * n + 2, f"new {n}")) for n in range(5)]
    assert applied(*(patches[n] for n in order)).sources == applied(*patches).sources


def test_cures_of_neighbouring_lines_stand_together() -> None:
    """The context of the second is what the first changes: each is laid onto the library's own text."""
    found = applied(patch(change(3, "three")), patch(change(4, "four")))
    assert found.sources["library/a.py"] == TEXT.replace("line 3\n", "three\n").replace("line 4\n", "four\n")


def test_two_cures_that_make_the_same_change_make_it_once() -> None:
    found = applied(patch(change(3, "other")), patch(change(3, "other"), change(9, "more")))
    assert found.sources["library/a.py"] == TEXT.replace("line 3\n", "other\n").replace("line 9\n", "more\n")


def test_a_cure_that_disturbs_another_is_left_out() -> None:
    found = applied(patch(change(3, "other")), patch(change(3, "another")))
    assert found.applied == ("c0",)
    assert found.left == {"c1": "it changes the same lines as c0"}


def test_what_a_release_has_already() -> None:
    found = applied(patch(change(3, "other")), text=TEXT.replace("line 3\n", "other\n"))
    assert found == cures.Cured((), {"c0": cures.REPAIRED}, {})


def test_code_that_is_not_there() -> None:
    found = applied(
        patch("@@ -3 +3 @@\n-nothing like it\n+x\n"),
        patch(change(3, "other"), path="library/absent.py"),
        patch(change(3, "other"), change(9, "nine")),
        text=TEXT.replace("line 9\n", "nine\n"),
    )
    assert found.applied == ()
    assert found.left == {
        "c0": f"{cures.MOVED}: library/a.py, line 3",
        "c1": f"{cures.MOVED}: there is no library/absent.py",
        "c2": f"{cures.MOVED}: a part of it is {cures.REPAIRED}",
    }


@pytest.mark.parametrize("text", ["", "prose\n", "--- a/x\n+++ b/x\n", patch("@@ -1 +1 @@\n-a\n*b\n")])
def test_what_is_no_diff(text: str) -> None:
    with pytest.raises(UsageError, match="a unified diff of files below site-packages"):
        cures.parse("broken", text)


def test_a_cure_says_what_shows_its_defect() -> None:
    body = patch(change(3, "other"))
    assert cures.parse("one", body).shown_by == ("one",)
    assert cures.parse("one", f"Shown-by: two, three\n\n{body}").shown_by == ("two", "three")


@pytest.mark.parametrize(
    ("system", "cure"), [(s, c) for s in CURED_SYSTEMS for c in cures.cures_of(s)], ids=lambda x: getattr(x, "name", "")
)
def test_a_cure_that_ships_is_small_and_shown(system: System, cure: cures.Cure) -> None:
    assert cure.changed_lines <= MOST_LINES
    for name in cure.shown_by:
        assert cure_table.scenario_of(system, name).system == (name.rpartition("/")[0] or system.name)


def test_what_a_system_stands_on_has_its_cures_too() -> None:
    automodel, torch = system_named("automodel"), system_named("torch-fsdp2")
    assert {cure.id for cure in cures.cures_of(torch)} < {cure.id for cure in cures.available(automodel)}
    assert cures.cure_of(automodel, "regressions/164929.toml") == "164929"
    assert cures.cure_of(system_named("transformer-engine"), "regressions/164929.toml") == "164929"
    assert cures.cure_of(system_named("transformer-engine"), "regressions/164929-scaled.toml") == "", "none repairs it"


def test_the_hook_gives_a_module_its_cured_text(tmp_path: Path) -> None:
    """In a process of its own, as a server has it; the file on disk and its compiled form stay as they are."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library/__init__.py").write_text("", "utf-8")
    (tmp_path / "library/a.py").write_text("def f():\n    return 'plain'\n", "utf-8")
    sources = {"library/a.py": "def f():\n    raise ValueError('cured')\n"}
    (tmp_path / "cured.json").write_text(json.dumps(sources), "utf-8")
    program = (
        "import sys, traceback\n"
        "from shardproof.world import cure_import_hook\n"
        "cure_import_hook.install(sys.argv[1])\n"
        "import library.a\n"
        "try:\n    library.a.f()\n"
        "except ValueError:\n    print(traceback.format_exc())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "cured.json")],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"File \"{tmp_path}/library/a.py\", line 2, in f\n    raise ValueError('cured')" in done.stdout
    assert "plain" in (tmp_path / "library/a.py").read_text("utf-8")
    assert not list((tmp_path / "library").glob("__pycache__/a.*"))


def test_a_module_that_was_imported_uncured_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "cured.json"
    file.write_text(json.dumps({"shardproof/entry.py": ""}), "utf-8")
    importlib.import_module("shardproof.entry")
    with pytest.raises(ImportError, match=r"shardproof\.entry was imported before its cure"):
        cure_import_hook.install(str(file))


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("", (cures.REPAIR, "")),
        ("Shown-by: 1, 2\n\n", (cures.REPAIR, "")),
        ("Workaround: puts it back.\n\n", (cures.WORKAROUND, "puts it back.")),
        ("Shown-by: 1\nSwitch: takes it away.\n\n", (cures.SWITCH, "takes it away.")),
    ],
)
def test_a_cure_says_whether_it_is_a_repair(header: str, found: tuple[str, str]) -> None:
    own = cures.parse("c", header + patch(change(5, "Workaround: of the library's own text")))
    assert (own.kind, own.instead) == found


@pytest.mark.parametrize("system", CURED_SYSTEMS, ids=str)
def test_what_is_no_repair_is_said_in_a_sentence_that_goes_on_from_it(system: System) -> None:
    for cure in cures.cures_of(system):
        assert (cure.kind == cures.REPAIR) == (cure.instead == "")
        assert not cure.instead or (cure.instead[0].islower() and cure.instead.endswith(".")), cure.id


@pytest.mark.parametrize(("name", "instead"), NOT_REPAIRED.items())
def test_the_text_of_an_issue_proposes_repairs_alone(name: str, instead: str) -> None:
    told = describe_known_issues(system_named("megatron-fsdp"), f"megatron-fsdp-{name}")
    assert told is not None
    text = "\n".join(_cure(told, "With this change it passes:", ""))
    assert ("```diff" in text) == (not instead)
    assert instead in text
