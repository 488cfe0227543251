"""Known issues: strict in what they accept, narrow in what they match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import report_samples as samples
from shardproof.diff import Difference
from shardproof.errors import UsageError
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.observe.logical import Key
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.system import System
from shardproof.result import Failure, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

ENTRY = """
[[issue]]
id = "{id}"
what = "State is cast on load."
library_line = "state_dict.py:612 (2.13.0)"
since = "2.4.0"
upstream = "https://github.com/pytorch/pytorch/issues/1"
scenario = "one.toml"
harm = "Moments lose half of their bits."
reach = "default"
trigger = "Loading any checkpoint of a bf16 model."
[issue.match]
{match}
"""

MISMATCH = """
op = "load"
evidence = ["exp_avg dtype", "param bits", "written step missing"]
axes = { offload = "cpu*", dtype = ["bf16", "mixed*"] }
"""


@dataclass(frozen=True)
class Beside(System):
    """The system, with its data in a folder of the test's."""

    place: Path = Path()

    @property
    def folder(self) -> Path:
        return self.place

    @property
    def predicates(self) -> Mapping[str, Callable[[Scenario], bool]]:
        return system_named("torch-fsdp2").predicates


def beside(place: Path, name: str = "torch-fsdp2") -> System:
    system = system_named("torch-fsdp2")
    values = {field.name: getattr(system, field.name) for field in fields(system)}
    return Beside(**{**values, "name": name}, place=place)


