"""Scripts of failures: the path to one, what is compared, what is left out, and how an interpreter is kept clean."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.diff import Difference
from shardproof.export import job
from shardproof.export.case import NoExportError, case_of, path_to
from shardproof.export.description import needed_params, require_in_front
from shardproof.export.job import Exported, written
from shardproof.export.script import SCRIPT, without_unused
from shardproof.export.trial import ScriptOutcome, cured_copy, run
from shardproof.investigate.cure_table import scenario_of
from shardproof.issues.findings import section_of
from shardproof.issues.known_issues import repaired_in
from shardproof.observe.logical import Key
from shardproof.program import expand
from shardproof.protocol.registry import all_systems, system_named
from shardproof.result import FailedOp, Failure, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

RESUME = Scenario(system="torch-fsdp2", program="resume")


CORE = Scenario(system="megatron-core").with_axes(
    {"dtype": "bf16/master=fp32", "sharding": "zero1", "optimizer": "adamw/impl=multi_tensor", "checkpoint": "dp_zero"}
)


def mismatch(
    scenario: Scenario, op: int, role: str = "exp_avg", where: str = "live", kind: str = "bits", fqn: str = "up.weight",
    version: str = "2.13.0",
) -> Result:  # fmt: skip
    difference = Difference(Key(op, where, role, fqn), kind, (0,), 1, 4)
    kinds = [each.kind for each in expand(scenario)]
    return Result(
        scenario, scenario.system, version, Verdict.MISMATCH, differences=(difference,),
        failed_op=FailedOp(op, kinds[op]),
    )  # fmt: skip


def crash(scenario: Scenario, op: int, kind: str = "RuntimeError", version: str = "2.13.0") -> Result:
    error = Failure(kind, "no such key", 0, "", op)
    return Result(
        scenario,
        scenario.system,
        version,
        Verdict.CRASH,
        error=error,
        failed_op=FailedOp(op, expand(scenario)[op].kind),
    )


def test_the_path_leaves_other_arms_out() -> None:
    ops = expand(RESUME)
    assert " ".join(op.kind for op in ops) == "build step step save step build step build load step"
    assert [op.index for op in path_to(ops, ops[-1])] == [0, 1, 2, 3, 7, 8, 9]
    assert [op.index for op in path_to(ops, ops[6])] == [5, 6]


@pytest.mark.parametrize(
    ("op", "kind", "before"), [(1, "trained", None), (3, "kept", 3), (8, "kept", 3), (9, "trained", None)]
)
def test_what_is_compared_follows_from_the_first_divergence(op: int, kind: str, before: int | None) -> None:
    case = case_of(mismatch(RESUME, op))
    assert case.focus.kind == kind
    assert (case.reference_op.index if case.reference_op else None) == before


def test_a_checkpoint_that_is_wrong_is_read() -> None:
    assert case_of(mismatch(RESUME, 3, where="written")).focus.kind == "written"


def test_a_shape_in_a_checkpoint_needs_neither_a_step_nor_an_optimizer() -> None:
    case = case_of(mismatch(RESUME, 3, role="param", where="written", kind="shape"))
    assert case.is_shape
    assert [op.kind for op in case.ops] == ["build", "save"]


def test_weights_that_go_through_a_checkpoint_need_their_own_module_alone() -> None:
    result = mismatch(RESUME, 8, role="param")
    short, whole = case_of(result), case_of(result, whole=True)
    assert [op.kind for op in short.ops] == ["build", "save", "build", "load"]
    assert [m.path for m in short.modules] == ["up"]
    assert [op.kind for op in whole.ops] == ["build", "step", "step", "save", "build", "load"]
    assert len(whole.modules) > 1


def test_a_script_has_the_parameters_alone_that_its_entry_names() -> None:
    result = mismatch(RESUME, 8, role="param")
    wanted = ("up.weight",)
    assert [m.path for m in case_of(result, needs=wanted).modules] == ["up"]
    assert [p.fqn for p in case_of(result, needs=wanted).spec.params] == ["up.weight"]
    assert len(case_of(result, needs=wanted, whole=True).spec.params) == len(case_of(result).spec.params) > 1


def test_an_entry_names_parameters_of_its_own_scenarios_model_alone() -> None:
    named = 0
    for system in all_systems():
        for finding in section_of(system).findings:
            if finding.script_needs:
                named += 1
                scenario = scenario_of(system, finding.regressions[0])
                assert needed_params(scenario, finding.id) == finding.script_needs
                assert needed_params(scenario, f"{finding.id}+another") == ()
    assert named >= 3


def test_a_case_on_one_rank_has_no_other_mesh() -> None:
    case = case_of(mismatch(RESUME.with_axes({"mesh": "1x2x1"}), 8, role="param")).on_one_rank()
    assert {op.mesh.world for op in case.ops} == {1}
    assert case.focus.op is case.ops[-1]


@pytest.mark.parametrize(
    ("fixed", "release"),
    [
        ("", ""),
        ("0.5.0, by pull request 2419", "0.5.0"),
        ("0.19.2, by pull request 8056 (0.19.4 was run)", "0.19.4"),
        ("2.14.1 (2.14.0 was not run)", "2.14.1"),
        ("core_v0.18.2; pull request 3191, in core_v0.18.0, took the line away", "0.18.2"),
        ("core_v0.19.0, with another defect in its place", ""),
    ],
)
def test_the_release_that_repaired_a_defect(fixed: str, release: str) -> None:
    assert repaired_in(fixed) == release


def test_what_another_defect_hides_is_refused_before_it_is_run() -> None:
    hidden = scenario_of(system_named("megatron-core"), "fsdp-scaler")
    with pytest.raises(NoExportError, match=r"megatron-core-fsdp-scaler: on a release megatron-core-fsdp-unscale ends"):
        require_in_front(replace(hidden, version="0.16.1"))
    with pytest.raises(NoExportError, match="megatron-core-fsdp-unscale"):
        written(mismatch(hidden, 2, version="0.16.1"), "megatron-core-fsdp-unscale")
    twice, alone = (scenario_of(system_named("megatron-core"), name) for name in ("4423-silent", "4423"))
    assert replace(twice, version="") == replace(alone, version="")
    require_in_front(twice)  # nothing hides the other entry that has this scenario


@pytest.mark.parametrize("role", ["norm", "rng"])
def test_what_no_script_can_read_is_refused(role: str) -> None:
    assert case_of(mismatch(RESUME, 1, role)).focus.kind == "other"
    with pytest.raises(NoExportError, match=f"cannot read what differs first: {role} bits"):
        written(mismatch(RESUME, 1, role), None)


def test_a_setting_is_that_of_the_group_which_has_the_parameter() -> None:
    result = mismatch(CORE.with_axes({"model": "lr_groups"}), 8, "hyperparameter", fqn="a.weight.lr", version="0.16.1")
    focus = case_of(result).focus
    assert (focus.fqn, focus.setting) == ("a.weight", "lr")
    script = written(result, None).script
    assert 'ParamKey(name=("*a.bias", "*b.weight")): {"max_lr": 0.0078125}' in script
    assert "lr of the param group of a.weight after the load: expected {expected}, observed {observed}" in script
    with pytest.raises(NoExportError, match=r"param groups of their own before 0\.16"):
        written(replace(result, version="0.15.3"), None)
    with pytest.raises(NoExportError, match=r"do not do settings of param groups .*simpler.*shrink \w+ --toml"):
        written(mismatch(RESUME, 8, "hyperparameter", fqn="group0.lr"), None)


PRECISE = CORE.with_axes({"options": "precision_aware", "program": "rollback"})


def test_the_precision_aware_optimizers_state_is_read_through_it() -> None:
    script = written(mismatch(PRECISE, 5, "exp_avg", version="0.16.1"), None)
    assert "optimizer.get_unscaled_state(shard_of(model, optimizer), state).clone()" in script.script
    assert "use_precision_aware_optimizer=True" in script.script
    assert "def get_unscaled_state" in script.draft.shims["gpu_on_cpu.py"]
    compile(script.draft.shims["gpu_on_cpu.py"], "gpu_on_cpu.py", "exec")
    master = written(mismatch(PRECISE, 5, "master", version="0.16.1"), None).script
    assert "negative low bits were rounded up" in master
    plain = written(mismatch(CORE.with_axes({"program": "rollback"}), 5, version="0.16.1"), None)
    assert "get_unscaled_state" not in plain.script + plain.draft.shims["gpu_on_cpu.py"]


def test_moments_of_what_no_forward_uses_are_zero_on_one_rank() -> None:
    scenario = PRECISE.with_axes({"model": "unused", "mesh": "1x2x1"})
    script = written(mismatch(scenario, 1, fqn="dead.weight", version="0.16.1"), None).script
    assert "expected = torch.zeros(12)" in script
    assert "mp.spawn" not in script
    with pytest.raises(NoExportError, match="comparisons of steps"):
        written(mismatch(scenario, 1, fqn="used.weight", version="0.16.1"), None)


def test_an_error_of_torchs_own_state_shows_with_one_parameter() -> None:
    """Other errors of a load with torch's Adam may come of its state being absent, which one build would hide."""
    scenario = CORE.with_axes({"optimizer": "adamw/impl=forloop", "program": "restart"})
    load = next(op.index for op in expand(scenario) if op.kind == "load")
    result = crash(scenario, load, "KeyError", "0.16.1")
    assert result.error is not None
    of_state = replace(result, error=replace(result.error, message="'step'"))
    assert "model.weight = nn.Parameter" in written(of_state, None).script
    assert "SHAPES" in written(result, None).script


