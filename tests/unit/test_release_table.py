"""scenarios/systems.toml, malformed: each error names the place, what was given and the correct form."""

from __future__ import annotations

import pytest

from harness.errors import UsageError
from harness.releases import parse

GOOD = 'schema = 1\n[lib]\nimports = "lib"\ntree = "lib"\nbeside = ["einops==0.8.1"]\n'
RELEASE = '[[lib.release]]\nversion = "1.0"\n'


def test_a_good_table() -> None:
    (found,) = parse(GOOD + RELEASE, "x.toml").values()
    assert (found.newest.version, found.newest.beside, found.roots) == ("1.0", ("einops==0.8.1",), (".",))


@pytest.mark.parametrize(
    ("tree", "beside"),
    [("0.9", "einops"), ("1.0", "einops"), ("1.9", "einops"), ("2.0", "triton"), ("2.5rc1", "triton")],
)
def test_a_tree_between_releases_needs_what_commits_say(tree: str, beside: str) -> None:
    text = GOOD + RELEASE + '[[lib.commits]]\nversion = "2.0"\nbeside = ["triton==3.9.0"]\n'
    (found,) = parse(text, "x.toml").values()
    assert found.closest(tree).beside[0].startswith(beside)
    assert found.newest.version == "1.0"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("schema = 1\n[lib\n", "x.toml"),
        ("schema = 1\nlib = 3\n", "[lib]"),
        (GOOD.replace('"lib"', "7", 1) + RELEASE, "imports"),
        (GOOD.replace('["einops==0.8.1"]', '"einops==0.8.1"') + RELEASE, "beside"),
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
        (GOOD + RELEASE + "[[lib.commits]]\nimports = 3\n", "commits"),
    ],
)
def test_a_malformed_one_is_a_clear_error(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=r"x\.toml") as caught:
        parse(text, "x.toml")
    assert named in str(caught.value)
