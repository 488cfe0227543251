"""`shardproof trainer --command`: places in a command, checkpoints in a folder, scripts with one mistake."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from shardproof.compare.differences import EntryDifference
from shardproof.errors import UsageError
from shardproof.readers.errors import CheckpointError
from shardproof.result import ArmResult
from shardproof.trainer.command import text
from shardproof.trainer.command.arms import CommandArms
from shardproof.trainer.command.asked import asked_command
from shardproof.trainer.command.checkpoints import (
    Checkpoint,
    Compared,
    change_values,
    checkpoints_in,
    compared,
    number_of,
    pointers_elsewhere,
    unchanged,
)
from shardproof.trainer.command.page import page_of
from shardproof.trainer.command.process import STACKS, places_in, said_last
from shardproof.trainer.command.runs import Ran, Runs
from shardproof.trainer.command.text import document

from tests.paths import PYTHONPATH, ROOT

SCRIPT = f"{sys.executable} {ROOT / 'tests/trainers/script.py'}"
COMMAND = f"{SCRIPT} --out {{folder}} --max-steps {{until}}"


# Pure parts


def test_places_are_filled() -> None:
    text = f"{sys.executable} -n {{world}} train.py '--out={{folder}}/a b' {{until}} {{resume}}"
    asked = asked_command(text, "3,6", "4,2", "--from {checkpoint}")
    folder = Path("/runs/folder")
    begun = asked.words(folder, 3, 4, None)
    assert begun[1:] == ["-n", "4", "train.py", "--out=/runs/folder/a b", "3"]
    assert asked.words(folder, 6, 2, folder / "step-3")[-3:] == ["6", "--from", "/runs/folder/step-3"]
    assert (asked.cut, asked.whole, asked.worlds, asked.name) == (3, 6, (4, 2), "train")


@pytest.mark.parametrize(
    ("text", "steps", "world", "resume", "said"),
    [
        ("python {until}", "2,4", "", "", "{folder} in it"),
        ("python {folder}", "2,4", "", "", "{until} in it"),
        ("python {folder} {until} {seed}", "2,4", "", "", "place: given '{seed}'"),
        ("no-such-program {folder} {until}", "2,4", "", "", "program: given 'no-such-program'"),
        ("python {folder} {until} '", "2,4", "", "", "words as in a shell"),
        (COMMAND, "4,2", "", "", "the smaller one first"),
        (COMMAND, "2", "", "", "--steps"),
        (COMMAND, "2,4", "2,1", "", "with a command that has {world} in it"),
        (COMMAND, "2,4", "", "--again", "both or neither"),
        (f"{COMMAND} {{resume}}", "2,4", "", "", "both or neither"),
        (f"{COMMAND} {{resume}}", "2,4", "", "{until}", "--resume: place"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(text: str, steps: str, world: str, resume: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked_command(re.sub("^python ", f"{sys.executable} ", text), steps, world, resume)
    assert said in str(caught.value)
    assert "allowed: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("checkpoint-4", 4), ("global_step12", 12), ("iter_0000004", 4), ("step_3.pt", 3), ("epoch=1-step=40.ckpt", 40),
        ("epoch=2.ckpt", 2), ("model_step4.pt", 4), ("rank_0", None), ("model-00001-of-00002.safetensors", None),
    ],
)  # fmt: skip
def test_the_number_in_a_name(name: str, number: int | None) -> None:
    assert number_of(name) == number


def test_the_newest_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (2, 10):
        (tmp_path / f"logs/checkpoint-{step}").mkdir(parents=True)
        torch.save({"model": torch.ones(step)}, tmp_path / f"logs/checkpoint-{step}/last.pt")
    assert [one.number for one in checkpoints_in(tmp_path)] == [2, 10]
    assert checkpoints_in(tmp_path)[-1].path == tmp_path / "logs/checkpoint-10"
    assert checkpoints_in(tmp_path / "logs/checkpoint-2")[-1].number is None


def test_every_file_is_compared(tmp_path: Path) -> None:
    for name, moment in (("one", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        torch.save({"weight": torch.ones(3)}, tmp_path / name / "model.pt")
        torch.save({"state": {0: {"exp_avg": torch.full((3,), moment)}}}, tmp_path / name / "optimizer.pt")
        torch.save({"last_epoch": moment}, tmp_path / name / "scheduler.pt")
        (tmp_path / name / "state.json").write_text(name)
    found = compared(*(checkpoints_in(tmp_path / name)[-1] for name in ("one", "other")))
    assert [(one.name, one.role) for one in found.found] == [
        ("optimizer.state.0.exp_avg", "exp_avg"), ("scheduler.last_epoch", "scheduler")
    ]  # fmt: skip
    assert (found.names, found.unread) == (3, ("state.json",))


def test_a_format_that_nobody_knows_is_compared_by_bytes(tmp_path: Path) -> None:
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.msgpack").write_bytes(b"other" if name == "other" else b"weights")
    one, same, other = (checkpoints_in(tmp_path / name)[-1] for name in ("one", "same", "other"))
    assert (compared(one, same).unread, bool(compared(one, same).why)) == ((), True)
    assert compared(one, other).unread == ("weights.msgpack",)


def test_files_and_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """As two tags of DeepSpeed with two stages each, in the one folder of a run."""
    for tag in ("global_step1", "global_step2"):
        (tmp_path / tag).mkdir()
        for rank in (0, 1):
            state = {"module": {"weight": torch.ones(3)}, "buffer_names": ["mean"], "param_shapes": []}
            torch.save(state, tmp_path / tag / f"mp_rank_0{rank}_model_states.pt")
    for suffix in ("bin", "pt"):
        torch.save({"weight": torch.ones(3)}, tmp_path / f"state.{suffix}")
    change_values(tmp_path)
    for file in (*tmp_path.glob("*/*.pt"), *tmp_path.glob("state.*")):
        saved = torch.load(file)
        assert saved.get("module", saved)["weight"].tolist() == [1.5, 1.0, 1.0], file


def test_a_refusal_to_change_values_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "last.pt")
    kept = Ran("cut-1", tmp_path, tmp_path / "log", 0, 1.0)
    arms = CommandArms(Runs(asked_command(COMMAND, "2,4", "", ""), tmp_path, 9.0, lambda text: None))

    def refused(*given: Any, **named: Any) -> Ran:
        raise CheckpointError("too many files")

    monkeypatch.setattr(arms.runs, "of", refused)
    seen = arms._seen(ArmResult("resumed", "pass", ""), kept)
    assert seen.verdict == "pass"
    assert seen.notes[0].endswith("since its values cannot be changed (too many files)")


def test_a_pointer_that_leads_to_another_checkpoint_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
        torch.save({"weight": torch.ones(3)}, tmp_path / f"step_{step}/model.pt")
    (tmp_path / "LATEST").symlink_to("step_1")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1\n")
    (tmp_path / "latest").write_text("step_3")
    (tmp_path / "last").symlink_to("step_2")
    (tmp_path / "last_loss.txt").write_text("7")
    (tmp_path / "last.ckpt").write_bytes(bytes(2000))
    told = text.leads_elsewhere(pointers_elsewhere(tmp_path), checkpoints_in(tmp_path)[-1])
    assert [one.partition(":")[0] for one in told] == [
        "LATEST leads to step_1, and the newest checkpoint is step_2",
        "latest leads to step_3, which is not there, and the newest checkpoint is step_2",
        "latest_checkpointed_iteration.txt leads to 1, and the newest checkpoint is step_2",
    ]


def test_what_the_whole_run_kept_is_told() -> None:
    def kept(number: int | None, name: str) -> Checkpoint:
        return Checkpoint(number, Path("/kept"), (Path("/kept") / name,))

    end = "and no checkpoint of step 2"
    last = text.no_such_step(2, [kept(None, "last.pt")])
    assert last == f"not compared: the whole run kept last.pt as it was at the end, {end}"
    numbered = text.no_such_step(2, [kept(3, "step_3"), kept(4, "step_4")])
    assert numbered == f"not compared: the whole run kept checkpoints 3, 4, {end}"


def test_a_crash_that_came_both_times_leads() -> None:
    arms = [ArmResult("twice", "nondeterministic", ""), ArmResult("cut", "pass", ""), ArmResult("resumed", "crash", "")]
    assert text.verdict_of(arms).value == "crash"
    assert [arm.name for arm in text.led_by_failures(arms)] == ["resumed", "twice", "cut"]
    assert text.verdict_of(arms[:2]).value == "nondeterministic"


@pytest.mark.parametrize("place", ["{step}", "step-{step}/last.ckpt", "step_{step}.pt"])
def test_weights_that_stand_still_while_training_goes_on_are_told(tmp_path: Path, place: str) -> None:
    for step in (2, 4):
        file = tmp_path / place.format(step=f"step_{step}/ema.pt" if place == "{step}" else step)
        file.parent.mkdir(exist_ok=True)
        moving = {"state_dict": {"a.weight": torch.full((3,), float(step))}}
        state = {0: {"exp_avg": torch.full((3,), float(step)), "step": torch.tensor(float(step))}}
        saved = {"state_dict": {"a.weight": torch.ones(3), "a.bias": torch.ones(3)}, "optimizer": {"state": state}}
        torch.save(saved, file)
        if place != "step_{step}.pt":
            torch.save(moving, file.with_name("model.pt"))
    earlier, later = checkpoints_in(tmp_path)
    ((file, role, count),) = unchanged(earlier, later)
    assert (role, count) == ("param", 2)
    assert text.stands_still(earlier, later, [(file, role, count)]) == (
        f"between checkpoints 2 and 4 of the whole run no param in {file} changes (2 tensors)",
    )


@pytest.mark.parametrize(("late", "later"), [(3.0, True), (2.0, False)])
def test_a_save_that_goes_on_while_training_does_is_told(tmp_path: Path, late: float, later: bool) -> None:
    for run, count in (("whole", late), ("cut", 2.0)):
        (tmp_path / run).mkdir()
        state = {0: {"exp_avg": torch.full((3,), count), "step": torch.tensor(count)}}
        torch.save({"optimizer": {"state": state}, "lr": 0.1 if run == "cut" else 0.2}, tmp_path / run / "step_2.pt")
    (whole,), (cut,) = (checkpoints_in(tmp_path / run) for run in ("whole", "cut"))
    found = compared(whole, cut).found
    assert text.are_later(found, 2) is later
    if later:
        asked = asked_command("python train.py --until {until} --out {folder}", "2,4", "", "")
        assert text.of_late(found, asked).endswith(
            "optimizer.state.0.step is 3 there, and 2 in that of the run that stops. Look at a save that goes on "
            "after it has returned, and at tensors that it takes without a copy."
        )


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_damaged_or_hostile_file_differs_and_executes_nothing(tmp_path: Path) -> None:
    for name in ("one", "torn", "hostile"):
        (tmp_path / name).mkdir()
        torch.save({"weight": torch.ones(300)}, tmp_path / name / "model.pt")
    torn = tmp_path / "torn/model.pt"
    torn.write_bytes(torn.read_bytes()[:500])
    (tmp_path / "hostile/model.pt").write_bytes(pickle.dumps(Hostile(tmp_path / "struck")))
    one, *others = (checkpoints_in(tmp_path / name)[-1] for name in ("one", "torn", "hostile"))
    assert [bool(compared(one, other).found) for other in others] == [True, True]
    assert not (tmp_path / "struck").exists()


def test_a_value_of_every_tensor_is_changed(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16), "n": torch.ones(2).int(), "s": torch.ones(1)},
        tmp_path / "x.pt",
    )
    change_values(tmp_path)
    found = torch.load(tmp_path / "x.pt")
    assert found["a"].tolist() == [1.5, 1.0, 1.0]
    assert found["b"].tolist() == [1.5, 1.0]
    assert found["n"].tolist() == [1, 1]
    assert found["s"].tolist() == [1.0]  # which may be a count of steps


def test_the_page_lists_what_differs_and_escapes_it(tmp_path: Path) -> None:
    step = EntryDifference("<b>state.step", "step", "value", first_a="4", first_b="2")
    differing = {"resumed": Compared((step,), 1, sides=(tmp_path / "whole/step 4", tmp_path / "resumed/step 4"))}
    arms = [ArmResult("twice", "pass", ""), ArmResult("resumed", "mismatch", "It ends with another checkpoint.")]
    asked = asked_command(f"{sys.executable} <i> {{folder}} {{until}}", "2,4", "", "")
    page = page_of(document(asked, arms, {"whole": 1.5}, tmp_path), differing)
    assert "1 of 2 arms pass, and resumed failed" in page
    assert "&lt;b&gt;state.step" in page
    assert "<b>state.step" not in page
    assert "<i>" not in page
    assert f"shardproof diff &#39;{tmp_path}/whole/step 4&#39; &#39;{tmp_path}/resumed/step 4&#39;" in page


# Real scripts


def start(folder: Path, command: str, *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "shardproof", "trainer", "--command", command, "--out", str(folder / "out"), *words]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    return subprocess.Popen(
        line, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def ran(folder: Path, command: str, *words: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Exit status, verdict and sentence of each arm, and what was printed as an error."""
    process = start(folder, command, *words)
    _, errors = process.communicate(timeout=600)
    file = folder / "out/results.json"
    arms = json.loads(file.read_text("utf-8"))["arms"] if file.exists() else []
    return process.returncode, {arm["name"]: (arm["verdict"], arm["sentence"]) for arm in arms}, errors


night = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.real
@pytest.mark.parametrize(
    ("what", "status", "arm", "verdict", "sentence"),
    [
        night("forgets", 1, "resumed", "mismatch", "The optimizer has begun again at step 1"),
        night(
            "unseeded", 1, "twice", "nondeterministic", "two whole runs end with other checkpoints. exp_avg of 4 values"
        ),
        night("begins-anew", 3, "resumed", "unknown", "The resumed run does not read the checkpoint"),
        night("schedules-until", 1, "cut", "mismatch", "Does a schedule depend on {until}?"),
        ("fails", 1, "whole", "crash", "exit status 1, and said last: this script ends with an error."),
    ],
)
def test_a_mistake_is_told(tmp_path: Path, what: str, status: int, arm: str, verdict: str, sentence: str) -> None:
    ended, arms, errors = ran(tmp_path, f"{COMMAND} --what {what}")
    assert (ended, arms[arm][0]) == (status, verdict), errors
    assert sentence in arms[arm][1]


TORCHRUN = """\
[rank1]:     raise OSError(22, "Invalid argument")
[rank1]: OSError: [Errno 22] Invalid argument
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
  exitcode  : 1 (pid: 6249)
============================================================
"""

DUMP = b"""Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 9 in wait

Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 40 in recv
  File "/home/me/train.py", line 7 in step
  File "/home/me/train.py", line 20 in <module>

Extension modules: numpy (total: 1)
Fatal Python error: Aborted

Current thread 0x3 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/elastic/agent/server/api.py", line 8 in run
"""