def test_a_setting_is_compared_after_a_load_alone() -> None:
    for op, where in ((3, "written"), (0, "live"), (1, "live")):
        with pytest.raises(NoExportError, match="cannot read what differs first: hyperparameter bits"):
            written(mismatch(CORE, op, "hyperparameter", where=where, fqn="up.weight.lr", version="0.16.1"), None)


def test_a_system_says_itself_what_one_number_shows() -> None:
    """FusedAdam's failures need one weight, and neither ranks nor sharding."""
    axes = {"optimizer": "adamw/impl=multi_tensor/loss_scale=1024.0", "options": "capturable", "mesh": "1x2x1"}
    scenario = Scenario(system="transformer-engine").with_axes({**axes, "program": "build overflow"})
    script = written(mismatch(scenario, 1, "step", version="2.20.2"), None).script
    assert "after one that overflowed" in script
    assert "expected = 0" in script
    assert "mp.spawn" not in script
    assert "fully_shard" not in script


@pytest.mark.parametrize(("where", "role"), [("live", "master"), ("written", "param")])
def test_copies_of_a_parameter_are_compared_as_what_they_are(where: str, role: str) -> None:
    """A script cannot compare two copies; it compares the one on the host, or in the file, with the parameter."""
    offload = {"offload": "cpu", "program": "build save build load_model_only reload_params"}
    axes = offload if where == "live" else {"program": "build step save"}
    scenario = CORE.with_axes({**axes, "dtype": "fp32"})
    script = written(
        mismatch(scenario, 4 if where == "live" else 2, "param", where, "replica_conflict", version="0.16.1"), None
    ).script
    assert (
        f"{role} of up.weight {'after the refresh of the masters' if where == 'live' else 'in the checkpoint'}"
        in script
    )


