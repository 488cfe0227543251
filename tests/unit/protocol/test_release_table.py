"""A system's releases.toml, sound and malformed: each error names the place, what was given and the correct form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardproof.errors import UsageError
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of, parse, without_names

from tests.conformance.built_in import BUILT_IN
from tests.unit.overlay_system import FAKE_SYSTEM

GOOD = 'schema = 1\npackage = "lib"\nimports = "lib"\ntree = "lib"\nbeside = ["einops==0.8.1"]\n'
RELEASE = '[[release]]\nversion = "1.0"\n'


def test_a_good_table() -> None:
    found = parse(GOOD + RELEASE, "x.toml")
    assert (found.name, found.newest.version, found.newest.beside) == ("lib", "1.0", ("einops==0.8.1",))
    assert found.roots == (".",)


def test_one_requirement_may_stand_alone() -> None:
    alone = parse(GOOD.replace('["einops==0.8.1"]', '"einops==0.8.1"') + RELEASE, "x.toml")
    assert alone == parse(GOOD + RELEASE, "x.toml")


def test_the_oldest_release_that_users_run_is_asked_for_by_name() -> None:
    old, new = '[[release]]\nversion = "0.9"\n', RELEASE + 'users = "Somebody."\n'
    assert parse(GOOD + old + new, "x.toml").oldest.version == "1.0"
    assert parse(GOOD + old + RELEASE, "x.toml").oldest.version == "0.9", "nobody says who runs it"
    with pytest.raises(UsageError, match=r"x\.toml users: given .*'1\.0', '2\.0'"):
        parse(GOOD + new + '[[release]]\nversion = "2.0"\nusers = "Others."\n', "x.toml")
    deepspeed = system_named("deepspeed")
    assert without_names(deepspeed, "oldest") == "0.16.9"
    assert without_names(deepspeed, "oldest+cured:-7967") == "0.16.9+cured:-7967"
    assert without_names(deepspeed, "0.19.8+cured") == "0.19.8+cured"
    assert without_names(system_named("reference"), "oldest") == "oldest", "it has no releases, and says so later"


def test_every_system_says_which_old_release_is_still_run_and_by_whom() -> None:
    for system in BUILT_IN:
        if system.under_test:
            assert package_of(system).oldest.users.endswith("."), system.name


def test_an_importer_is_optional() -> None:
    assert parse(GOOD + RELEASE, "x.toml").importer == ""
    assert parse('importer = "ours:library"\n' + GOOD + RELEASE, "x.toml").importer == "ours:library"
    with pytest.raises(UsageError, match="importer"):
        parse(GOOD.replace("tree", "importers") + RELEASE, "x.toml")


def test_a_systems_package_is_read_from_beside_its_walks() -> None:
    found = package_of(FAKE_SYSTEM)
    assert [release.version for release in found.releases] == ["1.0", "1.1", "1.2", "2.0"]
    assert (found.name, found.roots) == ("fake-lib", (".", "src"))


def test_a_system_without_its_file_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match=r"releases of fake: given 'no file'; allowed: a file fake/releases\.toml"):
        package_of(replace(FAKE_SYSTEM, package="nobodys-lib", data="tests/unit/no_such_folder"))


def test_a_system_of_a_plugin_without_its_file_has_the_releases_of_the_library_that_it_shares() -> None:
    assert package_of(replace(FAKE_SYSTEM, data="tests/unit/no_such_folder")) == package_of(FAKE_SYSTEM)


@pytest.mark.parametrize(
    ("tree", "beside"),
    [("0.9", "einops"), ("1.0", "einops"), ("1.9", "einops"), ("2.0", "triton"), ("2.5rc1", "triton")],
)
def test_a_tree_between_releases_needs_what_commits_say(tree: str, beside: str) -> None:
    found = parse(GOOD + RELEASE + '[[commits]]\nversion = "2.0"\nbeside = ["triton==3.9.0"]\n', "x.toml")
    assert found.closest(tree).beside[0].startswith(beside)
    assert found.newest.version == "1.0"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("schema = 1\n[[release\n", "x.toml"),
        ("schema = 1\n", "package"),
        (GOOD.replace('"lib"', "7", 1) + RELEASE, "package"),
        (GOOD.replace('imports = "lib"', "imports = 7") + RELEASE, "imports"),
        (GOOD.replace('imports = "lib"', "") + RELEASE, "imports"),
        (GOOD.replace('["einops==0.8.1"]', "3") + RELEASE, "beside"),
        (GOOD.replace('["einops==0.8.1"]', "[3]") + RELEASE, "beside"),
        (GOOD.replace("einops==0.8.1", "einops = 0.8.1") + RELEASE, "beside"),
        (GOOD.replace("beside", "besides") + RELEASE, "besides"),
        (GOOD, "release"),
        (GOOD + "release = 3\n", "release"),
        (GOOD + "release = [3]\n", "release 1"),
        (GOOD + "release = []\n", "release"),
        (GOOD + RELEASE.replace('"1.0"', "1.0"), "version"),
        (GOOD + RELEASE.replace("1.0", "one"), "version"),
        (GOOD + RELEASE + 'torch = "new"\n', "torch"),
        (GOOD + RELEASE + RELEASE, "releases"),
        (GOOD + "commits = 3\n" + RELEASE, "commits"),
        (GOOD + RELEASE + "[[commits]]\nimports = 3\n", "commits"),
    ],
)
def test_a_malformed_one_is_a_clear_error(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=r"x\.toml") as caught:
        parse(text, "x.toml")
    assert named in str(caught.value)
