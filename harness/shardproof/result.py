"""A result: what one scenario showed, with everything a reader or a tool needs, and its JSON form.

The JSON form is the command line's contract (`--json`, the database and the reports all use it): keys may
be added, never renamed. `Result.from_json(r.to_json()) == r` for every result.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardproof.codec import fields_from_plain, from_plain, to_plain
from shardproof.diagnosis import Explanation
from shardproof.diff import Difference
from shardproof.errors import UsageError
from shardproof.observe.courses import RankCourse
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE
from shardproof.ownership import LIBRARY
from shardproof.program import expand
from shardproof.scenario import Scenario
from shardproof.verdict import Standing, Verdict


@dataclass(frozen=True)
class FailedOp:
    """The first operation at which the scenario failed: its index in the expanded program, and its kind."""

    index: int
    name: str


@dataclass(frozen=True)
class Failure:
    """An exception, a death or a deadline in a rank.

    type: qualified name of the exception, or `killed` / `deadline`. rank: None where no single rank is to
    blame. op: index of the operation that the rank was in, if known. planted: whether a fault raised it, on purpose.
    """

    type: str
    message: str
    rank: int | None = None
    traceback: str = ""
    op: int | None = None
    planted: bool = False


@dataclass(frozen=True)
class Reproduced:
    """How often a failure came again in freshly started ranks: `times` of `attempts`."""

    times: int
    attempts: int


ALIKE = "alike"
"""How the name of an arm begins that holds two ways to compute the same side by side, such as `alike foreach`."""

TWIN = "twin"
"""The arm of a trainer that holds its steps against torch's optimizer on whole tensors."""


@dataclass(frozen=True)
class ArmResult:
    """The verdict of one arm of a trainer's cell (`shardproof.trainer`).

    * name: such as `resumed`, or `other mesh 4`. verdict: the text of a `Verdict`.
    * sentence: what went wrong, in whole sentences, with a line break between paragraphs; of `unsupported` and
      `unknown`, why.
    * notes: what was not compared, and why.
    """

    name: str
    verdict: str
    sentence: str
    notes: tuple[str, ...] = ()

    @property
    def paragraphs(self) -> tuple[str, ...]:
        """The paragraphs of `sentence`; none of an empty one."""
        return tuple(self.sentence.splitlines())

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the arm did not compare, and why; of one without a verdict, all of it."""
        return (*self.notes, self.sentence) if self.verdict == Verdict.UNSUPPORTED.value else self.notes


class Evidence(NamedTuple):
    """One thing that failed: the kind of the operation it showed at, and what, e.g. `exp_avg bits` or `KeyError: …`."""

    op: str
    text: str


LATER = "later"
"""In the place of an operation's kind: of the aftermath."""

BY_CURE, BY_RELEASE, BY_FACE, IN_PART = "cure", "release", "face", "part"
"""How a failure is known: it passes with the defects cured; it passes on the release that repaired them; it only looks
like them, since one of them has no cure that applies; it looks like them, and something new fails once they are cured.
See `shardproof.laboratory.attribution`."""
_KNOWN_BY = {
    BY_RELEASE: ", which a later release repaired",
    BY_FACE: ", by face only",
    IN_PART: " in part: what fails behind it is told apart",
}