def test_what_is_made_of_a_tensor_on_the_host_stays_there() -> None:
    precise = written(mismatch(PRECISE.with_axes({"offload": "cpu"}), 5, "param", version="0.16.1"), None)
    assert "KEEPS_PLACE" in precise.draft.shims["gpu_on_cpu.py"]
    compile(precise.draft.shims["gpu_on_cpu.py"], "gpu_on_cpu.py", "exec")
    plain = written(mismatch(PRECISE, 5, "exp_avg", version="0.16.1"), None)
    assert "KEEPS_PLACE" not in plain.draft.shims["gpu_on_cpu.py"]


def test_of_two_known_issues_the_one_that_a_script_shows_comes_first() -> None:
    axes = {"offload": "cpu", "checkpoint": "dp_zero+trusted", "program": "build step save reshard build load"}
    result = mismatch(PRECISE.with_axes(axes), 4, "param", version="0.16.1")
    told = written(result, "megatron-core-7449+megatron-core-dummy-step").description
    assert told.cure == "dummy-step"


def test_a_load_that_the_library_refuses_is_as_strict_as_ours() -> None:
    scenario = CORE.with_axes({"sharding": "replicate", "checkpoint": "sharded", "program": "save_first"})
    load = next(op.index for op in expand(scenario) if op.kind == "load")
    refused = crash(scenario, load, "megatron.core.dist_checkpointing.core.CheckpointingException", "0.16.1")
    other = crash(scenario, load, "KeyError", "0.16.1")
    assert "CHECKPOINT, strict=StrictHandling.RAISE_ALL)" in written(refused, None).script
    assert "StrictHandling" not in written(other, None).script


