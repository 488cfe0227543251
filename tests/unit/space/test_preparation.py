"""What a plan has to have installed and started first, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.folders import CACHE_VARIABLE
from shardproof.protocol.releases import package
from shardproof.scenario import Scenario
from shardproof.space.plan import Plan
from shardproof.space.plan_text import render_plan
from shardproof.space.preparation import LIST_S, START_S, Preparation, needs, preparation
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import TOOK, cache_folder, is_installed, key_of, wanted

NEWEST = package("deepspeed").newest.version
PLAIN = Scenario(system="deepspeed")
OLDER = Scenario(system="deepspeed", version="0.17.6+cured")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


def installed(requirements: tuple[str, ...], took_s: str = "") -> None:
    folder = cache_folder() / key_of(requirements, interpreter())
    folder.mkdir(parents=True)
    (folder / "overlay.json").write_text("{}")
    if took_s:
        (folder / TOOK).write_text(took_s)
    assert is_installed(requirements, interpreter())


def test_a_release_that_is_not_there_counts_with_what_stands_beside_it() -> None:
    found = preparation([PLAIN, OLDER], None)
    assert found.installs_s == {f"deepspeed {v}": 2 * LIST_S + START_S for v in (NEWEST, "0.17.6")}
    assert set(found.servers_s.values()) == {START_S}
    assert len(found.servers_s) == 2


def test_a_release_that_is_there_does_not_count_and_tells_how_long_another_takes() -> None:
    release, beside = wanted(package("deepspeed"), "")
    installed(release, "2.5")
    installed(beside)
    assert preparation([PLAIN], None).installs_s == {}
    assert preparation([OLDER], None).installs_s["deepspeed 0.17.6"] in (2.5 + START_S, 2.5 + LIST_S + START_S)


def test_the_release_that_loads_counts_too() -> None:
    found = preparation([Scenario(system="deepspeed", version="0.17.6", load_version="newest")], None)
    assert set(found.installs_s) == {"deepspeed 0.17.6", f"deepspeed {NEWEST}"}


def test_another_torch_is_installed_and_a_commit_and_the_reference_need_nothing() -> None:
    asked = [Scenario(system="torch-fsdp2", version="2.10.0"), Scenario(system="deepspeed", version="git:main")]
    assert set(preparation(asked, None).installs_s) == {"torch 2.10.0"}
    assert preparation([Scenario()], None) == Preparation()


@pytest.mark.parametrize("scenario", [PLAIN, OLDER, Scenario(system="megatron-core"), Scenario()])
def test_a_scenario_names_all_that_was_counted_for_it(scenario: Scenario) -> None:
    assert set(preparation([scenario], None).seconds) <= set(needs(scenario))


def test_a_plan_says_it() -> None:
    ready = preparation([PLAIN], None)
    text = render_plan(Plan((PLAIN,)), ready=ready)
    assert f"  1 release has to be installed first, about 38 s of it: deepspeed {NEWEST}\n" in text
    assert "  1 server has to import a library before the first ranks, about 8 s of it\n" in text
    assert "shrink" not in text, "scenario files are not shrunk"
    assert "first, about" not in render_plan(Plan((PLAIN,)))
