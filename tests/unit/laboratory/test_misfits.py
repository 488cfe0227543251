"""What does not fit a head is `unknown` with one line, and a difference that the reader did know stays a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import shardproof
from shardproof.diff import Difference
from shardproof.errors import HarnessError, MisfitError
from shardproof.laboratory.misfits import on_head, without_reader_misfits
from shardproof.laboratory.run_verdict import Attempt, ranks_verdict, result_of, same_failure
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.observe.settings import UNKNOWN
from shardproof.ownership import in_one_line, with_callable
from shardproof.protocol.registry import system_named
from shardproof.readers.errors import CheckpointError, UnfamiliarError, unfamiliar
from shardproof.result import Failure, Result, differences_to_json
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus, Verdict, exit_status
from shardproof.world.job import JobOutcome, RankError

MEGATRON = system_named("megatron-core")
HEAD, WALKED = "0.19.0+git.5be9626+cured", "0.16.1+cured"
GONE = "/dev/shm/shardproof-1/ab12-x/checkpoint0: file common.pt: given 'none'; allowed: common.pt; for example: it"


def difference(role: str, kind: str, where: str = WRITTEN, fqn: str = "a.weight", detail: str = "") -> Difference:
    return Difference(Key(2, where, role, fqn), kind, (0,), 1, 1, detail=detail)


def judged(differences: list[Difference], unread: tuple[str, ...] = (), *, version: str = HEAD, **axes: Any) -> Result:
    judgement = {
        "differences": differences_to_json(differences), "explanations": [], "distrust": "", "normalisations": [],
        "unfamiliar": list(unread),
    }  # fmt: skip
    scenario = replace(Scenario(system="megatron-core"), **axes)
    return result_of(scenario, MEGATRON, Attempt(judgement=judgement), {"version": version})


@pytest.mark.parametrize(
    ("system", "version", "head"),
    [
        ("megatron-core", "0.16.1", False),
        ("megatron-core", "0.16.1+cured:2777", False),
        ("megatron-core", "0.19.0+git.5be9626", True),
        ("megatron-core", "0+path.1234567+cured", True),
        ("automodel", "0.5.0+8dd19ce.git.36044ad", True),
        ("megatron-core", "0.16.7", True),
        ("torch-fsdp2", "2.13.0+cpu", False),
        ("torch-fsdp2", "2.16.0.dev20261124+cpu", True),
        ("reference", "0.1", False),
    ],
)
def test_a_head_is_what_no_table_of_releases_has(system: str, version: str, head: bool) -> None:
    assert on_head(system_named(system), version) is head


def test_a_form_that_the_reader_does_not_know_is_unknown_on_a_head_and_the_librarys_failure_on_a_release() -> None:
    found = [difference("checkpoint", "unreadable", fqn="checkpoint", detail=GONE)]
    head, walked = judged(found, (GONE,)), judged(found, (GONE,), version=WALKED)
    assert head.verdict is Verdict.UNKNOWN
    assert not head.differences
    assert head.reason.startswith("our reader does not know this form of checkpoint: checkpoint0: file common.pt")
    assert walked.verdict is Verdict.MISMATCH


def test_damage_is_the_librarys_failure_on_a_head_too() -> None:
    found = [difference("checkpoint", "unreadable", fqn="checkpoint", detail="truncated")]
    assert judged(found).verdict is Verdict.MISMATCH


def test_what_else_differs_stays_a_failure_without_what_the_reader_did_not_know() -> None:
    unread, wrong = difference("checkpoint", "unreadable", detail=GONE), difference("master", "bits", LIVE)
    result = judged([unread, wrong], (GONE,))
    assert result.verdict is Verdict.MISMATCH
    assert result.differences == (wrong,)
    assert "does not know this form" in result.reason


def test_a_planted_fault_makes_an_unread_checkpoint_a_failure_anywhere() -> None:
    found = [difference("checkpoint", "unreadable", detail=GONE)]
    assert judged(found, (GONE,), faults=("lost-file",)).verdict is Verdict.MISMATCH


def test_a_key_that_nobody_knows_is_named_alike_whatever_its_number() -> None:
    lines = {
        without_reader_misfits((), [difference(UNKNOWN, "extra", fqn=f"param_groups.{number}.fresh")])[0]
        for number in (0, 11)
    }
    assert lines == {"the checkpoint holds `param_groups.N.fresh`, which our reader does not know"}


def test_a_missing_value_is_no_misfit() -> None:
    missing = difference("exp_avg", "missing")
    assert without_reader_misfits((), [missing]) == ("", (missing,))


def test_an_unfamiliar_form_is_a_checkpoint_error() -> None:
    error = unfamiliar("checkpoint0: file common.pt", "none", "common.pt", "a checkpoint of Megatron-Core")
    assert isinstance(error, UnfamiliarError)
    assert isinstance(error, CheckpointError)


def test_a_broken_rank_is_no_crash_of_a_library_where_ranks_share_a_gpu() -> None:
    """Gloo carries their tensors then, which no training does; a rank that a fault has killed is still a crash."""
    died = JobOutcome((), ((1, "signal SIGSEGV"),), 1, False, (), 0, 0.0, 0.0, (), (), shared_gpus=True)
    with pytest.raises(HarnessError, match="a GPU for each rank"):
        ranks_verdict([died])
    assert ranks_verdict([replace(died, shared_gpus=False)])[0] is Verdict.CRASH
    assert ranks_verdict([replace(died, died=((1, "signal SIGKILL"),))])[0] is Verdict.CRASH


def test_a_rank_that_died_is_told_with_what_another_raised() -> None:
    """Where collectives do not match, gloo ends the one rank and the other raises. What gloo says of a peer that is
    gone is no error of its own."""
    raised = RankError(1, 0, "step", "op", "RuntimeError", "shape '[4, 1, 6, 4]' is invalid", None, "")
    outcome = JobOutcome((raised,), ((0, "signal SIGABRT"),), 0, False, (), 0, 0.0, 0.0, (), ())
    failure = ranks_verdict([outcome])[1]
    assert failure is not None
    assert failure.message.startswith("rank 0 ended without a word: signal SIGABRT\nrank 1 raised RuntimeError: shape")
    echo = replace(raised, message="Connection closed by peer")
    failure = ranks_verdict([replace(outcome, errors=(echo,))])[1]
    assert failure is not None
    assert failure.message == "rank 0 ended without a word: signal SIGABRT"


@pytest.mark.parametrize(("how", "same"), [("SIGABRT", True), ("SIGKILL", False), ("SIGSEGV", False)])
def test_a_rank_that_gloo_ends_and_one_that_raises_are_one_failure(how: str, same: bool) -> None:
    """Which of them comes first is a matter of timing where collectives do not match."""
    raised = Result(Scenario(), "torch-fsdp2", "2.13.0", Verdict.CRASH, error=Failure("RuntimeError", "shape", 1))
    died = replace(raised, error=Failure("died", f"rank 0 ended without a word: signal {how}", 0))
    assert same_failure(raised, died) is same_failure(died, raised) is same
    assert same_failure(died, died)
    assert not same_failure(raised, replace(raised, error=Failure("RuntimeError", "another", 1)))


def test_an_error_of_our_driver_is_a_misfit_in_one_line_that_is_the_same_on_every_rank() -> None:
    lines = set()
    for rank, op in ((0, "build"), (3, "load")):
        text = f'  File "{shardproof.__path__[0]}/mechanisms/some/loop.py", line 7, in build\n'
        told = "f() got an unexpected keyword argument 'x'"
        error = RankError(rank, 0, op, "op", "TypeError", told, None, text, ours=True)
        with pytest.raises(MisfitError) as raised:
            ranks_verdict([JobOutcome((error,), (), rank, False, (), 0, 0.0, 0.0, (), ())])
        lines.add(str(raised.value).split("\n")[0])
    said = "TypeError: f() got an unexpected keyword argument 'x', in shardproof/mechanisms/some/loop.py, line 7, build"
    assert lines == {said}


def test_an_error_of_import_names_no_folder_of_this_machine() -> None:
    message = "cannot import name 'x' from 'lib.part' (/home/me/cache/lib-1/site-packages/lib/part.py)"
    line = "ImportError: cannot import name 'x' from 'lib.part' (lib/part.py)"
    assert in_one_line("ImportError", message, "") == line


def test_a_call_with_a_wrong_argument_says_where_the_library_defines_what_was_called() -> None:
    module = ModuleType("lib.optimizer")
    module.__file__ = "/cache/lib-1/site-packages/lib/optimizer.py"
    exec("def get(a): ...\nclass Config:\n    def set(self): ...", vars(module))
    modules = {"lib.optimizer": module}
    told = "get() got an unexpected keyword argument 'lr'"
    assert with_callable(told, modules) == f"{told} (it is in lib/optimizer.py)"
    told = "Config.set() takes 1 positional argument but 2 were given"
    assert with_callable(told, modules) == f"{told} (it is in lib/optimizer.py)"
    assert with_callable("something else", modules) == "something else"
    assert with_callable("elsewhere() got an unexpected keyword argument", modules).endswith("argument")


@pytest.mark.parametrize(
    ("counts", "status"),
    [
        ({Verdict.UNKNOWN: 1}, ExitStatus.HARNESS),
        ({Verdict.UNKNOWN: 1, Verdict.PASS: 48}, ExitStatus.HARNESS),
        ({Verdict.UNKNOWN: 1, Verdict.PASS: 49}, ExitStatus.OK),
        ({Verdict.UNKNOWN: 1, Verdict.PASS: 48, Verdict.MISMATCH: 1}, ExitStatus.FAILURE),
        ({Verdict.UNKNOWN: 1, Verdict.UNSUPPORTED: 99}, ExitStatus.HARNESS),
    ],
)
def test_unknown_is_the_status_of_a_run_only_where_it_hides_more_than_its_share(
    counts: dict[Verdict, int], status: ExitStatus
) -> None:
    assert exit_status(counts) is status


def test_a_rank_that_died_is_quoted_with_the_last_that_it_printed(tmp_path: Path) -> None:
    paths = tuple(tmp_path / f"session0.rank{rank}.obs" for rank in (0, 1))
    died = JobOutcome((), ((1, "signal SIGABRT"),), 1, False, (), 0, 0.1, 0.1, (), paths)
    _, silent = ranks_verdict([died])
    (tmp_path / "session0.rank1.log").write_text("starting\nwhat(): op.preamble.length <= op.nbytes. 20 vs 8\n\n")
    _, told = ranks_verdict([died])
    assert silent is not None
    assert told is not None
    assert silent.message == "rank 1 ended without a word: signal SIGABRT"
    assert told.message == f"{silent.message}\nit last printed: what(): op.preamble.length <= op.nbytes. 20 vs 8"