def test_the_cure_is_the_one_that_names_the_scenario() -> None:
    core = system_named("megatron-core")
    first, odd = scenario_of(core, "4423"), scenario_of(core, "4423-odd")
    told = [written(crash(each, 2, version="0.16.1"), "megatron-core-4423").description for each in (first, odd)]
    assert [each.cure for each in told] == ["4423", "4423-silent"]
    assert "shape = dist_param.shape" in told[1].patch


def outcome(status: int) -> ScriptOutcome:
    return ScriptOutcome(status, "expected 1, observed 2\n", "")


@pytest.mark.parametrize(
    ("cured", "together", "wrong", "said"),
    [
        (0, None, False, "with the cure 4423-silent: it passes"),
        (2, 0, False, "with the cure 4423-silent: another defect comes behind it"),
        (1, 1, True, "with all cures of megatron-core: IT DOES NOT PASS"),
    ],
)
def test_a_cure_may_uncover_another_defect(cured: int, together: int | None, wrong: bool, said: str) -> None:
    made = written(
        crash(scenario_of(system_named("megatron-core"), "4423-odd"), 2, version="0.16.1"), "megatron-core-4423"
    )
    all_of_them = None if together is None else outcome(together)
    found = Exported(made, Path("exports"), outcome(1), outcome(cured), all_of_them, None, None)
    assert (found.wrong, said in found.text()) == (wrong, True)


def test_a_cure_that_is_asked_for_and_not_there_is_told() -> None:
    made = written(crash(scenario_of(system_named("megatron-core"), "4423-odd"), 2, version="0.16.1"), None)
    found = Exported(made, Path("exports"), outcome(1), None, None, None, None, lacks_cure=True)
    assert "with the cure: it was not run, since this defect has none" in found.text()


def test_a_failure_ends_in_what_the_rank_said_that_saw_it() -> None:
    said = "rank 2: expected that it ends; observed KeyError: 0\nrank 0: expected that it ends; no error here"
    assert ScriptOutcome(1, said, "").ending == "status 1: rank 2: expected that it ends; observed KeyError: 0"


def test_a_script_that_passes_with_all_other_cures_shows_another_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = crash(scenario_of(system_named("megatron-core"), "4423-odd"), 2, version="0.16.1")
    made = written(result, "megatron-core-4423")
    (tmp_path / SCRIPT).write_text(made.script, "utf-8")
    (tmp_path / job.MARK).touch()
    monkeypatch.setattr(job, "library_paths", lambda *_: ())
    monkeypatch.setattr(job, "_shown", lambda *_: (made, outcome(1)))
    monkeypatch.setattr(job, "run", lambda *_: outcome(0))
    with pytest.raises(NoExportError, match=r"shows another defect: with all cures .* but 4423-silent it passes"):
        job.export(result, "megatron-core-4423", tmp_path, None, cured=True)
    assert not (tmp_path / SCRIPT).exists()


