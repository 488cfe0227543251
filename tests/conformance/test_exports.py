"""Every regression as a script of the library's own calls: it fails in a clean interpreter, and passes with the cure.

*Verifies*: with real libraries, that what `shardproof export` writes shows the failure where our package cannot be
imported, and does not on a copy of the library with the defect cured, nor on the release that repaired it; that the
scripts of the founding bugs and of the gravest findings have fewer than 80 lines. In CI one regression.
*Does not verify*: that a script fails on a GPU.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from shardproof.export.case import NoExportError
from shardproof.export.job import export
from shardproof.export.script import SCRIPT
from shardproof.investigate.cure_table import scenario_of
from shardproof.issues.findings import section_of
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.system import System

from tests.conformance.built_in import BUILT_IN
from tests.conformance.regression_scenarios import HANGS, needs_clone

pytestmark = pytest.mark.real

IN_CI = {("torch-fsdp2", "164929")}
"""A script on the library that is installed. Each of the others takes CI a quarter of a minute to a minute."""

SHORT_LINES, LONG_LINES = 79, 160

FOUNDING = {
    ("megatron-core", "2777"), ("megatron-bridge", "3949"), ("automodel", "2419-a"), ("megatron-core", "4423"),
    ("transformer-engine", "2713"),
}  # fmt: skip
GRAVEST = {
    ("megatron-fsdp", "5976"), ("megatron-fsdp", "mixed-unit-scale"), ("megatron-fsdp", "one-call-groups"),
    ("megatron-fsdp", "3510"), ("megatron-fsdp", "3023"), ("torch-fsdp2", "164929"), ("torch-fsdp2", "161368"),
    ("torch-fsdp2", "192202-frozen"), ("megatron-core", "3949"), ("deepspeed", "module-only-3"),
}  # fmt: skip
"""Wrong training or a wrong checkpoint without a word: on defaults, and of two a documented flag."""

SHORT = FOUNDING | GRAVEST
"""Regressions whose scripts are read at one glance."""

BEHIND = {
    ("megatron-core", "5929"): "another defect raises once this one is cured",
    ("megatron-core", "hybrid-sharded"): "5929 raises once this one is cured",
    ("megatron-core", "1553-replicate"): "5929 raises once this one is cured",
    ("megatron-core", "plain-no-state"): "plain-load-step raises once this one is cured",
    ("megatron-core", "int16-exchange"): "2576 raises once this one is cured",
    ("megatron-core", "4423-odd"): "4423's other face, a missing to_local, raises once this one is cured",
    ("megatron-bridge", "finetune-fp32-offload"): "Megatron-Core's refresh does nothing then: its reload-fp32-offload",
}
"""Regressions whose script does not pass with its cure alone, but with all of the library's → why."""

UNWRITTEN = {
    (system.name, name): why
    for system in BUILT_IN
    for finding in section_of(system).findings
    for name, why in finding.unscripted.items()
}
"""Regressions of which no script can be written yet → what the refusal says, as their entries have it. A test that
fails here is good news."""

ABLE = [system for system in BUILT_IN if system.export_entry]
CASES = [
    pytest.param(
        system, file.name.removesuffix(".toml"),
        id=f"{system.name}-{file.name.removesuffix('.toml')}",
        marks=[
            pytest.mark.xdist_group(system.name),
            *[pytest.mark.nightly] * ((system.name, file.name.removesuffix(".toml")) not in IN_CI),
        ],
    )
    for system in ABLE
    for file in sorted(system.folder.joinpath("regressions").iterdir(), key=lambda file: file.name)
]  # fmt: skip


@pytest.mark.parametrize(("system", "name"), CASES)
def test_a_regression_is_a_script(system: System, name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    laboratory: Laboratory = request.getfixturevalue("hasty" if (system.name, name) in HANGS else "laboratory")
    scenario = scenario_of(system, name)
    needs_clone(scenario)
    result = laboratory.examine_one(scenario)
    known = KnownIssues(known_issues_of(system)).match(result)
    if why := UNWRITTEN.get((system.name, name)):
        with pytest.raises(NoExportError, match=why):
            export(result, known, tmp_path, None, cured=True)
        return
    found = export(result, known, tmp_path, None, cured=True)
    assert found.plain.shows, found.plain
    hidden = (system.name, name) in BEHIND
    cured = found.together if hidden else found.cured
    assert cured.passes if cured else not hidden, (found.cured, found.together)
    assert found.others is None or found.others.shows, found.others
    assert found.repaired is None or found.repaired.passes, found.repaired
    script = (tmp_path / SCRIPT).read_text("utf-8")
    assert imported(script).isdisjoint({"shardproof"})
    assert len(script.splitlines()) <= (SHORT_LINES if (system.name, name) in SHORT else LONG_LINES)


def imported(script: str) -> set[str]:
    """The packages that a script imports anywhere."""
    nodes = list(ast.walk(ast.parse(script)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {
        name.partition(".")[0]
        for name in plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    }
