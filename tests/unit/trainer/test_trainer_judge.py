"""The judge of arms, on sessions that nobody ran: each arm fails when it should, says why, and passes otherwise.

Every fault is planted in one session of a simulated trainer (`simulated`), and names the arms that must see it.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shardproof.diff import Difference, as_numbers
from shardproof.observe.logical import Key, Value
from shardproof.program import Op
from shardproof.trainer.arms import Session, sessions_of
from shardproof.trainer.cells import scenario_of
from shardproof.trainer.judge import altered as altered_arm
from shardproof.trainer.judge import cell as judge
from shardproof.trainer.judge.twin import NO_PROBE, NoTwin
from shardproof.trainer.values import wording
from shardproof.trainer.values.notes import MADE_TOO_EARLY, OF_BEFORE
from shardproof.trainer.values.rounding import ROUNDING, rounded
from simulated import COUNT, LR, MOMENT, PARAM, RNG, Fault, Simulation, State, gone, nothing, only, plus
from trainer_texts import FIT, STEPWISE, registered

DATA = "axes = {'mesh': ['2', '4'], 'lr': [0.1, 0.2]}\naltered = {'lr': '%s'}"
ELSEWHERE = ["other mesh 4", "other mesh 1", "altered lr"]
ARMS = ["twice", "twin", "unsaved", "resumed", "second resume", "cold", "used", "again", "written", *ELSEWHERE]


def simulation(folder: Path, fault: Fault = nothing, *, wins: str = "run", methods: str = STEPWISE,
               program: str = "arms", **options: Any) -> Simulation:  # fmt: skip
    trainer = registered(folder, DATA % wins, methods)
    return Simulation(scenario_of(trainer, {}, program=program), fault, **options)


def judged(folder: Path, fault: Fault = nothing, **options: Any) -> dict[str, Any]:
    return simulation(folder, fault, **options).judged(folder)


def failed(found: dict[str, Any]) -> dict[str, str]:
    """What is no pass, but for the twin, which a simulated trainer has none of."""
    told = {arm["name"]: arm["sentence"] for arm in found["arms"] if arm["verdict"] != "pass"}
    return {name: sentence for name, sentence in told.items() if sentence != wording.no_twin(NO_PROBE)}


def saving_changes_the_rate(session: Session, op: Op, state: State) -> None:
    if op.kind == "save":
        state[LR] = "0.3"


def test_a_sound_trainer_passes_every_arm(folder: Path) -> None:
    found = judged(folder)
    assert failed(found) == {}
    assert (found["verdict"], found["differences"]) == ("pass", [])
    assert [arm["name"] for arm in found["arms"]] == ARMS
    (twin,) = (arm for arm in found["arms"] if arm["name"] == "twin")
    assert (twin["verdict"], twin["sentence"]) == ("unsupported", wording.no_twin(NO_PROBE))


def test_a_sound_trainer_with_fit_passes_every_arm(folder: Path) -> None:
    found = judged(folder, methods=FIT)
    unseen = dict.fromkeys(("other mesh 4", "other mesh 1"), wording.FIT_ELSEWHERE)
    assert failed(found) == {
        **unseen,
        "altered lr": altered_arm.NO_ALTERED_FIT,
    }  # nothing was compared, and none passes
    assert found["verdict"] == "pass"
    names = [arm["name"] for arm in found["arms"]]
    assert names == ["twice", "twin", "unsaved", "cut", "resumed", "second resume", "written", *ELSEWHERE]


@pytest.mark.parametrize(
    ("fault", "arm", "sentence"),
    [
        (only("unsaved", "step", PARAM, plus, 2), "unsaved", "A run that saves goes on differently from one that does"),
        (saving_changes_the_rate, "unsaved", "Saving changed setting group0.lr from 0.1 to 0.3."),
        (only("resumed", "load", MOMENT, plus), "resumed", "Right after the load exp_avg of w differs"),
        (only("resumed", "load", LR, lambda _: "0.3"), "resumed", "setting group0.lr is 0.3, and should be 0.1"),
        (only("resumed", "step", PARAM, plus, 2), "resumed", "After the load all that is compared is equal, but"),
        (only("resumed", "step", COUNT, plus, 3), "resumed", "step of w is 5.0, and should be 4.0"),
        (only("second resume", "load", MOMENT, plus), "second resume", "loads what it saved after 3 updates does not"),
        (only("second resume", "step", PARAM, plus, 3), "second resume", "Look at what a resumed run counts"),
        (only("used", "load", MOMENT, plus), "used", "left with something of its own: exp_avg of w differs"),
        (only("used", "step", PARAM, plus, 3), "used", "left with something of its own: "),
        (only("resumed", "save", MOMENT, plus), "again", "What is saved right after a load is not what was loaded"),
        (only("resumed", "save", MOMENT, plus), "unsaved", "Saving changed exp_avg w from "),
        (only("other mesh 4", "load", PARAM, plus), "other mesh 4", "Loaded on mesh 4, param of w differs"),
        (only("other mesh 1", "load", COUNT, gone), "other mesh 1", "step of w is not there."),
        (only("altered lr", "load", LR, lambda _: "0.1"), "altered lr", "The run's lr is declared to win, and the "),
    ],
)  # fmt: skip
def test_a_fault_is_seen_by_its_arm(folder: Path, fault: Fault, arm: str, sentence: str) -> None:
    found = judged(folder, fault)
    assert found["verdict"] == "mismatch"
    assert found["differences"]
    assert sentence in failed(found)[arm]


@pytest.mark.parametrize("kind", ["load", "step"])
def test_a_generator_that_is_elsewhere_is_a_note_where_nothing_depends_on_it(folder: Path, kind: str) -> None:
    """As of a DataLoader that a resumed run makes once more, which draws a seed for itself."""
    found = judged(folder, only("resumed", kind, RNG, plus, 2))
    assert "resumed" not in failed(found)
    assert "all that later steps make is the same: rng of rank0.cpu" in str(found["arms"])


@pytest.mark.parametrize(("kind", "made"), [("resumed", "1 of 2"), ("second resume", "0 of 1")])
def test_a_resumed_run_that_ends_early_is_a_failure_of_its_own(folder: Path, kind: str, made: str) -> None:
    class Short(Simulation):
        def observed(self, session: Session) -> Iterator[tuple[Op, State]]:
            *early, last = super().observed(session)
            yield from early
            yield last if session.kind != kind else (last[0], {})

    found = Short(simulation(folder, methods=FIT).scenario).judged(folder)
    assert found["verdict"] == "mismatch"
    assert f"The run ends after {made} updates, without an error: step 3 is not made" in failed(found)[kind]


def test_a_generator_that_the_last_step_leaves_elsewhere_may_have_an_effect(folder: Path) -> None:
    assert judged(folder, only("resumed", "step", RNG, plus, 3))["verdict"] == "mismatch"


@pytest.mark.parametrize(
    ("tie", "verdict", "sentence"),
    [
        (lambda op: "one", "pass", ""),
        (lambda op: "two" if (op.arm, op.kind) == ("resumed", "load") else "one", "mismatch",
         "After `load` in resumed, w and v are two parameters of different values; `tied` says that they are one."),
        (lambda op: "not here", "unknown", "`tied` names v, and no parameter is called so."),
    ],
)  # fmt: skip
def test_names_of_one_parameter_are_looked_at_after_each_operation(
    folder: Path, tie: Any, verdict: str, sentence: str
) -> None:
    simulated = simulation(folder)
    simulated.tie = tie
    arms = {arm["name"]: arm for arm in simulated.judged(folder)["arms"]}
    assert arms["tied"]["verdict"] == verdict
    assert arms["tied"]["sentence"].startswith(sentence)


def test_a_run_that_is_not_the_same_twice_is_told_first_and_nothing_else_is_claimed_of_it(folder: Path) -> None:
    found = judged(folder, only("twice", "step", MOMENT, plus, 1))
    assert list(failed(found)) == ["twice"]
    assert found["verdict"] == "nondeterministic"
    assert "differ after step 1 in exp_avg of w" in failed(found)["twice"]


def test_what_is_steady_is_still_compared(folder: Path) -> None:
    def fault(session: Session, op: Op, state: State) -> None:
        only("twice", "step", MOMENT, plus, 1)(session, op, state)
        only("resumed", "load", LR, lambda _: "0.3")(session, op, state)

    found = judged(folder, fault)
    assert {"twice", "resumed"} <= failed(found).keys()
    assert "exp_avg" not in failed(found)["resumed"]


def test_an_optimizer_that_is_not_restored_starts_again_at_step_1(folder: Path) -> None:
    def fault(session: Session, op: Op, state: State) -> None:
        only("resumed", "load", MOMENT, gone)(session, op, state)
        only("resumed", "load", COUNT, gone)(session, op, state)

    sentence = failed(judged(folder, fault))["resumed"]
    assert sentence == (
        "After the resume the optimizer starts again at step 1: `load` restored no optimizer state (exp_avg, step of w "
        "are missing)."
    )


def test_a_load_of_what_is_there_already_says_nothing(folder: Path) -> None:
    class Blind(Simulation):
        def build(self, session: Session, op: Op, state: State) -> None:
            super().build(session, op, state)
            state[PARAM] = np.ones(8, np.float32)

        def step(self, session: Session, op: Op, state: State) -> None:
            state[COUNT] = np.float32(state.get(COUNT, 0.0) + 1)

    made = simulation(folder)
    found = Blind(made.scenario).judged(folder)
    assert failed(found)["cold"] == wording.BLIND
    assert next(arm for arm in found["arms"] if arm["name"] == "cold")["verdict"] == "unknown"


def test_a_run_that_stops_early_is_the_beginning_of_the_longer_one(folder: Path) -> None:
    found = judged(folder, only("cut", "step", LR, lambda _: "0.05", 1), methods=FIT)
    assert "is not the beginning of the longer one: setting group0.lr differs." in failed(found)["cut"]


def test_a_resumed_fit_is_compared_after_its_first_step(folder: Path) -> None:
    found = judged(folder, only("resumed", "step", PARAM, plus, 2), methods=FIT)
    assert failed(found)["resumed"].startswith("After step 2 of the resumed run ")


def test_live_state_in_no_file_is_told(folder: Path) -> None:
    class Forgets(Simulation):
        def write_checkpoints(self, where: Path) -> None:
            for kept in self.saved.values():
                kept.pop(MOMENT)
            super().write_checkpoints(where)

    found = Forgets(simulation(folder).scenario).judged(folder)
    told = failed(found)["written"]
    assert told.startswith("`save` leaves all state of the optimizer out of the checkpoint: the bytes that were live")


def test_an_empty_folder_is_told(folder: Path) -> None:
    class Elsewhere(Simulation):
        def write_checkpoints(self, where: Path) -> None:
            for number in self.saved:
                (where / f"checkpoint{number}").mkdir()

    found = Elsewhere(simulation(folder).scenario).judged(folder)
    assert failed(found)["written"] == wording.EMPTY


def test_files_of_an_unknown_format_are_not_compared_again(folder: Path) -> None:
    class Odd(Simulation):
        def write_checkpoints(self, where: Path) -> None:
            for number, kept in self.saved.items():
                (where / f"checkpoint{number}").mkdir()
                text = b"odd" + b"".join(np.asarray(value).tobytes() for key, value in kept.items() if key != LR)
                (where / f"checkpoint{number}" / "a.odd").write_bytes(text)

    found = Odd(simulation(folder).scenario).judged(folder)
    again = next(arm for arm in found["arms"] if arm["name"] == "again")
    assert again["verdict"] == "unsupported"
    assert "no reader takes these files as one checkpoint" in again["sentence"]


@pytest.mark.parametrize("wins", ["run", "checkpoint"])
@pytest.mark.parametrize("comes_out", ["run", "checkpoint"])
def test_the_setting_that_is_declared_to_win_wins(folder: Path, wins: str, comes_out: str) -> None:
    made = simulation(folder, wins=wins)
    found = Simulation(made.scenario, wins=comes_out).judged(folder)
    assert (failed(found).keys() == {"altered lr"}) is (wins != comes_out)


def test_a_frozen_parameter_that_each_build_makes_otherwise_is_told(folder: Path) -> None:
    """As a head that an adapter was to train, beside a base that was read from a file."""
    base, head = ("param", "base"), ("param", "head")

    def fault(session: Session, op: Op, state: State) -> None:
        if op.kind == "build":
            state[base], state[head] = np.ones(2, np.float32), np.full(2, op.init_seed, np.float32)

    made = simulation(folder, fault)
    made.gradients = {"w": "gradient", "base": "frozen", "head": "frozen"}
    notes = [note for arm in made.judged(folder)["arms"] if arm["name"] == "trains" for note in arm["notes"]]
    assert any(note.startswith("head is frozen, and each build makes it otherwise") for note in notes)


def test_what_a_save_keeps_for_itself_is_told_and_no_change(folder: Path) -> None:
    kept = ("extra_state", "written")

    def fault(session: Session, op: Op, state: State) -> None:
        if op.kind == "save":
            state[kept] = np.ones(2, np.float32)

    found = judged(folder, fault)
    arm = next(arm for arm in found["arms"] if arm["name"] == "unsaved")
    assert (arm["verdict"], arm["notes"]) == (
        "pass", ["not compared, since it is there in a run that saves alone: written"]
    )  # fmt: skip


@pytest.mark.parametrize("name", [PARAM, MOMENT])
def test_another_value_of_a_setting_changes_no_weights_and_no_moments(folder: Path, name: tuple[str, str]) -> None:
    found = failed(judged(folder, only("altered lr", "load", name, plus)))
    assert found.keys() == {"altered lr"}
    assert found["altered lr"].startswith("A run with another lr loads other weights or state than a run with the same")


def test_what_a_build_makes_of_the_setting_and_no_load_changes_is_no_weight_that_is_lost(folder: Path) -> None:
    buffer, scale = ("buffer", "angles"), ("param", "scale")

    def fault(session: Session, op: Op, state: State) -> None:
        if op.kind in ("build", "load"):
            made = np.full(2, 2.0 if session.kind == "altered" else 1.0, np.float32)
            state[buffer], state[scale] = made, made

    assert not failed(judged(folder, fault))


def test_a_load_that_is_to_refuse_passes_by_its_error_and_fails_without_one(folder: Path) -> None:
    made = simulation(folder, wins="refuse")
    session = next(each for each in sessions_of(made.scenario) if each.name == "altered lr")
    error = {"type": "ValueError", "message": "lr is 0.1 in the checkpoint\nand 0.2 here", "rank": 0}

    def judged_with(failures: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
        (folder / name).mkdir()
        return Simulation(made.scenario).judged(folder / name, failures)

    found = judged_with({"altered lr": {**error, "op": session.first("load")}}, "raised")
    assert not failed(found)
    arm = next(arm for arm in found["arms"] if arm["name"] == "altered lr")
    assert arm["notes"] == [
        "`load` refuses a checkpoint of a run with another lr: ValueError: lr is 0.1 in the checkpoint"
    ]
    assert failed(judged_with(None, "taken")) == {"altered lr": altered_arm.takes_what_it_should_refuse("lr")}
    late = judged_with({"altered lr": {**error, "op": session.first("step")}}, "late")
    assert "ValueError" in failed(late)["altered lr"], "a step behind the load is no refusal"
    assert "altered lr" in failed(judged_with({"altered lr": {**error, "type": "killed"}}, "killed"))


def test_what_is_saved_again_is_evidence_of_its_own(folder: Path) -> None:
    found = judged(folder, only("resumed", "save", MOMENT, plus))
    told = [(each["where"], each["kind"]) for each in found["differences"]]
    assert ("written", "bits") in told


def test_an_altered_axis_without_effect_is_unknown(folder: Path) -> None:
    found = judged(folder, only("altered lr", "build", LR, lambda _: "0.1"))
    assert failed(found) == {"altered lr": altered_arm.nothing_altered("lr")}
    assert found["verdict"] == "unknown"


def test_a_setting_that_is_neither_sides_tells_of_no_winner(folder: Path) -> None:
    found = judged(folder, only("altered lr", "load", LR, lambda _: "0.3"))
    assert failed(found) == {"altered lr": altered_arm.neither([LR], "lr")}
    assert found["verdict"] == "unknown"


def test_generators_from_which_nothing_is_drawn_need_not_come_back(folder: Path) -> None:
    made = simulation(folder)
    found = Simulation(made.scenario, only("resumed", "load", RNG, plus), draws=False).judged(folder)
    assert "resumed" not in failed(found)
    assert "cpu" in next(arm for arm in found["arms"] if arm["name"] == "resumed")["notes"][0]


def test_with_exact_gradients_steps_on_other_meshes_are_compared(folder: Path) -> None:
    fault = only("other mesh 4", "step", PARAM, plus, 3)
    assert failed(judged(folder, fault)) == {}
    for file in (path for path in folder.iterdir() if path.is_dir()):
        shutil.rmtree(file)
    made = simulation(folder, fault)
    made.notes = (wording.PROBED,)
    assert list(failed(made.judged(folder))) == ["other mesh 4"]


def last_bit(value: Any) -> Any:
    return np.nextafter(value, np.float32(9))


@pytest.mark.parametrize(
    ("kind", "change", "steps_alone", "sentence"),
    [
        ("step", last_bit, False, ""),
        ("step", last_bit, True, "After a load on mesh 4, steps come to other values than on the mesh that saved"),
        ("step", plus, False, "After a load on mesh 4, steps come to other values than on the mesh that saved"),
        ("load", last_bit, False, "Loaded on mesh 4, param of w differs from what was saved."),
    ],
)
def test_another_mesh_may_round_otherwise_in_a_step_unless_each_element_is_stepped_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: Any, steps_alone: bool, sentence: str
) -> None:
    def stepped(*_: Any) -> Iterator[Any]:
        if not steps_alone:
            raise NoTwin("Muon is no optimizer of torch.optim that treats every element alone")
        yield from ()

    monkeypatch.setattr(judge, "stepped", stepped)
    made = simulation(folder, only("other mesh 4", kind, PARAM, change, 3 if kind == "step" else -1))
    made.notes = (wording.PROBED,)
    told = {arm["name"]: arm for arm in made.judged(folder)["arms"]}["other mesh 4"]
    assert told["sentence"].startswith(sentence)
    assert told["verdict"] == ("mismatch" if sentence else "pass")
    assert any(note.startswith(wording.ROUNDED) for note in told["notes"]) is (not sentence)


@pytest.mark.parametrize(
    ("one", "other"), [(0x7FC00000, 0x7FC00001), (0x7FC00000, 0xFFC00000), (0x00000000, 0x80000000)]
)
def test_nan_payloads_and_signs_of_zero_count(folder: Path, one: int, other: int) -> None:
    def fault(session: Session, op: Op, state: State) -> None:
        if op.kind in ("save", "load"):
            bits = other if (session.kind, op.kind) == ("resumed", "load") else one
            state[MOMENT].view(np.uint32)[3] = bits

    assert "Right after the load exp_avg of w differs" in failed(judged(folder, fault))["resumed"]


def test_ranks_that_disagree_are_told(folder: Path) -> None:
    class Apart(Simulation):
        def blob(self, op: Op, rank: int, state: State) -> bytes:
            if rank and op.kind == "step" and op.iteration == 1:
                state = state | {PARAM: plus(state[PARAM])}
            return super().blob(op, rank, state)

    found = Apart(simulation(folder).scenario).judged(folder)
    told = failed(found)["ranks agree"]
    assert told.startswith("The ranks do not have the same param of w, in uninterrupted after step 1: ")


def test_a_plain_value_is_told_as_each_rank_has_it_and_is_there(folder: Path) -> None:
    class Early(Simulation):
        def blob(self, op: Op, rank: int, state: State) -> bytes:
            if rank and (op.arm, op.kind) == ("resumed", "load"):
                state = state | {LR: "0.25"}
            return super().blob(op, rank, state)

    found = failed(Early(simulation(folder).scenario).judged(folder))
    told = "The ranks do not have the same setting group0.lr, in resumed after `load`: "
    assert found["ranks agree"].startswith(f"{told}0.1 on rank 0, 0.25 on rank 1.")
    assert found["resumed"] == wording.SAME_AS_AGREE
    assert "is not there" not in " ".join(found.values())


def test_a_copy_that_no_resume_compares_is_noted(folder: Path) -> None:
    class OwnRate(Simulation):
        def blob(self, op: Op, rank: int, state: State) -> bytes:
            if rank and op.arm == "uninterrupted" and op.kind in ("step", "save"):
                state = state | {LR: "0.25"}
            return super().blob(op, rank, state)

    found = {arm["name"]: arm for arm in OwnRate(simulation(folder).scenario).judged(folder)["arms"]}
    assert found["resumed"]["verdict"] == "pass"
    told = "ranks have it differently: setting group0.lr; only the copy that most ranks have is compared"
    assert f"not compared, since {told}" in found["resumed"]["notes"]


@pytest.mark.parametrize(("of", "hint"), [("", ""), (OF_BEFORE, f". {MADE_TOO_EARLY}")])
def test_a_crash_of_an_optimizer_made_too_early_says_so(folder: Path, of: str, hint: str) -> None:
    error = {"type": "KeyError", "message": "0", "rank": 0, "traceback": "", "op": 3}
    seen = simulation(folder)
    seen.notes = (f"found: optimizer: optimizer, AdamW, 1 group{of}",)
    told = failed(seen.judged(folder, {"uninterrupted": error}, written=True))["uninterrupted"]
    assert told == f"KeyError on rank 0: 0{hint}"


def test_a_trainer_without_state_is_unknown(folder: Path) -> None:
    class Empty(Simulation):
        def blob(self, op: Op, rank: int, state: State) -> bytes:
            return super().blob(op, rank, {RNG: state[RNG]})

    found = Empty(simulation(folder).scenario).judged(folder)
    assert failed(found) == {"uninterrupted": wording.NO_STATE}
    assert found["verdict"] == "unknown"


def test_what_the_ranks_have_differently_is_told_once(folder: Path) -> None:
    class Apart(Simulation):
        def blob(self, op: Op, rank: int, state: State) -> bytes:
            return super().blob(op, rank, state | ({PARAM: state[PARAM] + np.float32(rank)} if rank else {}))

    fault = only("resumed", "step", PARAM, plus, 2)
    found = failed(Apart(simulation(folder).scenario, fault).judged(folder))
    assert found["ranks agree"].startswith("The ranks do not have the same param of w")
    assert found["resumed"] == wording.SAME_AS_AGREE


def test_a_value_that_a_step_makes_anew_is_not_missed_right_after_a_load(folder: Path) -> None:
    loss = ("extra_state", "metrics.loss")

    def fault(session: Session, op: Op, state: State) -> None:
        state.pop(loss, None) if op.kind in ("build", "load") else state.update({loss: str(op.iteration)})
        if (session.name, op.kind, op.iteration) == ("used", "step", 2):
            state[loss] = "7"

    arms = {arm["name"]: arm for arm in judged(folder, fault, program="arms resumed used")["arms"]}
    assert arms["resumed"]["verdict"] == "pass"
    told = "not compared right after the load, since no checkpoint need hold it: metrics.loss"
    assert told in arms["resumed"]["notes"]
    assert "metrics.loss is 7, and in the fresh one 2" in arms["used"]["sentence"]


class Cached(Simulation):
    """Loads what the first load of a folder read. given: what else a load does to the state."""

    def __init__(self, folder: Path, given: Any = nothing) -> None:
        super().__init__(simulation(folder, program="arms used").scenario)
        self.kept: dict[tuple[int, int], State] = {}
        self.given = given

    def load(self, session: Session, op: Op, state: State) -> None:
        kept = self.kept.setdefault((op.session, op.checkpoint), copy.deepcopy(self.saved[op.checkpoint]))
        state.clear()
        state |= copy.deepcopy(kept)
        self.given(session, op, state)


@pytest.mark.parametrize(("word", "seeded"), [("frozen", False), ("frozen", True), ("gradient", False)])
def test_a_frozen_base_that_every_build_makes_alike_need_not_be_saved(folder: Path, word: str, *, seeded: bool) -> None:
    base = ("param", "base")

    class Adapter(Simulation):
        def build(self, session: Session, op: Op, state: State) -> None:
            super().build(session, op, state)
            state[base] = np.linspace(3, 4, 8, dtype=np.float32) + np.float32(op.init_seed * seeded)

        def load(self, session: Session, op: Op, state: State) -> None:
            kept = state[base]
            super().load(session, op, state)
            state[base] = kept

        def write_checkpoints(self, folder: Path) -> None:
            self.saved = {number: {key: value for key, value in saved.items() if key != base}
                          for number, saved in self.saved.items()}  # fmt: skip
            super().write_checkpoints(folder)

    adapter = Adapter(simulation(folder, program="arms resumed").scenario)
    adapter.gradients = {"w": "gradient", "base": word}
    (arm,) = (arm for arm in adapter.judged(folder)["arms"] if arm["name"] == "written")
    if word == "frozen" and not seeded:
        told = "`save` leaves a frozen parameter out of the checkpoint, which two builds with other seeds make alike"
        assert (arm["verdict"], arm["notes"][-1]) == ("pass", f"{told}: base")
    else:
        assert (arm["verdict"], "leaves param of base out" in arm["sentence"]) == ("mismatch", True)


def test_a_second_load_in_one_process_that_gives_the_first_is_told(folder: Path) -> None:
    told = failed(Cached(folder).judged(folder))
    assert list(told) == ["used"]
    assert told["used"].startswith(
        "The second load in the same process gave what the first had loaded (the state after step 3), though the folder"
        " was written again since: something keeps the file's old content, such as a cache by its name. "
    )


def test_a_second_load_that_gives_something_else_is_told(folder: Path) -> None:
    fault = only("used", "load", MOMENT, plus, 5)
    told = failed(judged(folder, fault, program="arms used"))
    assert told["used"].startswith("After a second load in the same process, of a folder that was written again since")


def test_what_a_loader_says_after_a_second_load_is_no_difference_since_no_step_follows(folder: Path) -> None:
    place = ("extra_state", "loader.sampler.epoch")

    class Loading(Simulation):
        def build(self, session: Session, op: Op, state: State) -> None:
            super().build(session, op, state)
            state[place] = np.zeros(1, np.float32)

    fault = only("used", "load", place, plus, 5)
    scenario = simulation(folder, program="arms used").scenario
    assert failed(Loading(scenario, fault).judged(folder)) == {}


def test_what_no_load_restores_is_nothing_that_a_second_one_forgets(folder: Path) -> None:
    assert failed(judged(folder, only("used", "load", MOMENT, plus, 4), program="arms used")) == {}


@pytest.mark.parametrize("loud", [True, False])
def test_a_save_that_refuses_a_folder_with_a_checkpoint_is_no_failure(folder: Path, loud: bool) -> None:
    cached = Cached(folder)
    again = [op.index for session in sessions_of(cached.scenario) for op in session.ops if op.kind == "save"][-1]
    error = {"type": "FileExistsError", "message": "it is there", "rank": 0, "op": again}
    cached.notes = () if loud else (wording.LEFT_AS_IT_IS,)
    arms = {arm["name"]: arm for arm in cached.judged(folder, {"used": error} if loud else None, written=True)["arms"]}
    assert arms["used"]["verdict"] == "pass"
    why = "refuses or removes a folder that has a checkpoint (FileExistsError)" if loud else "leaves a folder as it is"
    assert why in arms["used"]["notes"][0]


def test_a_trainer_that_trains_nothing_is_unknown(folder: Path) -> None:
    class Idle(Simulation):
        def blob(self, op: Op, rank: int, state: State) -> bytes:
            return super().blob(op, rank, state | {PARAM: np.ones_like(state[PARAM])})

    found = Idle(simulation(folder).scenario).judged(folder)
    assert found["verdict"] == "unknown"
    assert failed(found)["trains"].startswith("No parameter has changed in 4 steps")


def test_steps_that_move_nothing_after_the_save_are_no_pass(folder: Path) -> None:
    class Idle(Simulation):
        def step(self, session: Session, op: Op, state: State) -> None:
            kept = state[PARAM]
            super().step(session, op, state)
            state[PARAM] = kept if op.iteration > 1 else state[PARAM]

    found = Idle(simulation(folder).scenario).judged(folder)
    assert found["verdict"] == "unknown"
    assert failed(found)["trains"].startswith("No parameter changes in the 2 steps after the save")


def test_parameters_that_are_no_numbers_are_no_pass(folder: Path) -> None:
    class Nan(Simulation):
        def step(self, session: Session, op: Op, state: State) -> None:
            super().step(session, op, state)
            state[PARAM] = state[PARAM] * np.float32("nan") if op.iteration > 2 else state[PARAM]

    found = Nan(simulation(folder).scenario).judged(folder)
    assert found["verdict"] == "mismatch"
    assert failed(found)["trains"].startswith("w ends as NaN or infinity")
    assert failed(found)["trains"].endswith("one, and no state of the optimizer has: look at what the step divides by.")


@pytest.mark.parametrize(("word", "verdict"), [("stepped although frozen", "mismatch"), ("frozen", "pass")])
def test_a_frozen_parameter_that_moves_is_a_failure_where_an_optimizer_steps_it(
    folder: Path, word: str, verdict: str
) -> None:
    made = simulation(folder)
    made.gradients = {"w": word, "v": "gradient"}
    trains = next(arm for arm in made.judged(folder)["arms"] if arm["name"] == "trains")
    assert trains["verdict"] == verdict
    assert "w is frozen (`requires_grad` is False)" in "".join([trains["sentence"], *trains["notes"]])


def test_a_generator_that_every_step_seeds_anew_need_not_be_restored(folder: Path) -> None:
    class Seeds(Simulation):
        def step(self, session: Session, op: Op, state: State) -> None:
            super().step(session, op, state)
            state[RNG] = np.arange(8, dtype=np.uint8) * np.uint8(op.iteration + 3)

        def load(self, session: Session, op: Op, state: State) -> None:
            kept = state[RNG]
            super().load(session, op, state)
            state[RNG] = kept

    arms = {arm["name"]: arm for arm in Seeds(simulation(folder).scenario).judged(folder)["arms"]}
    assert arms["resumed"]["verdict"] == "pass"
    assert "or every step seeds them anew: rank0.cpu" in arms["resumed"]["notes"][0]


def test_parameters_that_never_move_are_named_beside_a_pass(folder: Path) -> None:
    class Half(Simulation):
        def build(self, session: Session, op: Op, state: State) -> None:
            super().build(session, op, state)
            state["param", "still"] = np.ones(8, np.float32)

    arms = {arm["name"]: arm for arm in Half(simulation(folder).scenario).judged(folder)["arms"]}
    assert arms["trains"]["verdict"] == "pass"
    assert arms["trains"]["notes"][0].startswith("1 of 2 parameters never change, ")
    assert (
        "still; no optimizer steps them, they are frozen, no gradient reaches them, or, in"
        in arms["trains"]["notes"][0]
    )


@pytest.mark.parametrize(
    ("session", "error", "verdict", "sentence"),
    [
        ("resumed", {"type": "ValueError", "message": "no\nmore", "rank": 1}, "crash", "ValueError on rank 1: no more"),
        ("used", {"type": "deadline", "message": "30 s"}, "hang", "The ranks did not come to an end: 30 s."),
        ("uninterrupted", {"type": "Unsupported", "message": "no such thing"}, "unsupported", "no such thing"),
        ("other mesh 4", {"type": "Unsupported", "message": "no four"}, "pass", "no four"),
    ],
)
def test_a_session_that_fails_gives_its_arm_a_verdict(
    folder: Path, session: str, error: dict[str, Any], verdict: str, sentence: str
) -> None:
    found = simulation(folder).judged(folder, {session: error})
    assert found["verdict"] == verdict
    assert failed(found)[session] == sentence


# Rounding

BASE = np.linspace(1, 2, 8, dtype=np.float32)
KEY = Key(0, "live", "param", "w")


def is_rounded(other: np.ndarray[Any, Any], ranks: int, dtype: str = "fp32", kind: str = "bits") -> bool:
    one, two = ({("param", "w"): Value(dtype, (8,), array.tobytes())} for array in (BASE, other))
    return rounded(Difference(KEY, kind, total=8, mismatched=1), one, two, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_one_or_two_ranks_nothing_is_rounding(ranks: int) -> None:
    assert not is_rounded(np.nextafter(BASE, np.float32(9)), ranks)


def test_on_three_ranks_only_tiny_differences_are() -> None:
    largest = float(BASE.max())
    assert is_rounded(np.nextafter(BASE, np.float32(9)), 3)
    assert is_rounded(BASE - np.float32(0.9 * ROUNDING * largest), 3)
    assert not is_rounded(BASE - np.float32(1.1 * ROUNDING * largest), 3)
    assert not is_rounded(np.where(np.arange(8) == 2, np.float32(np.nan), BASE), 3)
    assert not is_rounded(np.where(np.arange(8) == 2, np.float32(np.inf), BASE), 3)


def test_what_is_no_float_or_no_difference_of_bits_is_never_rounding() -> None:
    assert not is_rounded(BASE.view(np.int32) + 1, 3, dtype="int32")
    assert not is_rounded(BASE, 3, kind="missing")
    assert as_numbers(Value("fp32", (8,), BASE.tobytes())).tolist() == BASE.tolist()


@pytest.mark.parametrize(("mesh", "passes"), [("2", False), ("4", True)])
def test_a_step_that_rounds_is_forgiven_on_four_ranks_and_noted(folder: Path, mesh: str, *, passes: bool) -> None:
    trainer = registered(folder, DATA % "run")

    def ulp(value: Any) -> Any:
        return np.nextafter(value, np.float32(np.inf))

    scenario = scenario_of(trainer, {"mesh": mesh}, program="arms 2 2 resumed")
    found = Simulation(scenario, only("resumed", "step", PARAM, ulp, 2)).judged(folder)
    assert ("resumed" not in failed(found)) is passes
    notes = next(arm for arm in found["arms"] if arm["name"] == "resumed")["notes"]
    assert (wording.ROUNDING in notes) is passes


def test_a_save_that_changes_a_last_bit_is_never_rounding(folder: Path) -> None:
    trainer = registered(folder, DATA % "run")

    def ulp(value: Any) -> Any:
        return np.nextafter(value, np.float32(np.inf))

    scenario = scenario_of(trainer, {"mesh": "4"}, program="arms 2 2 unsaved")
    found = Simulation(scenario, only("unsaved", "step", PARAM, ulp, 2)).judged(folder)
    assert list(failed(found)) == ["unsaved"]  # both ran alike up to the save, so that their sums have one order


def test_a_load_that_does_nothing_is_a_failure_and_no_doubt(folder: Path) -> None:
    trainer = registered(folder, DATA % "run")
    scenario = scenario_of(trainer, {"mesh": "2"}, program="arms 2 2 resumed")
    simulated = Simulation(scenario, only("resumed", "load", PARAM, plus))
    found = simulated.judged(folder)
    assert found["verdict"] == "mismatch"
    assert next(arm for arm in found["arms"] if arm["name"] == "cold")["verdict"] == "pass"


@pytest.mark.parametrize("explains", ["judging.mechanism", "saved_and_loaded.of_setting"])
def test_an_explanation_that_raises_takes_no_verdict_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch, explains: str
) -> None:
    def raises(*_: object) -> str:
        raise ValueError("nothing to join")

    monkeypatch.setattr(f"shardproof.trainer.judge.{explains}", raises)
    trainer = registered(folder, DATA % "run")
    scenario = scenario_of(trainer, {"mesh": "2"}, program="arms 2 2 resumed")
    found = failed(Simulation(scenario, only("resumed", "load", PARAM, plus)).judged(folder))
    assert "shardproof raised ValueError in test_trainer_judge.py" in found["resumed"]


@pytest.mark.parametrize(
    ("session", "verdict"), [("used", "mismatch"), ("second resume", "mismatch"), ("none", "pass")]
)
def test_a_random_state_without_effect_hides_nothing_that_a_later_session_computes(
    folder: Path, session: str, verdict: str
) -> None:
    """`second resume` has one step here, which could not show that the random state has no effect."""

    def fault(each: Session, op: Op, state: State) -> None:
        if each.name != "uninterrupted" and op.kind == "load":
            state[RNG] = state[RNG] + np.uint8(7)
        if (each.name, op.kind, op.iteration) == (session, "step", 3):
            state[PARAM] = state[PARAM] + np.float32(1)

    found = {arm["name"]: arm["verdict"] for arm in judged(folder, fault, program="arms 2 2")["arms"]}
    assert found["resumed"] == "pass"
    assert found.get(session, found["used"]) == verdict
    others = {"used", "second resume"} - {session}
    assert {found[name] for name in others} == {"pass"}
