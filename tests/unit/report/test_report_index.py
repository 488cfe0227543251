"""What the main page says of causes: words, effects, places, links, and ids that hold for another night."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import report_samples as samples
from shardproof.diagnosis import refusals
from shardproof.diagnosis.rules.engine import rules
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.issues.upstream_links import short
from shardproof.protocol.registry import system_named
from shardproof.report.cause_wording import first_sentence, wording_of
from shardproof.report.html import render_index
from shardproof.report.index_page import index_page
from shardproof.report.repaired import repaired
from shardproof.report.text import render_text
from shardproof.result import ArmResult, Failure, Result
from shardproof.space.defaults import completed
from shardproof.verdict import Verdict
from shardproof.wording.effects import MECHANISMS, effect_of
from shardproof.wording.lines import headline


def test_every_built_in_mechanism_says_what_it_does_to_training() -> None:
    assert {refusals.MECHANISM, *(rule.mechanism for rule in rules())} >= set(MECHANISMS)
    built_in = {rule.mechanism for rule in rules() if rule.find.__module__.startswith("shardproof.")}
    assert built_in <= set(MECHANISMS)
    for sentence in MECHANISMS.values():
        assert sentence.endswith(".")
        assert sentence[0].isupper()


def test_a_cause_has_the_same_id_on_another_night_and_another_release() -> None:
    causes = samples.report().clusters()
    assert len({cause.id for cause in causes}) == len(causes)
    other = samples.report(replace(samples.crash(seed="5"), version="2.14.0"), samples.passing())
    (again,) = other.clusters()
    assert again.id in {cause.id for cause in causes}


def test_releases_that_fail_alike_are_one_cause_under_one_heading() -> None:
    """Also where the function that raised has moved to another file in one of them."""
    moved = failing_in("library/patches/moved.py", "2.14.0")
    other = failing_in("library/optimizer.py", "2.13.0", seed="7")
    report = samples.report(moved, other)
    (cause,) = report.clusters()
    assert report.by_cause == "1 new"
    assert sorted(cause.releases.split(" and ")) == ["2.13.0", "2.14.0"]
    assert f"[2 scenarios on {cause.releases}" in render_text(report)
    assert f"</b> {cause.releases}," in render_index(report)


def test_another_function_is_another_cause() -> None:
    here, there = failing_in("library/optimizer.py"), failing_in("library/optimizer.py", seed="7", function="load")
    assert samples.report(here, there).by_cause == "2 new"


def failing_in(file: str, version: str = "2.13.0", function: str = "state_dict", **axes: str) -> Result:
    """A crash that was raised in a function of the library."""
    trace = f'Traceback (most recent call last):\n  File "/x/site-packages/{file}", line 6, in {function}\nKeyError: 0'
    error = Failure("builtins.KeyError", "0", 1, trace, 3)
    return replace(samples.crash(**axes), version=version, error=error, explanations=())


def test_a_known_and_a_new_cause_of_one_signature_have_two_ids() -> None:
    both = samples.report(samples.crash(), replace(samples.crash(seed="2"), known_issue="torch-fsdp2-1"))
    assert len({cause.id for cause in both.clusters()}) == 2


def test_the_words_of_a_known_defect_are_those_of_its_entry() -> None:
    (issue,) = [i for i in known_issues_of(system_named("torch-fsdp2")) if i.id == "torch-fsdp2-164929"]
    told = wording_of(samples.mismatch(), [issue])
    assert (
        told.headline == "get_optimizer_state_dict creates missing optimizer state with a real step on zero gradients"
    )
    assert told.effect.startswith("The first real update uses the bias correction of the second one")
    assert told.place == "torch/distributed/checkpoint/state_dict.py:629 (2.13.0), _init_optim_state"
    assert wording_of(samples.mismatch(), [issue, issue]).headline.endswith(" (and 1 more known defect)")
    alike = replace(issue, what="The same with SGD.")
    assert wording_of(samples.mismatch(), [alike]).headline == first_sentence(issue.harm)


def test_a_new_failure_says_where_to_look() -> None:
    assert wording_of(samples.mismatch()).place == "after operation 8 (load), on ranks 0 and 1"
    assert effect_of(samples.crash()).startswith("The save raises, and the run ends there")
    assert effect_of(samples.hang()).startswith("All ranks wait for each other")
    assert effect_of(replace(samples.crash(), verdict=Verdict.NONDETERMINISTIC)).startswith("What training gives")
    two_ways = replace(
        samples.mismatch(), arms=(ArmResult("twice", "pass", ""), ArmResult("alike norm", "mismatch", "x"))
    )
    assert effect_of(two_ways).startswith("Two ways that are to train the same model")
    assert effect_of(samples.unknown()) == ""


def test_a_bare_assertion_tells_what_it_asserts_and_where() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "/x/site-packages/lib/optimizer.py", line 642, in state_dict\n'
        "    assert len(steps) == 1\nAssertionError\n"
    )
    bare = replace(samples.crash(), error=Failure("builtins.AssertionError", "", 1, trace, 3))
    assert headline(bare) == (
        "builtins.AssertionError on rank 1: assert len(steps) == 1, at lib/optimizer.py:642, in state_dict"
    )
    assert wording_of(bare).place == "lib/optimizer.py:642, in state_dict, on rank 1"


def test_under_which_conditions_a_cause_shows_is_told_where_enough_ran() -> None:
    report = samples.report(samples.mismatch(), samples.mismatch(seed="3"), samples.passing(4), samples.passing(5))
    (cause,) = index_page(report).new
    assert cause.condition == ("dtype=bf16: 2 such scenarios fail and none passes; 2 others pass")
    (alone,) = index_page(samples.report(samples.crash(), samples.passing())).new
    assert alone.condition == ""


def test_an_entry_whose_regression_passes_no_longer_fails() -> None:
    system = system_named("torch-fsdp2")
    issues = KnownIssues(known_issues_of(system))
    text = system.folder.joinpath("regressions/164929.toml").read_text("utf-8")
    scenario = completed({**tomllib.loads(text)["scenario"], "version": "2.99.0"})
    passes = Result(scenario, "torch-fsdp2", "2.99.0", Verdict.PASS)
    report = replace(samples.report(passes, samples.passing(3)), issues=issues)
    (found,) = repaired(report)
    assert (found.issue.id, found.version, found.result_id) == ("torch-fsdp2-164929", "2.99.0", passes.id)
    assert "torch-fsdp2-164929</b> passes on torch-fsdp2 2.99.0" in render_index(report)
    assert f"no longer fails: known issue torch-fsdp2-164929, on torch-fsdp2 2.99.0 ({passes.id})" in render_text(
        report
    )
    cured = replace(passes, cured=("torch-fsdp2-164929",))
    assert repaired(replace(report, results=(cured,))) == ()
    other = replace(passes, scenario=passes.scenario.with_axes({"microbatches": "2"}))
    assert repaired(replace(report, results=(other,))) == ()


def test_public_places_have_short_names() -> None:
    assert short("https://github.com/pytorch/torchtitan/issues/4382") == "torchtitan #4382"
    assert short("https://github.com/NVIDIA/Megatron-LM/pull/5835") == "Megatron-LM #5835"
    assert short("https://github.com/o/r/commit/1505db4cc4e9") == "o/r 1505db4"
    assert short("https://example.org/a/b") == "example.org"