def test_a_hang_says_where_it_was_and_what_it_printed(tmp_path: Path) -> None:
    log = tmp_path / "whole.log"
    ran = Ran("whole", tmp_path, log, None, 70.0)
    where = "Its processes were in recv (distributed_c10d.py, line 40; from train.py, line 7)."
    log.write_bytes(b"step 3\n" + STACKS + DUMP)
    first = text.of_failure("whole", ran)
    assert f"{where} It printed last: step 3. Its output: {log}" in first.sentence
    log.write_bytes(STACKS + DUMP)
    assert f"{where} It printed nothing: {log} is empty but for stacks." in text.of_failure("whole", ran).sentence
    log.write_bytes(b"")
    assert f"killed. It printed nothing: {log} is empty." in text.of_failure("whole", ran).sentence


def test_a_second_try_that_fails_otherwise_is_told() -> None:
    hang, crash = ArmResult("whole", "hang", "It hung."), ArmResult("whole", "crash", "It died. Its output: twice.log")
    both = text.came_once(hang, crash)
    assert both.verdict == "nondeterministic"
    assert both.sentence == "It hung. A second try came to another failure, crash. It died. Its output: twice.log"
    assert text.came_once(hang, ArmResult("whole", "pass", "")).sentence.endswith("not come again in a second try.")


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6051"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (TORCHRUN, "OSError: [Errno 22] Invalid argument"),
        ("Traceback:\nmodule.LoadError: no step\n  warning: a thread\n", "module.LoadError: no step"),
        ("KeyError: 'step'\nRuntimeError: at the end\n", "RuntimeError: at the end"),
        (f"[rank0]: AssertionError: step_4 already exists\n[rank1]: {LOST}\n", "AssertionError: step_4 already exists"),
        (f"[rank1]: {LOST}\n", LOST),
        ("subprocess.CalledProcessError: Command 'x'\n", "subprocess.CalledProcessError: Command 'x'"),
        ("no checkpoint was found\n=====\n\n", "no checkpoint was found"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        (f"  what():  [enforce fail] 64 vs 32.\n[rank0]: {LOST}\n", "what():  [enforce fail] 64 vs 32."),
        ("\n", "it said nothing"),
    ],
)
def test_why_a_run_failed_is_said_in_its_own_words(tmp_path: Path, output: str, said: str) -> None:
    log = tmp_path / "log"
    log.write_text(output, "utf-8")
    assert said_last(log) == said


