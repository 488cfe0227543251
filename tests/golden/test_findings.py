"""docs/findings.md and the pages below docs/findings/ are what `python -m docs.written.findings` writes, and say of
every defect what a reader needs."""

from __future__ import annotations

import re

import pytest
from packaging.version import Version
from shardproof.errors import UsageError
from shardproof.issues.cures import cures_of
from shardproof.issues.findings import Finding, Section, section_of
from shardproof.issues.known_issues import bound_of

from docs.written.findings import render
from docs.written.pages import differing
from tests.conformance.built_in import BUILT_IN

SECTIONS = [section_of(system) for system in BUILT_IN]
FINDINGS = [finding for section in SECTIONS for finding in section.findings]
AGAIN = "write it anew: python -m docs.written.findings"


def test_the_pages_are_what_the_entries_say() -> None:
    assert differing(render(SECTIONS)) == [], AGAIN


def test_every_finding_stands_on_one_page() -> None:
    text = "".join(render(SECTIONS).values())
    causes = [finding.id for finding in FINDINGS if not finding.cause]
    assert [ident for ident in causes if text.count(f'<a id="{ident}"></a>') != 1] == []


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.id)
def test_a_finding_says_what_a_reader_needs(finding: Finding) -> None:
    assert finding.severity
    assert len(finding.novelty.harm) <= 140, f"{finding.id}: harm = one plain sentence on what a user has in the end"


@pytest.mark.parametrize("face", [f for f in FINDINGS if f.cause], ids=lambda finding: finding.id)
def test_a_face_is_public_where_its_cause_is(face: Finding) -> None:
    cause = next(finding for finding in FINDINGS if finding.id == face.cause)
    assert not face.novelty.searched, "what was searched is the cause's"
    assert face.novelty.upstream in (cause.novelty.upstream, *cause.novelty.also, "")


def test_causes_are_counted_once_and_apart_from_what_no_release_shows() -> None:
    causes = [finding for finding in FINDINGS if not finding.cause]
    found = [finding for finding in causes if finding.novelty.on_a_release]
    apart = {finding.id for finding in causes} - {finding.id for finding in found}
    assert {
        "megatron-core-device-fp32-islands", "megatron-core-reload-fp32-islands", "megatron-core-reload-fp32-offload",
        "megatron-core-fsdp-plain-state", "megatron-core-4423", "megatron-core-4423-silent",
        "megatron-core-4623", "megatron-core-hybrid-one-class", "megatron-fsdp-empty-column-state",
        "megatron-core-hybrid-sharded", "megatron-core-hybrid-empty-state", "megatron-core-hybrid-device-step",
        "megatron-core-fsdp-fp32-load", "megatron-core-fsdp-scaler", "megatron-core-hybrid-stale-masters",
        "automodel-policy-text", "megatron-fsdp-step-syncs", "torch-fsdp2-full-strided",
        "torch-fsdp2-140898", "megatron-fsdp-hybrid-no-overlap", "megatron-core-3754-reduce",
        "megatron-core-fp8-zeros", "megatron-fsdp-pending-gather", "megatron-core-precision-aware-clip",
        "megatron-core-remainders-as-masters",
        "transformer-engine-int16-gather", "automodel-tp-record", "megatron-fsdp-empty-tp",
        "megatron-fsdp-uneven-tp-copies",
        "megatron-bridge-finetune-fp32-offload",
        "megatron-core-gather-scatter-instances", "torch-fsdp2-tensor-lr",
    } == apart  # fmt: skip
    assert f"## {len(found)} causes found on releases" in render(SECTIONS)["findings.md"]


def test_every_cure_is_of_a_finding() -> None:
    kept = {(system.name, cure.id) for system in BUILT_IN for cure in cures_of(system)}
    named = {(finding.system, finding.cure) for finding in FINDINGS}
    assert sorted(kept - named) == [("megatron-core", "4423-gdn")]  # told of in 4423, whose cure is another file's


def test_a_cause_that_is_no_finding_is_an_error() -> None:
    orphan = next(finding for finding in FINDINGS if finding.cause)
    section = next(section for section in SECTIONS if orphan in section.findings)
    alone = Section(section.system, "", (type(section.parts[0])("", "", (orphan,)),))
    with pytest.raises(UsageError, match=orphan.cause):
        render([alone])


SHOWS = ("fails", "mismatch", "crash", "hang", "warning", "nondeterministic")
RELEASE = re.compile(r"(?<![\d.])\d+(?:\.\d+)+(?:rc\d+)?(?![\d.])")


@pytest.mark.parametrize("finding", [f for f in FINDINGS if f.releases], ids=lambda finding: finding.id)
def test_the_oldest_run_that_since_names_stands_among_the_releases(finding: Finding) -> None:
    """An issue says both, one sentence after the other. What passes there cannot be the first to have it."""
    bound = bound_of(finding.since)
    if bound is None or not bound.comparable:
        return
    oldest = str(bound.version)
    came = {name: said.partition(" ")[0] for about, said in finding.releases.items() for name in RELEASE.findall(about)}
    assert oldest in came, f'{finding.id}: releases = ["{oldest}: …", …], since that run is the oldest of `since`'
    shown = [name for name in came if came[name] in SHOWS]
    older = [name for name in shown if Version(name) < bound.version]
    assert oldest in shown, f"{finding.id}: {oldest} does not show it, so that it is not the first to have it"
    assert not older, f"{finding.id}: {', '.join(older)} is older than {oldest} and shows it too"
