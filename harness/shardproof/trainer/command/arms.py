"""The arms of a command: what must be equal between the checkpoints that its runs leave.

    arm              what is compared                                           what must hold
    twice            the last checkpoints of two whole runs                     equal, or not deterministic
    cut              the run that stops early, with the whole run's checkpoint  equal, where the whole run kept one
                     of the same step
    resumed          the last checkpoint after a resume, with the whole run's   equal; and apart, if before the resume
                                                                                a value of each tensor is changed
    other world W    the same on W ranks                                        the same names, shapes and counts of
                                                                                steps; equal values are not claimed

*Verifies*: each row, of what is in the files. *Does not verify*: state that no checkpoint holds; that the script trains
well; on another number of ranks, values that depend on the order of sums and on which rank gets which data.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardproof.compare.differences import EntryDifference
from shardproof.errors import UsageError
from shardproof.readers.errors import CheckpointError
from shardproof.result import ArmResult
from shardproof.trainer.command import text
from shardproof.trainer.command.asked import FORM
from shardproof.trainer.command.checkpoints import (
    Checkpoint,
    Compared,
    change_values,
    compared,
    pointers_elsewhere,
    unchanged,
)
from shardproof.trainer.command.process import absent_script
from shardproof.trainer.command.runs import Ran, Runs
from shardproof.verdict import Verdict

WHOLE, TWICE, CUT, RESUMED, OTHER = "whole", "twice", "cut", "resumed", "other world"
COUNTS = ("step", "scheduler")
"""Roles of values that another number of ranks does not change."""
PLAIN = "other"
"""The role of a plain value whose name tells nothing, such as a path or the time."""
STATE = ("param", "master", "exp_avg", "exp_avg_sq", "momentum", "step")
"""Roles of state that a checkpoint has on every number of ranks."""


class CommandArms:
    """The arms of one command, in the order in which they can be judged.

    differing: arm → what differs in the two checkpoints that it compared, where something does.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs, self.asked = runs, runs.asked
        self.unsteady: set[str] = set()
        self.other_bytes: set[str] = set()
        self.early: ArmResult | None = None
        self.differing: dict[str, Compared] = {}

    def judged(self) -> Iterator[ArmResult]:
        """The verdicts, each as soon as it is there. Where the whole run fails, there is no other arm.

        Raises:
            UsageError: the command cannot be started, or leaves nothing in its folder.
        """
        twice = self.twice()
        if twice.verdict in (Verdict.CRASH.value, Verdict.HANG.value) or not self.whole.ended_well:
            yield twice
            return
        yield replace(twice, notes=(*twice.notes, *self._still()))
        self.early = self._confirmed(self._cut)
        yield self.early
        yield self._confirmed(self._resumed)
        for world in self.asked.worlds[1:]:
            yield self._confirmed(partial(self._other, world))

    @property
    def whole(self) -> Ran:
        return self.runs.of(WHOLE, self.asked.whole)

    @property
    def last(self) -> Checkpoint:
        """The newest checkpoint of the whole run, with which the other runs are compared."""
        return self.whole.checkpoints[-1]

    def _confirmed(self, judge: Callable[[int], ArmResult]) -> ArmResult:
        """An arm, judged a second time in runs of its own where it failed: a failure that does not come again is no
        failure of that kind."""
        first = judge(1)
        if not Verdict(first.verdict).is_failure or (second := judge(2)).verdict == first.verdict:
            return first
        return text.came_once(first, second)

    def _require_script(self, whole: Ran) -> None:
        """Refuse a command whose script is not there: it says nothing about any training.

        Raises:
            UsageError: Python did not find a script that the command names, and nothing was written.
        """
        absent = "" if whole.ended_well or whole.checkpoints else absent_script(whole.log)
        if absent and any(Path(word).name == Path(absent).name for word in shlex.split(self.asked.text)):
            raise UsageError.of("--command: script", absent, "a file that is there", FORM)

    def twice(self) -> ArmResult:
        """Whether two whole runs come to the same; what does not is left out of what follows."""
        whole = self.whole
        self._require_script(whole)
        twice = self.runs.of(TWICE, self.asked.whole, patience=1 if whole.ended_well else 2)
        if not whole.ended_well:
            failed = text.of_failure(WHOLE, whole)
            passed = ArmResult(WHOLE, Verdict.PASS.value, "")
            again = passed if twice.ended_well else text.of_failure(WHOLE, twice)
            return failed if again.verdict == failed.verdict else text.came_once(failed, again)
        if not twice.ended_well:
            failed = text.of_failure(TWICE, twice)
            sentence = f"Of two equal runs, the first came to its end. {failed.sentence}"
            return replace(failed, verdict=Verdict.NONDETERMINISTIC.value, sentence=sentence)
        for ran in (whole, twice):
            if not ran.checkpoints:
                what = "--command: what it wrote into {folder}"
                raise UsageError.of(what, f"nothing (its output: {ran.log})", "one checkpoint or more", FORM)
        if (other := twice.checkpoints[-1]).number != self.last.number:
            sentence = text.of_numbers("A second run", other.number, self.last.number)
            return ArmResult(TWICE, Verdict.NONDETERMINISTIC.value, sentence)
        found = compared(self.last, other)
        self.unsteady, self.other_bytes = {one.name for one in found.found}, set(found.unread)
        if found.why:
            return self._by_bytes(TWICE, found)
        if any(one.role != PLAIN for one in found.found):
            self.differing[TWICE] = found
            sentence = text.of_unsteady(found.found)
            return ArmResult(TWICE, Verdict.NONDETERMINISTIC.value, sentence, text.unread(found.unread))
        return ArmResult(TWICE, Verdict.PASS.value, "", (*text.unread(found.unread), *text.moving(found.found)))

    def _still(self) -> tuple[str, ...]:
        """Notes on what is equal in the last two checkpoints of the whole run."""
        if len(kept := self.whole.checkpoints) < 2:
            return ()
        earlier, later = kept[-2:]
        return text.stands_still(earlier, later, unchanged(earlier, later))

    def _by_bytes(self, name: str, found: Compared) -> ArmResult:
        """The verdict where no reader knows the files: equal bytes pass, and other bytes say nothing."""
        if found.unread:
            return ArmResult(name, Verdict.UNSUPPORTED.value, text.not_read(found))
        return ArmResult(name, Verdict.PASS.value, "", (text.by_bytes(found),))

    def _judged(self, name: str, found: Compared, sentence: Callable[..., str]) -> ArmResult:
        """The verdict of a comparison, without what is not deterministic."""
        if found.why:
            return self._by_bytes(name, found)
        left = tuple(one for one in found.found if one.name not in self.unsteady)
        if not left and found.names <= len(self.unsteady):
            return ArmResult(name, Verdict.UNSUPPORTED.value, text.ALL_UNSTEADY)
        verdict = Verdict.MISMATCH if left else Verdict.PASS
        if left:
            self.differing[name] = replace(found, found=left)
        notes = text.unread(sorted({*found.unread} - self.other_bytes))
        return ArmResult(name, verdict.value, sentence(left, self.asked) if left else "", notes)

    def _cut_run(self, attempt: int) -> Ran:
        return self.runs.of(f"{CUT}-{attempt}", self.asked.cut, patience=attempt)

    def _cut(self, attempt: int) -> ArmResult:
        cut = self._cut_run(attempt)
        return self._pointed(self._compared_with_cut(cut), cut)

    def _pointed(self, found: ArmResult, ran: Ran) -> ArmResult:
        """A verdict, with a note on each pointer of the run that leads to another checkpoint than the newest."""
        if not (pointers := pointers_elsewhere(ran.folder)):
            return found
        return replace(found, notes=(*found.notes, *text.leads_elsewhere(pointers, ran.checkpoints[-1])))

    def _compared_with_cut(self, cut: Ran) -> ArmResult:
        if not cut.ended_well:
            return text.of_failure(CUT, cut)
        if not cut.checkpoints:
            return ArmResult(CUT, Verdict.UNKNOWN.value, text.nothing_to_resume(self.asked.cut, cut))
        last = cut.checkpoints[-1]
        same = [one for one in self.whole.checkpoints if one.number == last.number is not None]
        if not same:
            return ArmResult(
                CUT, Verdict.UNSUPPORTED.value, text.no_such_step(last.number or self.asked.cut, self.whole.checkpoints)
            )
        found = compared(same[0], last)
        given = [one for one in found.found if text.is_until(one, self.asked)]
        left = tuple(one for one in found.found if one not in given)
        sentence = text.of_late if self._is_late(same[0], left) else text.of_cut
        judged = self._judged(CUT, replace(found, found=left), sentence)
        return replace(judged, notes=(*judged.notes, *text.until_itself(given)))

    def _is_late(self, early: Checkpoint, found: Sequence[EntryDifference]) -> bool:
        """Whether what a checkpoint of the whole run has otherwise than the cut one is of a later step."""
        state = {one.name for one in found if one.role in STATE and one.kind == "bits"}
        if not state or early is self.last:
            return False
        last = {one.name for one in compared(early, self.last).found}
        return text.are_later(found, self.asked.cut) or not state & last

    def _resumed(self, attempt: int) -> ArmResult:
        cut = self._cut_run(attempt)
        if (lost := self._nothing_to_resume(RESUMED, cut)) is not None:
            return lost
        resumed = self.runs.of(f"{RESUMED}-{attempt}", self.asked.whole, base=cut.folder, patience=attempt)
        found = self._ended(RESUMED, resumed) or self._judged(
            RESUMED, compared(self.last, resumed.checkpoints[-1]), text.of_resumed
        )
        found = self._pointed(found, resumed)
        return self._seen(found, cut) if found.verdict == Verdict.PASS.value else found

    def _nothing_to_resume(self, name: str, cut: Ran) -> ArmResult | None:
        """Why a resume would say nothing."""
        if not cut.ended_well or not cut.checkpoints:
            return ArmResult(name, Verdict.UNSUPPORTED.value, text.NO_CUT)
        if self.early is not None and self.early.verdict == Verdict.MISMATCH.value:
            return ArmResult(name, Verdict.UNSUPPORTED.value, text.ANOTHER_CUT)
        return None

    def _ended(self, name: str, ran: Ran) -> ArmResult | None:
        """The verdict of a run that failed, or did not come as far as the whole one."""
        if not ran.ended_well:
            return text.of_failure(name, ran)
        number = ran.checkpoints[-1].number if ran.checkpoints else None
        if number == self.last.number and ran.checkpoints:
            return None
        return ArmResult(name, Verdict.MISMATCH.value, text.of_numbers("The resumed run", number, self.last.number))

    def _seen(self, found: ArmResult, cut: Ran) -> ArmResult:
        """A resume that passes, after a look at whether it reads the checkpoint: a script that begins anew comes to the
        same end."""
        if compared(cut.checkpoints[-1], cut.checkpoints[-1]).why:
            return replace(found, notes=(*found.notes, text.NOT_SEEN))
        try:
            ran = self.runs.of("changed", self.asked.whole, base=cut.folder, change=change_values)
        except CheckpointError as error:
            return replace(found, notes=(*found.notes, text.not_changed(str(error))))
        if not ran.ended_well or not ran.checkpoints or ran.checkpoints[-1].number != self.last.number:
            return found
        after = compared(self.last, ran.checkpoints[-1])
        if any(one.name not in self.unsteady for one in after.found):
            return found
        return ArmResult(RESUMED, Verdict.UNKNOWN.value, text.BEGINS_ANEW)

    def _other(self, world: int, attempt: int) -> ArmResult:
        name, cut = f"{OTHER} {world}", self._cut_run(attempt)
        if (lost := self._nothing_to_resume(name, cut)) is not None:
            return lost
        ran = self.runs.of(f"world-{world}-{attempt}", self.asked.whole, world=world, base=cut.folder, patience=attempt)
        if (failed := self._ended(name, ran)) is not None:
            return failed
        found = compared(self.last, ran.checkpoints[-1])
        if found.why:
            return self._by_bytes(name, found)
        kept = tuple(one for one in found.found if one.role in COUNTS or (one.role in STATE and one.kind != "bits"))
        judged = self._judged(name, replace(found, found=kept), text.of_resumed)
        apart = len(kept) < len([one for one in found.found if one.name not in self.unsteady])
        return replace(judged, notes=(*judged.notes, *([text.INEXACT] if apart else [])))