@pytest.mark.real
def test_a_command_that_writes_nothing_is_refused(tmp_path: Path) -> None:
    ended, arms, errors = ran(tmp_path, f"{COMMAND} --what writes-nothing")
    assert (ended, arms) == (2, {})
    assert "what it wrote into {folder}: given 'nothing" in errors


def test_a_script_that_is_not_there_is_bad_input_and_one_that_it_opens_is_not(tmp_path: Path) -> None:
    absent = f"{sys.executable} {tmp_path}/trai.py --out {{folder}} --until {{until}}"
    ended, arms, errors = ran(tmp_path, absent)
    assert (ended, arms) == (2, {})
    assert f"--command: script: given '{tmp_path}/trai.py'; allowed: a file that is there; for example: " in errors
    calls = f"import subprocess\nsubprocess.run(['{sys.executable}', 'x.py'], check=True)"
    (tmp_path / "calls.py").write_text(calls)
    ended, arms, _ = ran(tmp_path, absent.replace("trai.py", "calls.py"))
    assert (ended, list(arms)) == (1, ["whole"])


@pytest.mark.real
@pytest.mark.nightly
def test_a_sound_script_passes_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    launch = COMMAND.replace(sys.executable, f"{sys.executable} -m torch.distributed.run --nproc-per-node {{world}}", 1)
    ended, arms, errors = ran(tmp_path, f"{launch} {{resume}}", "--resume", "--resume-from {checkpoint}")
    assert (ended, [verdict for verdict, _ in arms.values()]) == (0, ["pass"] * 4), errors
    assert list(arms) == ["twice", "cut", "resumed", "other world 1"]


@pytest.mark.real
@pytest.mark.nightly
def test_an_interrupted_command_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, COMMAND)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("cut-1"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "the same command resumes the run" in errors) == (130, True)
    ended, _, errors = ran(tmp_path, COMMAND)
    assert (ended, errors.splitlines()[0][:5]) == (0, "cut-1")


@pytest.mark.real
def test_a_hang_ends_with_all_its_processes(tmp_path: Path) -> None:
    from shardproof.trainer.command.process import run

    script = (
        f"import os, time; os.fork() or os.setsid(); open({str(tmp_path / 'pid')!r}, 'a').write(f'{{os.getpid()}} ')"
    )
    ended = run([sys.executable, "-c", f"{script}; time.sleep(1000)"], tmp_path / "log", 3.0)
    assert ended.status is None
    assert [place.partition(" (")[0] for place in places_in(tmp_path / "log")] == ["<module>"]
    assert "printed nothing" in text.of_failure("whole", Ran("whole", tmp_path, tmp_path / "log", None, 3.0)).sentence
    assert [pid for pid in (tmp_path / "pid").read_text().split() if Path(f"/proc/{pid}").exists()] == []
