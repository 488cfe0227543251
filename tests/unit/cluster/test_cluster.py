"""What hands scenarios out to a cluster's nodes, over a cluster of threads: the same rules that Ray's nodes meet.

*Verifies*: every scenario has one result, wherever nodes, slots and errors come and go; CPUs by ranks; what is said.
*Does not verify*: Ray (`test_cluster_on_ray.py`, at night).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.cluster import handout
from shardproof.cluster.handout import ClusterExecutor, SlotLostError
from shardproof.cluster.node import Answer, NodeLaboratory, Setting, Work, needed_cpus, setting_of
from shardproof.errors import HarnessError, UsageError
from shardproof.issues.known_issues import KnownIssues
from shardproof.result import Result
from shardproof.scenario import Mesh, Scenario
from shardproof.store import StoreFull
from shardproof.verdict import Verdict

from tests import report_samples
from tests.unit.cluster_stub import Examine, StubCluster, StubSlot


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has to look for a node looks a hundred times as often."""
    for name in ("LOOK_S", "NO_NODE_S", "QUEUED_S"):
        monkeypatch.setattr(handout, name, getattr(handout, name) / 100)


def ranks(count: int, seed: int) -> Scenario:
    return replace(report_samples.scenario(system="torch-fsdp2", seed=str(seed)), mesh=Mesh(1, count, 1))


SCENARIOS = [ranks(1 + seed % 4, seed) for seed in range(24)]
SETTING = Setting(
    folder=".", environment={}, plugins=(), python=None, deadline_s=1.0, versions={}, samples=(ranks(4, 0),),
    known=KnownIssues(),
)  # fmt: skip


def passing(scenario: Scenario) -> Result:
    return Result(scenario, scenario.system, "2.13.0", Verdict.PASS)


