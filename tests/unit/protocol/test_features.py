"""Features: a release is asked by its number, a tree by what its source shows, and what the walk of a tree loses is
counted."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from shardproof.protocol.features import Feature, found_in, lacks, with_features
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.releases import package_of
from shardproof.report.lost_coverage import lost_coverage
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from shardproof.versions import is_version

SOURCE = """
import os

try:
    from dataclasses import dataclass
except ImportError:
    pass

SIZE = 3

@dataclass
class Config:
    reshard: bool | None = None
    KIND = "fsdp"

    def parse(self, text, *, strict=True): ...

def shard(module, /, mesh, *, reshard=None): ...

if os.name == "posix":
    def only_here(): ...
"""


@pytest.mark.parametrize(
    ("place", "there"),
    [
        ("config.py", True),
        ("config.py: Config", True),
        ("config.py: Config.reshard", True),
        ("config.py: Config.KIND", True),
        ("config.py: Config.parse", True),
        ("config.py: Config.parse(strict)", True),
        ("config.py: shard(module)", True),
        ("config.py: shard(reshard)", True),
        ("config.py: SIZE", True),
        ("config.py: only_here", True),
        ("config.py: Config.offload", False),
        ("config.py: Config.parse(lenient)", False),
        ("config.py: Config(reshard)", False),
        ("config.py: Policy.reshard", False),
        ("config.py: SIZE.reshard", False),
        ("config.py: shard(plan)", False),
        ("other.py", False),
        ("other.py: Config.reshard", False),
    ],
)
def test_a_tree_is_asked_by_its_source(place: str, there: bool, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(SOURCE)
    asked = (Feature("asked", "2.0", place), Feature("always", "1.0", "config.py"))
    found = found_in(tmp_path, asked)
    assert found == (("always", "asked") if there else ("always",))
    version = with_features("1.0", found)
    assert is_version(version)
    assert lacks(Scenario(version=version), asked[0]) is not there


def test_a_source_is_read_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def loud(): ...\nraise SystemExit('it ran')\n")
    (tmp_path / "b.py").write_text("def broken(:\n")
    asked = (Feature("loud", "1.0", "a.py: loud"), Feature("broken", "1.0", "b.py: broken"))
    assert found_in(tmp_path, asked) == ("loud",)


def test_a_release_is_asked_by_its_number() -> None:
    for_a_while = Feature("for_a_while", "1.1", "a.py", until="1.3")
    lacking = {v for v in ("1.0", "1.1", "1.2.7", "1.3", "2.0", "") if lacks(Scenario(version=v), for_a_while)}
    assert lacking == {"1.0", "1.3", "2.0", ""}, "no number is the newest release"
    since = Feature("since", "1.1", "a.py")
    assert not any(lacks(Scenario(version=v), since) for v in ("", "path:.", "git:main", "1.1.0.dev3", "1.1rc1+cured"))
    assert lacks(Scenario(version="1.0+cured"), since)


def test_a_tree_in_which_nothing_was_found_lacks_everything_whatever_its_number() -> None:
    assert lacks(Scenario(version=with_features("9.0", ())), Feature("since", "1.1", "a.py"))


@pytest.mark.parametrize(("name", "place"), [("Has Blanks", "a.py"), ("_a", "a.py"), ("a", "a.txt"), ("a", "a.py: f(")])
def test_a_feature_of_another_form_is_refused(name: str, place: str) -> None:
    with pytest.raises(ValueError, match="the form is"):
        Feature(name, "1.0", place)


def test_declared_features_have_names_of_their_own() -> None:
    declared = {info.name: info.accepts.features for info in all_systems()}
    assert {"automodel", "deepspeed", "transformer-engine"} <= {name for name, features in declared.items() if features}
    for features in declared.values():
        assert len({feature.name for feature in features}) == len(features)


@pytest.mark.parametrize("name", ["automodel", "deepspeed", "transformer-engine"])
def test_every_feature_that_a_limit_asks_for_is_declared(name: str) -> None:
    """One that is not declared is looked for in no tree, so that every head would lack it."""
    module = import_module(f"shardproof.systems.{name.replace('-', '_')}.accepts")
    own = {value for value in vars(module).values() if isinstance(value, Feature)}
    assert own <= set(system_named(name).accepts.features)


# --- lost coverage -----------------------------------------------------------------------------------------


def _head(checkpoint: str) -> Result:
    asked = Scenario(system="automodel", model="hf_delta", version="git:HEAD+cured", checkpoint=checkpoint)
    return Result(asked, "automodel", "0.5.0+git.0123456", Verdict.PASS)


def test_what_a_head_refuses_and_the_newest_release_runs_is_lost() -> None:
    automodel = system_named("automodel")
    runs = _head("safetensors")
    wrong = replace(runs, verdict=Verdict.UNSUPPORTED, reason="it has no reshard_after_forward")
    rightly = replace(_head("dcp"), verdict=Verdict.UNSUPPORTED, reason="another format")
    assert automodel.refusal(replace(runs.scenario, version="")) is None
    assert automodel.refusal(replace(rightly.scenario, version="")) is not None
    found = lost_coverage(automodel, [*[runs] * 17, wrong, wrong, rightly])
    assert (found.lost, found.of, found.share, found.too_much) == (2, 20, 0.1, False)
    assert found.reasons == {"it has no reshard_after_forward": 2}
    newest = package_of(automodel).newest.version
    assert found.text.splitlines() == [
        f"2 of 20 scenarios (10%) are refused here, and not on {newest}:",
        "  2 × it has no reshard_after_forward",
    ]
    assert lost_coverage(automodel, [*[runs] * 17, wrong, wrong, wrong]).too_much


def test_a_head_that_loses_nothing_says_nothing() -> None:
    automodel = system_named("automodel")
    found = lost_coverage(automodel, [_head("safetensors")])
    assert (found.lost, found.too_much, found.text) == (0, False, "")
    assert lost_coverage(automodel, []).share == 0.0
