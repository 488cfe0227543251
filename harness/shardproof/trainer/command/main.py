"""The way of one command from its options to its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardproof.errors import UsageError
from shardproof.folders import at_work_in
from shardproof.report.html import INDEX
from shardproof.report.publish import publish
from shardproof.result import ArmResult
from shardproof.trainer.command import text
from shardproof.trainer.command.arms import CommandArms
from shardproof.trainer.command.asked import AskedCommand
from shardproof.trainer.command.page import page_of
from shardproof.trainer.command.runs import Runs, on_stderr
from shardproof.verdict import ExitStatus, Verdict, exit_status

RESULTS = "results.json"


def examine(asked: AskedCommand, out: Path, deadline_s: float, json_file: Path | None, *, quiet: bool) -> int:
    """Run a command along its arms, and print what they show; the exit status.

    Raises:
        UsageError: the command cannot be started, or leaves nothing in its folder; another process works in `out`.
        StoreFull: the disk is full.
    """
    arms: list[ArmResult] = []
    with at_work_in(out):
        runs = Runs(asked, out, deadline_s, on_stderr(quiet))
        judging = CommandArms(runs)
        interrupted = False
        try:
            for arm in judging.judged():
                arms = text.led_by_failures([*arms, arm])
        except KeyboardInterrupt:
            interrupted = True
        except UsageError:
            runs.end()
            raise
        if arms:
            print(text.render(arms, judging.whole, judging.differing), end="")
        document = text.document(asked, arms, runs.seconds(), out)
        for file in filter(None, (out / RESULTS, json_file)):
            publish(file, json.dumps(document, indent=1))
        publish(out / INDEX, page_of(document, judging.differing))
        if interrupted:
            print("interrupted: the same command resumes the run", file=sys.stderr)
            return ExitStatus.INTERRUPTED
        verdict = text.verdict_of(arms)
        if verdict is Verdict.PASS:
            runs.forget()
        else:
            runs.end()
    print(f"report: {out / INDEX}")
    print(f"{asked.name}: {verdict.value}")
    status = exit_status({verdict: 1})
    return ExitStatus.HARNESS if status is ExitStatus.NOTHING_RUN else status