@dataclass(frozen=True)
class Result:
    """The verdict of one scenario.

    * version: release of the library that really ran; of the ranks that saved, where others loaded.
    * reason: why it is `unsupported` or `unknown`.
    * normalisations: differences that the contract allows (verdict notes `equivalent`), listed and counted, never
      silently equal.
    * emulated: what was not the real thing.
    * not_exercised: what the scenario asks for that the world here cannot put to the test.
    * outside_support: the packages with which upstream never supported the release that ran.
    * known_issue: ids of the known issues that it is due to, joined by `+`.
    * known_by: how that is known.
    * behind: of a failure on a cured library, the known issues that hid it.
    * cured: defects of the library that were cured, by id.
    * not_cured: those whose cure was asked for and does not apply → why.
    * restarted: why a server of ours had to be started again for it; empty for none.
    * shrunk_from: the scenario of a walk that this one was found from, as a simpler one that fails in the same way.
    * chosen: what could be real or emulated → which it was, and why; and `torch`, where ranks had another release than
      the one that is installed here.
    * device: where it ran: `cpu`, or the GPUs and how ranks shared them.
    * loaded_by: release of the ranks that load, where the scenario gives them one of their own (`load_version`).
    * arms: of a trainer's cell, the verdict of each arm. state: what was found on the trainer, or could not be read.
    * sessions: of a trainer's cell, session → the kinds of its operations, in order. They are stored, since a reader of
      a report need not have the trainer's file, without which nobody can say what the program `arms` comes to.
    * courses: of ranks that failed, what each was in when, and how it ended.
    * phases_s: seconds by phase (fork, run, compare …).
    * elements: of what differs, for a reader to look at, packed by `shardproof.tensor_pictures`. No part of the JSON
      form, and no part of what makes two results equal.
    """

    scenario: Scenario
    system: str
    version: str
    verdict: Verdict
    duration_s: float = 0.0
    failed_op: FailedOp | None = None
    differences: tuple[Difference, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    error: Failure | None = None
    reason: str = ""
    reproduced: Reproduced | None = None
    normalisations: tuple[Difference, ...] = ()
    known_issue: str | None = None
    known_by: str = ""
    behind: str = ""
    shrunk_from: str = ""
    restarted: str = ""
    emulated: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()
    outside_support: tuple[str, ...] = ()
    cured: tuple[str, ...] = ()
    not_cured: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    loaded_by: str = ""
    arms: tuple[ArmResult, ...] = ()
    state: tuple[str, ...] = ()
    sessions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    courses: tuple[RankCourse, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)
    elements: bytes = field(default=b"", compare=False, repr=False)

    @property
    def id(self) -> str:
        return self.scenario.id

    @property
    def counts_as(self) -> Standing:
        """The category under which reports count the result: `new` or `known` for failures, else the verdict's name."""
        if self.verdict.is_failure:
            return Standing.NEW if self.known_issue is None else Standing.KNOWN
        return Standing(self.verdict.value)

    @property
    def standing(self) -> str:
        """How a failure stands to the known issues, for a reader; empty for one that is new and in front."""
        if self.behind:
            return f"new behind {self.behind}"
        how = _KNOWN_BY.get(self.known_by, "")
        return f"known issue {self.known_issue}{how}" if self.known_issue else ""

    @property
    def replay(self) -> str:
        """The shell command that runs the scenario again."""
        torch = self.chosen.get("torch", "")
        return f"shardproof replay {self.id}" + (f" --torch {torch}" if torch else "")

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """What failed, in the words that known issues match.

        Differences count at the first operation that has any: what follows from them is no separate evidence. An
        error is evidence of its own, at the operation that raised.
        """
        found = []
        for op in self._first_ops:
            texts = sorted({describe(d) for d in self.differences if d.key.op == op})
            found += [Evidence(self.kind_of(op), text) for text in texts]
        found = list(dict.fromkeys(found))
        if self.error is not None:
            text = f"{self.error.type.rpartition('.')[2]}: {_first_line(self.error.message)}{_raised_at(self.error)}"
            found.append(Evidence(self.kind_of(self.error.op), text))
        return tuple(found)

    @property
    def _first_of_arms(self) -> tuple[int, ...]:
        """Of each arm of a trainer's cell that differs, the first operation at which it does. What a session's files
        hold is an arm of its own."""
        if not self.operations:
            return ()
        sessions = {index: session for index, (session, _) in enumerate(self.operations)}
        first: dict[tuple[str, str], int] = {}
        for op, where in sorted({(d.key.op, d.key.where) for d in self.differences}):
            first.setdefault((sessions.get(op, ""), where), op)
        return tuple(dict.fromkeys(first.values()))

    @cached_property
    def operations(self) -> tuple[tuple[str, str], ...]:
        """Arm and kind of each operation of the program, in order; none where another release of shardproof stored a
        program that this one does not know, or where a trainer's file is missing and the result does not say."""
        if self.sessions:
            return tuple((session, kind) for session, kinds in self.sessions.items() for kind in kinds)
        try:
            return tuple((op.arm, op.kind) for op in expand(self.scenario))
        except UsageError:
            return ()

    @property
    def failed_arm(self) -> ArmResult | None:
        """The first arm of a trainer's cell that failed; where none failed, the first without a verdict."""
        failed = (arm for arm in self.arms if Verdict(arm.verdict).is_failure)
        unknown = (arm for arm in self.arms if arm.verdict == Verdict.UNKNOWN.value)
        return next(failed, None) or next(unknown, None)

    @property
    def headline_arm(self) -> ArmResult | None:
        """The failed arm that a headline tells: where a save left something out, the arm that looks into files, since
        what a load then lacks follows from it."""
        first = min(self.differences, key=lambda difference: difference.key.op, default=None)
        failed = (arm for arm in self.arms if Verdict(arm.verdict).is_failure)
        saved = (arm for arm in failed if first is not None and arm.name == first.key.where)
        return next(saved, None) or self.failed_arm

    @property
    def aftermath(self) -> tuple[str, ...]:
        """What differed at operations after the first that failed: it may follow from the first, or be something
        else."""
        seen = self._first_ops
        return tuple(sorted({describe(d) for d in self.differences if d.key.op not in seen}))

    def differences_of(self, item: Evidence) -> list[Difference]:
        """The differences that a piece of evidence stands for; with `LATER` for its operation, one of the aftermath."""
        return self._by_evidence.get(item, [])

    @cached_property
    def _by_evidence(self) -> dict[Evidence, list[Difference]]:
        seen = self._first_ops
        found: dict[Evidence, list[Difference]] = {}
        for difference in self.differences:
            op = difference.key.op
            at = self.kind_of(op) if op in seen else LATER
            found.setdefault(Evidence(at, describe(difference)), []).append(difference)
        return found

    @cached_property
    def _first_ops(self) -> tuple[int | None, ...]:
        """The first operation that differs; of a trainer's cell that of each arm."""
        return self._first_of_arms if self.arms else (min((d.key.op for d in self.differences), default=None),)

    def kind_of(self, op: int | None) -> str:
        """The kind of an operation of the program; empty for none."""
        if op is None or not 0 <= op < len(self.operations):
            return ""
        return self.operations[op][1]

    @cached_property
    def signature(self) -> str:
        """Equal for failures that look alike, whatever their mesh, dtype or model; empty without a failure."""
        if not self.verdict.is_failure and self.verdict is not Verdict.UNKNOWN:
            return ""
        shown: dict[str, list[str]] = {}
        for item in self.evidence:
            shown.setdefault(item.op, []).append(item.text)
        what = "; ".join(f"{op}: {', '.join(texts)}" if op else ", ".join(texts) for op, texts in shown.items())
        why = self.reason.split("\n", 1)[0]
        return f"{self.system} {self.verdict.value}: {what or why or 'no evidence'}"

    def to_json(self) -> dict[str, Any]:
        """The result by the command line's contract; JSON types only."""
        return {
            "id": self.id,
            "scenario": self.scenario.axis_values(),
            "system": self.system,
            "version": self.version,
            "loaded_by": self.loaded_by,
            "verdict": self.verdict.value,
            "failed_op": to_plain(self.failed_op),
            "differences": differences_to_json(self.differences),
            "explanations": explanations_to_json(self.explanations),
            "error": to_plain(self.error),
            "emulated": list(self.emulated),
            "not_exercised": list(self.not_exercised),
            "outside_support": list(self.outside_support),
            "cured": list(self.cured),
            "not_cured": dict(self.not_cured),
            "chosen": dict(self.chosen),
            "device": self.device,
            "duration_s": self.duration_s,
            "known_issue": self.known_issue,
            "known_by": self.known_by,
            "behind": self.behind,
            "shrunk_from": self.shrunk_from,
            "restarted": self.restarted,
            "reason": self.reason,
            "reproduced": to_plain(self.reproduced),
            "normalisations": differences_to_json(self.normalisations),
            "signature": self.signature,
            "phases_s": dict(self.phases_s),
            **({"courses": to_plain(self.courses)} if self.courses else {}),
            **(self._of_a_trainer() if self.arms else {}),
        }

    def _of_a_trainer(self) -> dict[str, Any]:
        """The part of the JSON form that only a trainer's cell has."""
        return {"arms": to_plain(self.arms), "state": list(self.state), "sessions": to_plain(self.sessions)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """Read what `to_json` wrote; keys that this release does not know are ignored.

        Raises:
            UsageError: the scenario has an axis or value that this release does not know.
            KeyError, TypeError, ValueError, AttributeError: it is none that `to_json` wrote.
        """
        plain = fields_from_plain(cls, data, _PLAIN_FIELDS)
        return cls(
            scenario=Scenario.from_axes(from_plain(Mapping[str, str], data["scenario"])),
            verdict=Verdict(data["verdict"]),
            failed_op=from_plain(FailedOp | None, data["failed_op"]),
            differences=differences_from_json(data["differences"]),
            explanations=explanations_from_json(data["explanations"]),
            error=from_plain(Failure | None, data["error"]),
            reproduced=from_plain(Reproduced | None, data["reproduced"]),
            normalisations=differences_from_json(data["normalisations"]),
            arms=from_plain(tuple[ArmResult, ...], data.get("arms", [])),
            state=tuple(data.get("state", ())),
            courses=from_plain(tuple[RankCourse, ...], data.get("courses", [])),
            sessions=from_plain(Mapping[str, tuple[str, ...]], data.get("sessions", {})),
            **plain,
        )


def with_elements(result: Result) -> dict[str, Any]:
    """The JSON form with the elements in it, for a way on which nothing else travels: `from_elements` reads it."""
    kept = {"elements": base64.b64encode(result.elements).decode()} if result.elements else {}
    return {**result.to_json(), **kept}


def from_elements(data: Mapping[str, Any]) -> Result:
    """Read what `with_elements` wrote, or `to_json`."""
    return replace(Result.from_json(data), elements=base64.b64decode(data.get("elements", "")))


_PLAIN_FIELDS = (
    "system", "version", "duration_s", "reason", "known_issue", "known_by", "behind", "shrunk_from", "restarted",
    "emulated", "not_exercised", "outside_support", "cured", "not_cured", "chosen", "device", "loaded_by", "phases_s",
)  # fmt: skip
"""Fields of a result whose JSON form is that of their type."""


def describe(difference: Difference) -> str:
    """What kind of difference it is, in the words of known issues: `exp_avg bits`, `written step missing`."""
    where = "" if difference.key.where == LIVE else f"{difference.key.where} "
    return f"{where}{difference.key.role} {difference.kind}"


def differences_to_json(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    """Differences by the contract: `name`, `role`, `op_index` and `where` in place of the key."""
    return [_difference_to_json(difference) for difference in differences]


def differences_from_json(data: Iterable[Mapping[str, Any]]) -> tuple[Difference, ...]:
    """Read what `differences_to_json` wrote."""
    return tuple(_difference_from_json(item) for item in data)


def explanations_to_json(explanations: Iterable[Explanation]) -> list[dict[str, Any]]:
    """Explanations by the contract."""
    return [to_plain(explanation) for explanation in explanations]


def explanations_from_json(data: Iterable[Mapping[str, Any]]) -> tuple[Explanation, ...]:
    """Read what `explanations_to_json` wrote."""
    return tuple(from_plain(Explanation, item) for item in data)


def _difference_to_json(difference: Difference) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(difference)
    key = plain.pop("key")
    return {"name": key["fqn"], "role": key["role"], "op_index": key["op"], "where": key["where"], **plain}


def _difference_from_json(data: Mapping[str, Any]) -> Difference:
    key = Key(data["op_index"], data["where"], data["role"], data["name"])
    difference: Difference = from_plain(Difference, {**data, "key": to_plain(key)})
    return difference


def _raised_at(error: Failure) -> str:
    """The place in the library that raised, as known issues name it: ` at FILE, FUNCTION` of the innermost frame
    below site-packages that is not ours, which an emulated device adds. Empty for a deadline, which nothing raised."""
    frames = re.findall(rf'File "[^"]*{LIBRARY}([^"]+)", line \d+, in (\S+)', error.traceback)
    return f" at {frames[-1][0]}, {frames[-1][1]}" if frames and error.type not in ("deadline", "died") else ""


_PEER_WENT = (
    r"(?:Read|Write) error (\[\S+\]:\d+): (?:Connection reset by peer|Broken pipe)\. "
    r"This is typically caused by a remote worker hanging or bugs in the application\."
)
"""Another text of gloo's for a peer that ended. Which of them comes is a race of its sockets, not another failure."""


def _first_line(message: str) -> str:
    """The first line of an error, with what varies between scenarios masked: numbers, tensors, addresses and paths."""
    line = message.strip().split("\n", 1)[0]
    gone = r"Connection closed by peer \1. This is typically caused by a remote worker crashing."
    line = re.sub(_PEER_WENT, gone, line)
    line = line[:200]
    line = re.sub(r"(/[\w.\-]+){2,}", "PATH", line)
    line = re.sub(r"\btensor\(.*", "tensor(…)", line)
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "N", line)