def test_a_warning_is_compared_with_none() -> None:
    scenario = Scenario(system="megatron-fsdp").with_axes({"model": "unused", "program": "build step", "mesh": "1x2x1"})
    script = written(mismatch(scenario, 1, "warning", fqn="rank0.0", kind="extra", version="0.6.1"), None).script
    assert "with warnings.catch_warnings(record=True) as said:" in script
    assert 'if name not in ["dead"]:' in script


def test_two_runs_of_a_script_do_not_meet_at_one_port() -> None:
    script = written(crash(RESUME.with_axes({"mesh": "1x2x1"}), 1), None).script
    assert "port = 20000 + os.getppid() % 10000" in script


def test_what_does_not_fail_is_refused() -> None:
    with pytest.raises(NoExportError, match="its verdict is pass"):
        case_of(Result(RESUME, "torch-fsdp2", "2.13.0", Verdict.PASS))


def test_a_system_without_scripts_says_so() -> None:
    with pytest.raises(NoExportError, match=r"reference has no scripts yet; those that have: .*torch-fsdp2"):
        written(mismatch(replace(RESUME, system="reference"), 1), None)


def test_a_load_onto_another_mesh_has_two_parts() -> None:
    scenario = RESUME.with_axes({"mesh": "1x3x1", "load": "1x2x1", "program": "build step save reshard build load"})
    script = written(crash(scenario, 4), None).script
    assert "def saving():" in script
    assert "for part, world in ((saving, 3), (loading, 2)):" in script


def test_options_are_those_of_the_scenario() -> None:
    plain = written(crash(RESUME, 1), None).script
    asked = written(crash(RESUME.with_axes({"dtype": "fp32/param=bf16", "reshard_after_forward": "false"}), 1), None)
    assert "MixedPrecisionPolicy" not in plain
    assert 'options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)' in asked.script


def test_what_nothing_uses_is_left_out() -> None:
    used = "def used():\n    return sys.path\n\n\n"
    unused = "def unused():\n    os.getcwd()\n\n\n"
    script = '"""Doc."""\nimport os\nimport sys\n\n\n' + used + unused + "used()\n"
    left = without_unused(script)
    assert "unused" not in left
    assert "import os" not in left
    assert "import sys" in left


def test_a_title_cannot_leave_its_docstring() -> None:
    from shardproof.export.job import Written
    from shardproof.export.script import render

    made: Written = written(crash(RESUME, 1), None)
    script = render(made.draft, made.case, 'no """\nimport shutil; """ \\')
    compile(script, "repro.py", "exec")
    assert not script.split('"""')[2].strip().startswith("import shutil")


def test_our_package_is_not_there_for_a_script(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text("import shardproof\n")
    outcome = run(tmp_path / "repro.py", sys.executable, ())
    assert outcome.status == 1
    assert not outcome.shows
    assert "the library under test alone" in outcome.errors


def test_a_copy_of_a_library_has_one_file_of_its_own(tmp_path: Path) -> None:
    site, copy = tmp_path / "site", tmp_path / "copy"
    (site / "lib" / "sub").mkdir(parents=True)
    for name in ("lib/__init__.py", "lib/other.py", "lib/sub/__init__.py", "lib/sub/bad.py"):
        (site / name).write_text("value = 1\n")
    cured_copy(copy, [site], "lib/sub/bad.py", "value = 2\n")
    cured_copy(copy, [site], "lib/other.py", "value = 3\n")
    (tmp_path / "repro.py").write_text(
        "import lib.other, lib.sub.bad\nprint('expected', lib.other.value, lib.sub.bad.value)\n"
    )
    outcome = run(tmp_path / "repro.py", sys.executable, [site], {"lib/sub/bad.py": "value = 2\n"})
    assert outcome.passes
    assert outcome.said == "expected 1 2\n"
    assert (site / "lib/sub/bad.py").read_text() == "value = 1\n"
    assert (copy / "lib/other.py").read_text() == "value = 3\n"