Load = Callable[..., KnownIssues]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Reads an `issues.toml` of entries, each with a `match`, or of a text."""
    (tmp_path / "one.toml").write_text("schema = 1\n[scenario]\n")

    def of(*matches: str, text: str | None = None, name: str = "torch-fsdp2") -> KnownIssues:
        entries = (ENTRY.format(id=f"issue-{n}", match=match) for n, match in enumerate(matches))
        (tmp_path / "issues.toml").write_text("schema = 1\n" + "".join(entries) if text is None else text)
        return KnownIssues(known_issues_of(beside(tmp_path, name)))

    return of


def test_a_result_that_agrees_in_everything_is_known(load: Load) -> None:
    assert load(MISMATCH).match(samples.mismatch()) == "issue-0"


def test_what_was_seen_under_emulation_only_is_so_until_every_entry_is_confirmed(load: Load) -> None:
    seen = replace(samples.mismatch(), emulated=("CUDA device",))
    assert KnownIssues().emulated_only(seen)
    assert not KnownIssues().emulated_only(replace(seen, emulated=()))
    assert not KnownIssues().emulated_only(replace(seen, verdict=Verdict.PASS, differences=()))
    assert not KnownIssues().emulated_only(replace(seen, scenario=replace(seen.scenario, faults=("boundary.x",))))
    assert load(MISMATCH).emulated_only(seen)
    entry = ENTRY.replace("[issue.match]", 'confirmed_on_gpu = "H200, torch 2.13.0+cu130"\n[issue.match]')
    text = "schema = 1\n" + entry.format(id="one", match=MISMATCH)
    confirmed = load(text=text)
    assert confirmed.issues[0].confirmed_on_gpu.startswith("H200")
    assert not confirmed.emulated_only(seen)
    assert not confirmed.emulated_only(replace(seen, known_issue="one"))
    error = Failure("KeyError", "another", 0, op=3)
    assert confirmed.emulated_only(replace(seen, verdict=Verdict.CRASH, error=error))


@pytest.mark.parametrize("system", all_systems(), ids=lambda system: system.name)
def test_what_is_shipped_loads(system: System) -> None:
    found = known_issues_of(system)
    assert bool(found) is system.folder.joinpath("issues.toml").is_file()
    assert {issue.system for issue in found} <= {system.name}


def test_a_systems_entries_are_about_no_other_system(load: Load) -> None:
    issues = load(MISMATCH, name="another")
    assert issues.match(samples.mismatch()) is None
    assert issues.match(replace(samples.mismatch(), system="another")) == "issue-0"


def test_an_entry_may_ask_a_predicate_of_its_system(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(system_named("torch-fsdp2")), "predicates", {})
    with pytest.raises(UsageError, match="when: given 'owns_nothing'; allowed: none: the system has no predicates"):
        load(MISMATCH + 'when = "owns_nothing"')
    asked: list[Scenario] = []

    def owns_nothing(scenario: Scenario) -> bool:
        asked.append(scenario)
        return scenario.seed == 1

    monkeypatch.setitem(vars(system_named("torch-fsdp2")), "predicates", {"owns_nothing": owns_nothing})
    with pytest.raises(UsageError, match="when: given 'owns_all'; allowed: owns_nothing"):
        load(MISMATCH + 'when = "owns_all"')
    issues = load(MISMATCH + 'when = "owns_nothing"')
    assert issues.match(samples.mismatch()) is None
    assert issues.match(replace(samples.mismatch(), scenario=replace(samples.mismatch().scenario, seed=1))) == "issue-0"
    assert len(asked) == 2


EXTRA = Difference(Key(8, "live", "master", "x"), "bits")


@pytest.mark.parametrize(
    "other",
    [
        replace(samples.mismatch(), system="megatron-core"),
        replace(samples.mismatch(), verdict=Verdict.NONDETERMINISTIC),
        replace(samples.mismatch(), differences=(*samples.mismatch().differences, EXTRA)),
        replace(samples.mismatch(), differences=()),
        replace(samples.mismatch(), scenario=samples.scenario(dtype="fp32", offload="cpu")),
        replace(samples.mismatch(), scenario=samples.scenario(dtype="bf16", offload="none")),
        replace(samples.mismatch(), error=Failure("RuntimeError", "and a crash on top")),
        replace(samples.mismatch(), verdict=Verdict.PASS),
        replace(samples.mismatch(), verdict=Verdict.UNKNOWN),
    ],
)
def test_whatever_differs_makes_it_new(load: Load, other: Result) -> None:
    assert load(MISMATCH).match(other) is None


def test_a_crash_matches_by_its_message_with_numbers_masked(load: Load) -> None:
    issues = load('op = "save"\nevidence = ["RuntimeError: size of tensor a (N) must match*"]')
    assert issues.match(samples.crash()) == "issue-0"
    other = replace(samples.crash(), error=Failure("ValueError", "size of tensor a (3) must match"))
    assert issues.match(other) is None


def test_a_hang_matches_by_its_deadline(load: Load) -> None:
    issues = load('op = "load"\nevidence = ["deadline: *"]\naxes = { program = "unfreeze" }')
    assert issues.match(samples.hang()) == "issue-0"
    assert issues.match(replace(samples.hang(), scenario=samples.scenario(program="resume"))) is None


def test_a_rank_that_ended_without_a_word_is_of_any_operation(load: Load) -> None:
    died = replace(samples.crash(), error=Failure("died", "rank 0 ended without a word: signal SIGABRT"))
    assert load('op = "step"\nevidence = ["died: rank N ended without a word: signal *"]').match(died) == "issue-0"
    assert load('op = "step"\nevidence = ["deadline: *"]').match(died) is None


def test_two_known_defects_in_one_scenario_are_known_under_both(load: Load) -> None:
    both = replace(samples.mismatch(), error=Failure("KeyError", "lost", op=samples.mismatch().failed_op.index))
    issues = load(MISMATCH, 'op = "load"\nevidence = ["KeyError: *"]')
    assert issues.match(both) == "issue-0+issue-1"
    assert [issue.id for issue in issues.entries_named("issue-0+issue-1")] == ["issue-0", "issue-1"]
    assert load(MISMATCH).match(both) is None


def test_the_first_entry_wins_and_lookups_work(load: Load) -> None:
    issues = load(MISMATCH, MISMATCH)
    assert issues.match(samples.mismatch()) == "issue-0"
    assert [issue.since for issue in issues.entries_named("issue-1")] == ["2.4.0"]
    assert issues.entries_named("issue-9") == []
    assert KnownIssues().match(samples.mismatch()) is None


GOOD = ENTRY.format(id="a", match=MISMATCH)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema = 1\n[[issue]\n", "malformed TOML"),
        ("schema = 2\n", "schema: given 2"),
        ("schema = 1\nissues = []\n", r"key: given 'issues' \(did you mean issue\?\); allowed: schema, about, part"),
        ("schema = 1\nissue = 3\n", "a list of tables; for example: \\[\\[issue\\]\\]"),
        ("schema = 1\n[[issue]]\nid = 'a'\n", "allowed: what too"),
        ("schema = 1\n" + GOOD + GOOD, "each id once"),
        ("schema = 1\n" + GOOD.replace("since =", 'system = "torch-fsdp2"\nsince ='), "key: given 'system'"),
        ("schema = 1\n" + GOOD.replace("one.toml", "absent.toml"), "absent.toml"),
        ("schema = 1\n" + GOOD.replace('since = "2.4.0"', "since = 2.4"), "since: given 2.4"),
        ("schema = 1\n" + GOOD.replace('what = "State is cast on load."', 'what = ""'), "what: given ''"),
        ("schema = 1\n" + GOOD.replace('"https://', '"javascript://'), "https"),
        ("schema = 1\n" + GOOD.replace('op = "load"', 'op = "lod"'), "op: given 'lod'.*; allowed: build"),
        ("schema = 1\n" + GOOD.replace('op = "load"', 'op = "load"\nop_index = 3'), "key: given 'op_index'"),
        ("schema = 1\n" + GOOD.replace("offload =", "ofload ="), "given 'ofload'"),
        ("schema = 1\n" + GOOD.replace('"cpu*"', '"gpu"'), "offload: given 'gpu'"),
        ("schema = 1\n" + GOOD.replace('"cpu*"', "3"), "a list of texts"),
        (
            "schema = 1\n" + GOOD.replace('axes = { offload = "cpu*", dtype = ["bf16", "mixed*"] }', "axes = 3"),
            "a table",
        ),
        ("schema = 1\n" + ENTRY.format(id="a", match='op = "load"'), "allowed: evidence too"),
        ("schema = 1\n" + ENTRY.format(id="a", match='op="load"\nevidence=["*"]'), "say something"),
        ("schema = 1\n" + GOOD.replace("[issue.match]", "match = 3\n[issue.x]"), "key: given 'x'"),
    ],
)
def test_a_malformed_file_is_a_usage_error_that_names_the_place(load: Load, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        load(text=text)
    assert "torch-fsdp2/issues.toml" in str(refused.value)


def test_a_system_without_the_file_has_no_entries_and_an_unreadable_one_is_a_usage_error(
    load: Load, tmp_path: Path
) -> None:
    assert load(MISMATCH).issues
    (tmp_path / "issues.toml").write_bytes(b"schema = 1 # \xff")
    with pytest.raises(UsageError, match=r"torch-fsdp2/issues\.toml: given .*; allowed: a text file in UTF-8"):
        known_issues_of(beside(tmp_path))
    (tmp_path / "issues.toml").unlink()
    assert known_issues_of(beside(tmp_path)) == ()


def bits(fqn: str, op: int = 5, role: str = "param", **found: object) -> Difference:
    return Difference(Key(op, "live", role, fqn), "bits", mismatched=1, total=4, **found)  # type: ignore[arg-type]


FROZEN = "frozen_tower"
"""Its parameters below `tower` are frozen, and those of `head` are not."""


@pytest.mark.parametrize(("fqn", "known"), [("tower.vision.weight", True), ("head.weight", False)])
def test_an_entry_may_name_what_its_parameters_are(load: Load, fqn: str, known: bool) -> None:
    issues = load('op = "load"\nevidence = ["param bits"]\naftermath = ["param bits"]\nparams = ["frozen"]')
    scenario = Scenario(system="torch-fsdp2", model=FROZEN, program="build step save step build load step")
    frozen = bits("tower.vision.weight")
    for differences in ((bits(fqn),), (frozen, bits(fqn)), (frozen, bits(fqn, op=6))):
        result = Result(scenario, "torch-fsdp2", "2.13.0", Verdict.MISMATCH, differences=differences)
        assert (issues.match(result) is not None) is known


@pytest.mark.parametrize(
    ("values", "shown", "known"),
    [
        ("nan", {"nan_mismatches": 1, "observed_first": "nan (0x7fc00000)"}, True),
        ("nan", {"observed_first": "0.5 (0x3f000000)"}, False),
        ("zero", {"observed_first": "-0.0 (0x80000000)"}, True),
        ("zero", {"observed_first": "0.25 (0x3e800000)"}, False),
        ("rounded", {"expected_first": "0.5 (0x3f000000)", "observed_first": "0.501 (0x3f004189)"}, True),
        ("rounded", {"expected_first": "0.5 (0x3f000000)", "observed_first": "0.75 (0x3f400000)"}, False),
    ],
)
def test_an_entry_may_name_what_is_found(load: Load, values: str, shown: dict[str, object], known: bool) -> None:
    issues = load(f'op = "load"\nevidence = ["param bits"]\nvalues = ["{values}"]')
    scenario = Scenario(system="torch-fsdp2", program="build step save step build load step")
    found = bits("up.weight", **shown)
    result = Result(scenario, "torch-fsdp2", "2.13.0", Verdict.MISMATCH, differences=(found,))
    assert (issues.match(result) is not None) is known


@pytest.mark.parametrize(("role", "first", "known"), [("master", "2102 (0x0836)", True), ("param", "7 (0x07)", False)])
def test_a_remainder_is_a_whole_number_of_a_master(load: Load, role: str, first: str, known: bool) -> None:
    issues = load('op = "load"\nevidence = ["* bits"]\nvalues = ["remainder"]')
    scenario = Scenario(system="torch-fsdp2", program="build step save step build load step")
    found = bits("up.weight", role=role, observed_first=first)
    result = Result(scenario, "torch-fsdp2", "2.13.0", Verdict.MISMATCH, differences=(found,))
    assert (issues.match(result) is not None) is known


@pytest.mark.parametrize("needed", [True, False])
def test_what_follows_in_the_same_operation_is_told_beside_what_it_follows_from_alone(load: Load, needed: bool) -> None:
    issues = load('op = "load"\nevidence = ["param dtype", "grad bits"]\nneeds = ["param dtype"]')
    scenario = Scenario(system="torch-fsdp2", program="build step save step build load step")
    first, follows = Difference(Key(5, "live", "param", "up.weight"), "dtype"), bits("up.weight", role="grad")
    differences = (first, follows) if needed else (follows,)
    result = Result(scenario, "torch-fsdp2", "2.13.0", Verdict.MISMATCH, differences=differences)
    assert (issues.match(result) is not None) is needed


@pytest.mark.parametrize(("pattern", "known"), [("step *", False), ("step replica_conflict", True)])
def test_copies_that_differ_must_be_named(load: Load, pattern: str, known: bool) -> None:
    issues = load(f'op = "load"\nevidence = ["{pattern}"]')
    scenario = Scenario(system="torch-fsdp2", program="build step save step build load step")
    conflict = Difference(Key(5, "live", "step", "up.weight"), "replica_conflict")
    result = Result(scenario, "torch-fsdp2", "2.13.0", Verdict.MISMATCH, differences=(conflict,))
    assert (issues.match(result) is not None) is known


@pytest.mark.parametrize(("key", "allowed"), [("params", "frozen, later"), ("values", "nan, zero")])
def test_an_unknown_kind_of_parameter_or_value_is_refused(load: Load, key: str, allowed: str) -> None:
    with pytest.raises(UsageError, match=allowed):
        load(f'op = "load"\nevidence = ["param bits"]\n{key} = ["some"]')


@pytest.mark.parametrize(("op", "known"), [(5, False), (6, True)])
def test_a_weight_differs_by_a_step_at_the_earliest(load: Load, op: int, known: bool) -> None:
    """Of an entry that its face alone tells: moments that are gone after a load change no weight before a step."""
    told = 'op = "load"\nevidence = ["exp_avg missing"]\naftermath = ["param bits"]\nparams = ["frozen"]'
    issues = load(told)
    scenario = Scenario(system="torch-fsdp2", model=FROZEN, program="build step save build load replace_params step")
    gone = Difference(Key(4, "live", "exp_avg", "tower.vision.weight"), "missing")
    result = Result(
        scenario, "torch-fsdp2", "2.13.0", Verdict.MISMATCH, differences=(gone, bits("tower.vision.weight", op=op))
    )
    assert (issues.match(result) is not None) is known