def answered(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
    time.sleep(0.002)
    log = {scenario.id: {"rank0.log": slot.node.name.encode()}}
    return Answer((passing(scenario),), ((scenario, slot.node.name.encode()),), log)


class Run:
    """A run of some scenarios on a stub cluster, and what became of it."""

    def __init__(self, cluster: StubCluster, folder: Path, setting: Setting = SETTING, most: int | None = None) -> None:
        self.cluster, self.said, self.observed = cluster, list[str](), Counter[str]()
        self.executor = ClusterExecutor(
            cluster, setting, most=most, keep=folder / "logs", say=lambda line: self.said.append(line)
        )

    def results(self, scenarios: list[Scenario] = SCENARIOS) -> list[Result]:
        def observed(scenario: Scenario, blob: bytes) -> None:
            self.observed[scenario.id] += 1

        with self.executor as executor:
            found = [result for results in executor.attributed(scenarios, observed) for result in results]
        assert not self.cluster.open
        assert all(slot.closed for slot in self.cluster.slots)
        assert Counter(result.id for result in found) == Counter(scenario.id for scenario in scenarios)
        return found


def verdicts(results: list[Result]) -> Counter[Verdict]:
    return Counter(result.verdict for result in results)


def test_every_scenario_runs_once_on_some_node_with_its_ranks_as_cpus(tmp_path: Path) -> None:
    run = Run(StubCluster(answered, {"small": 2, "large": 9, "none": 0}), tmp_path)
    assert verdicts(run.results()) == {Verdict.PASS: len(SCENARIOS)}
    slots = {(slot.node.name, slot.cpus) for slot in run.cluster.slots}
    assert (slots, len(run.cluster.slots)) == ({("small", 2), ("large", 4)}, 3)
    assert all(0 < slot.most <= slot.cpus for slot in run.cluster.slots)
    assert run.observed == Counter(scenario.id for scenario in SCENARIOS)
    logs = {path.read_text() for path in (tmp_path / "logs").glob("*/rank0.log")}
    assert logs == {"small", "large"}
    assert run.said == []


def test_jobs_bound_the_slots(tmp_path: Path) -> None:
    run = Run(StubCluster(answered, {"one": 9, "two": 9}), tmp_path, most=1)
    run.results()
    assert [slot.cpus for slot in run.cluster.slots] == [4]


def test_gpus_are_asked_for_by_ranks_on_nodes_that_have_some(tmp_path: Path) -> None:
    setting = replace(SETTING, samples=(replace(ranks(4, 0), device="cuda"),))
    run = Run(StubCluster(answered, {"cpu": 8, "gpu": 64, "lone": 8}, {"gpu": 8, "lone": 1}), tmp_path, setting)
    run.results()
    assert Counter((s.node.name, s.cpus, s.gpus) for s in run.cluster.slots) == {("gpu", 4, 4): 2, ("lone", 4, 1): 1}


def test_a_lost_node_gives_back_what_it_had(tmp_path: Path) -> None:
    struck = list[str]()

    def losing(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
        if slot.node.name == "two" and not struck:
            struck.append(scenario.id)
            slot.cluster.lose("two")
        return answered(slot, scenario, work)

    run = Run(StubCluster(losing, {"one": 4, "two": 4}), tmp_path)
    results = {result.id: result for result in run.results()}
    assert verdicts(list(results.values())) == {Verdict.PASS: len(SCENARIOS)}
    assert results[struck[0]].restarted == "node two of the cluster was lost: its process is gone"
    assert any(line.startswith("node two of the cluster was lost") for line in run.said)
    assert set(run.observed.values()) == {1}, "what a lost node observed is not kept"


def test_a_scenario_that_loses_every_slot_is_unknown(tmp_path: Path) -> None:
    poison = SCENARIOS[5].id

    def losing(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
        if scenario.id == poison:
            slot.lose()
            raise SlotLostError("not heard")
        return answered(slot, scenario, work)

    results = {result.id: result for result in Run(StubCluster(losing, {"one": 4, "two": 4}), tmp_path).results()}
    assert results.pop(poison).reason.startswith("every slot that it was given to was lost: node ")
    assert verdicts(list(results.values())) == {Verdict.PASS: len(SCENARIOS) - 1}, (
        "slots of nodes that live are replaced"
    )


def test_an_error_on_a_node_is_unknown_and_names_the_node(tmp_path: Path) -> None:
    def failing(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
        if scenario == SCENARIOS[3]:
            raise ValueError("no such thing")
        return answered(slot, scenario, work)

    results = Run(StubCluster(failing, {"one": 4}), tmp_path).results()
    (unknown,) = (result for result in results if result.verdict is Verdict.UNKNOWN)
    assert unknown.scenario == SCENARIOS[3]
    assert "an error on node one: " in unknown.reason
    assert "ValueError: no such thing" in unknown.reason


def test_a_node_that_is_not_fit_is_left_out_and_one_that_joins_is_taken_in(tmp_path: Path) -> None:
    def joining(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
        slot.cluster.alive.setdefault("late", handout.Node("late", "late", 4, 0))
        time.sleep(0.02)
        return answered(slot, scenario, work)

    run = Run(StubCluster(joining, {"one": 4, "odd": 8}, unfit={"odd": "torch is 2.12.0"}), tmp_path)
    run.results()
    assert run.said == ["node odd is left out: torch is 2.12.0"]
    assert {slot.node.name for slot in run.cluster.slots if slot.most} == {"one", "late"}


@pytest.mark.parametrize(
    ("cpus", "unfit", "said"),
    [
        ({"one": 0}, {}, "of which a node has 4 CPUs"),
        ({"one": 4}, {"one": "no plugin"}, "no node can run this; one: no plugin"),
    ],
)
def test_a_cluster_that_can_run_nothing_is_refused(
    tmp_path: Path, cpus: dict[str, int], unfit: dict[str, str], said: str
) -> None:
    run = Run(StubCluster(answered, cpus, unfit=unfit), tmp_path)
    with pytest.raises(UsageError, match=said):
        run.results()
    assert not run.cluster.open


def ending(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
    slot.cluster.lose("one")
    return answered(slot, scenario, work)


def full(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
    return Answer((), full="no space left")


@pytest.mark.parametrize(
    ("examine", "error", "said"),
    [(ending, HarnessError, "no node of the cluster is left"), (full, StoreFull, "node one: no space left")],
)
def test_what_ends_a_run(tmp_path: Path, examine: Examine, error: type[Exception], said: str) -> None:
    run = Run(StubCluster(examine, {"one": 4}), tmp_path)
    with pytest.raises(error, match=said):
        run.results()
    assert not run.cluster.open


def test_one_scenario_of_a_search_goes_to_some_node(tmp_path: Path) -> None:
    asked = list[Work]()

    def noting(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
        asked.append(work)
        return answered(slot, scenario, work)

    with Run(StubCluster(noting, {"one": 4}), tmp_path).executor as executor:
        assert executor.examine_one(SCENARIOS[0], confirm=False).verdict is Verdict.PASS
        assert executor.examine_one(SCENARIOS[0]).verdict is Verdict.PASS
    assert asked == ["once", "confirmed"]


def test_a_node_with_other_releases_says_which() -> None:
    setting = setting_of([ranks(2, 0), ranks(4, 1), ranks(3, 2)], (), None, 1.0, KnownIssues())
    assert [needed_cpus(sample) for sample in setting.samples] == [4]
    python = setting.versions["python"]
    for versions, said in (
        ({**setting.versions, "torch": "2.12.0", "python": python + "9"}, "allowed: 2.12.0, which the driver has"),
        ({**setting.versions, "python": "3.9.1"}, "allowed: 3.9, "),
        ({**setting.versions, "apex": "1.0"}, "apex on the node: given 'none'"),
    ):
        assert said in NodeLaboratory(replace(setting, versions=versions), 1).ready()
    assert "no_such_plugin_" in NodeLaboratory(replace(setting, plugins=("no_such_plugin_",)), 1).ready()
