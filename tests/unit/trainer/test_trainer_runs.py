"""Trainers with one mistake each, run by the command: the verdict and the sentence of each arm.

Each file is run once, with all of its cells; the tests read what the command wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import PYTHONPATH, ROOT

pytestmark = pytest.mark.real
FIRST = "first"


def ran(folder: Path, name: str, *words: str) -> dict[str, dict[str, Any]]:
    """The results of a file of `tests/trainers`, by the options of their cells."""
    written = folder / "found.json"
    command = [sys.executable, "-m", "shardproof", "trainer", str(ROOT / f"tests/trainers/{name}.py"), "--out",
               str(folder / "out"), "--json", str(written), "-j", "2", "-q", *words]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    subprocess.run(command, env=environment, cwd=folder, timeout=300, capture_output=True, check=False)
    results = json.loads(written.read_text("utf-8"))["results"]
    return {dict(result["scenario"]).get("options") or FIRST: result for result in results}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return ran(tmp_path_factory.mktemp("plain"), "plain_ddp", "--set", "lr=0.01", "--deadline-s", "6")


def failed(result: dict[str, Any]) -> dict[str, str]:
    """Arms that do not pass → what they say; without `twin`, which only models of `self.probe` have."""
    return {arm["name"]: arm["sentence"] for arm in result["arms"]
            if arm["verdict"] != "pass" and (arm["name"], arm["verdict"]) != ("twin", "unsupported")}  # fmt: skip


def test_a_sound_trainer_passes_every_arm(plain: dict[str, dict[str, Any]]) -> None:
    assert (plain[FIRST]["verdict"], failed(plain[FIRST]), len(plain[FIRST]["arms"])) == ("pass", {}, 10)


@pytest.mark.parametrize(
    ("what", "verdict", "arm", "sentence"),
    [
        ("forgets", "mismatch", "resumed", "After the resume the optimizer starts again at step 1"),
        ("forgets", "mismatch", "used", "left with something of its own"),
        ("forgets", "mismatch", "again", "What is saved right after a load is not what was loaded"),
        ("scales", "mismatch", "unsaved", "Saving changed scaler scaler.scale from 4096.0 to 2048.0."),
        ("hangs", "hang", "uninterrupted", "The ranks did not come to an end in step (plain_ddp.py, line "),
        ("refuses", "unsupported", "uninterrupted", "this stack has no such thing"),
        ("keeps_lr", "mismatch", "altered lr", "The run's lr is declared to win, and the checkpoint's came out"),
    ],
)
def test_a_mistake_is_told(plain: dict[str, dict[str, Any]], what: str, verdict: str, arm: str, sentence: str) -> None:
    result = plain[f"what={what}"]
    assert result["verdict"] == verdict
    assert sentence in failed(result)[arm]


def test_what_a_step_does_is_measured(tmp_path: Path) -> None:
    found = ran(tmp_path, "measured_steps", "--program", "arms 1 1 resumed")
    assert failed(found[FIRST]) == {}
    (gradients,) = (line for line in found[FIRST]["state"] if line.startswith("measured: step 0: gradients: "))
    assert gradients.endswith(" and 0.1 when the optimizer steps")
    assert "measured: step 0: order: 2 backwards, and 1 step of AdamW" in found[FIRST]["state"]
    assert failed(found["what=own_norm"])["trains"].startswith("Between the backward and the optimizer each rank")
    assert failed(found["what=window"])["resumed"].startswith(
        "When the run saves, 4 parameters, such as 0.bias, have a gradient that no optimizer has stepped with yet, as "
    )


def test_where_two_runs_part_is_told_line_by_line(tmp_path: Path) -> None:
    found = ran(tmp_path, "counts_for_itself", "--set", "parts=1", "--program", "arms 2 1 resumed")
    file = "counts_for_itself.py"
    assert failed(found[FIRST])["resumed"].splitlines()[1] == (
        f"Line by line, the two part at {file}:16 (`rows = self.rows[self.position : self.position + 4]`) in step 2, "
        "on rank 0: it reads `self.position`, which is 8 in the run without a break and 0 in the resumed one. In the "
        f"run without a break {file}:17 (`self.position += 4`) set it last, in step 1; in the resumed one {file}:34 "
        "(`self.data.position = 8 * cell.rank`) set it last, in `build`. No statement of yours in `load` assigns "
        "`position`."
    )
    assert f"at {file}:44 (`if not self.loaded:`) in step 2" in failed(found["what=turn"])["resumed"]
    assert f"measured: step 0: line: {file}:46 (`self.optimizer.step()`) writes 2 parameters" in found[FIRST]["state"]


@pytest.mark.nightly
def test_whose_state_is_saved_and_loaded_is_told(tmp_path: Path) -> None:
    found = ran(tmp_path, "saves_another", "--program", "arms 2 1 resumed")
    schedule, optimizer, stale = (
        failed(found[cell])["resumed"].splitlines()[1] for cell in (FIRST, "what=optimizer", "what=stale")
    )
    assert schedule == (
        "`save` asks `schedule` (ExponentialLR) for a `state_dict`, and `load` gives none to it. Of the checkpoint's "
        "files `load` does not open schedule.pt. In `load`, this never holds: saves_another.py:51 (`if self.cell.what "
        "== \"stale\":`), which read `self.cell.what` = 'schedule'; saves_another.py:53 (`if self.cell.what != "
        "\"schedule\":`), which read `self.cell.what` = 'schedule'."
    )
    assert optimizer == (
        "`save` asks `optimizer` (Adam) for a `state_dict`, which has not stepped; what steps is `loop.optimizer` "
        "(Adam), another object, which it does not ask. In `load`, this never holds: saves_another.py:51 (`if "
        "self.cell.what == \"stale\":`), which read `self.cell.what` = 'optimizer'."
    )
    assert stale == (
        "`optimizer` and `schedule.optimizer` are one object when the run saves, and two after `load`; in `load` "
        "saves_another.py:52 (`self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)`) assigns it."
    )


@pytest.mark.nightly
def test_which_backward_is_averaged_is_told(tmp_path: Path) -> None:
    found = ran(tmp_path, "saves_another", "--set", "what=sync", "--program", "arms 1 0")["what=sync"]
    line = "saves_another.py:36 (`self.model(part).square().mean().backward()`)"
    told = [text for text in found["state"] if line in text]
    assert told[0].endswith("makes 2 gradients and changes 2 gradients and takes part in 1, 0 reductions, in turn")
    assert f"{line} takes part in 1, 0 reductions, in turn" in failed(found)["ranks agree"]


def test_two_ranks_are_held_against_one(tmp_path: Path) -> None:
    found = ran(tmp_path, "cuts_its_batch", "--set", "mesh=2", "--program", "arms 1 0")
    told = {cell: {arm["name"]: arm for arm in result["arms"]}["alike mesh"] for cell, result in found.items()}
    right, own, summed = (told[cell] for cell in ("mesh=2", "how=own_count+mesh=2", "how=not_scaled+mesh=2"))
    assert right["verdict"] == "pass"
    assert not [note for note in right["notes"] if "backward" in note]
    assert own["sentence"].startswith("The loss weighs samples otherwise: ")
    assert summed["verdict"] == "pass", "a clip hides it from the parameters"
    assert [note for note in summed["notes"] if "0.5 times as long as with mesh=1, which is one divided by" in note]


@pytest.mark.nightly
def test_sharded_stacks_that_are_sound_pass(tmp_path: Path) -> None:
    for cell, result in ran(tmp_path, "sharded_soundly", "--program", "arms 1 1 resumed used unsaved").items():
        assert (cell, result["verdict"], failed(result)) == (cell, "pass", {})


@pytest.mark.nightly
def test_a_stack_that_calls_cuda_runs_on_an_emulated_gpu_and_the_result_says_so(tmp_path: Path) -> None:
    (result,) = ran(tmp_path, "asks_for_cuda").values()
    assert (result["verdict"], failed(result)) == ("pass", {})
    assert result["emulated"] == ["CUDA device, whose pinned memory a forked process does not share"]


def test_state_that_cannot_be_read_is_listed(plain: dict[str, dict[str, Any]]) -> None:
    assert any(line.startswith("hidden: batches: loader, list_iterator") for line in plain["what=hides"]["state"])


@pytest.mark.nightly
def test_with_exact_gradients_other_meshes_pass_after_steps_too(tmp_path: Path) -> None:
    for result in ran(tmp_path, "probed_ddp", "--set", "gradients=mean").values():
        assert (result["verdict"], failed(result)) == ("pass", {})
        assert not [note for arm in result["arms"] if arm["name"].startswith("other mesh") for note in arm["notes"]]


@pytest.mark.nightly
def test_what_every_run_does_wrong_in_the_same_way_is_seen_by_the_twin(tmp_path: Path) -> None:
    words = ("--set", "mesh=2", "--program", "arms 1 1 uninterrupted twice")
    found = ran(tmp_path, "probed_ddp", *words)
    doubled, declined = found["gradients=doubled"], found["gradients=declined"]
    assert list(failed(doubled)) == ["twin"]
    assert "torch's optimizer on whole tensors, with the mean of the ranks' gradients" in failed(doubled)["twin"]
    assert (declined["verdict"], failed(declined)) == ("pass", {})
    twin = next(arm["sentence"] for arm in declined["arms"] if arm["name"] == "twin")
    assert twin.endswith("the trainer calls self.probe with twin=False")


@pytest.mark.nightly
def test_a_loop_that_forgets_the_random_state(tmp_path: Path) -> None:
    found = ran(tmp_path, "forgetful_fit")
    assert list(failed(found[FIRST])) == ["other mesh 1"]  # of which nothing is compared
    assert list(failed(found["forgets=true"])) == ["resumed", "other mesh 1"]
    assert "2 random states differ" in failed(found["forgets=true"])["resumed"]


def test_what_a_loop_does_behind_its_last_update_is_seen(tmp_path: Path) -> None:
    found = ran(tmp_path, "keeps_its_best", "--program", "arms 2 2 resumed")
    assert "resumed" not in failed(found[FIRST])
    told = failed(found["kept=false"])["resumed"].splitlines()
    assert told[0].startswith(
        "After the last update all that is compared is equal, and when `fit` has returned 2 values "
    )


@pytest.mark.nightly
def test_raw_state_dicts_in_distributed_checkpoints(tmp_path: Path) -> None:
    """What the template of a load lacks is not read: an optimizer that has never stepped has no state to fill."""
    found = ran(tmp_path, "raw_dcp")
    assert {options: result["verdict"] for options, result in found.items()} == {
        FIRST: "pass", "how=template": "mismatch", "how=partial": "pass", "how=deduplicated": "pass"
    }  # fmt: skip
    said = failed(found["how=template"])
    assert [name for name in said if not name.startswith("other mesh")] == ["resumed", "used", "again"]
    assert "restored no optimizer state (exp_avg, exp_avg_sq, step of 4 parameters are missing)" in said["resumed"]


@pytest.mark.nightly
def test_what_is_reduced_is_told_where_ranks_or_ways_part(tmp_path: Path) -> None:
    found = ran(tmp_path, "reduces", "--set", "chunks=2")
    told = {options: failed(result) for options, result in found.items()}
    assert told["chunks=2"] == {}
    assert "In this step nothing is reduced over ranks at all." in told["chunks=2+how=never"]["ranks agree"]
    assert "the ranks have one gradient, and each scales it" in told["chunks=2+how=clipped"]["ranks agree"]
    assert (
        "Rank 0 takes part in all_reduce of 32 numbers among ranks 0, 1 once with chunks=1 and twice with chunks=2"
    ) in told["chunks=2+how=each"]["alike chunks"]
