"""What the arms of a trainer's cell share while they are judged: sessions, their observations, and what was found."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Self

from shardproof.diff import LAZY_STATE, Difference, diff
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Problem, Value
from shardproof.observe.record import LIVE, Record
from shardproof.observe.settings import SETTING
from shardproof.program import Op
from shardproof.result import ArmResult, Failure
from shardproof.scenario import Scenario
from shardproof.trainer import arms
from shardproof.trainer.arms import AT_THE_END, NO_STATE, NOTE, TIED, Session
from shardproof.trainer.data.given import (
    Given,
    elements_by_op,
    given_by_op,
    rows_by_op,
)
from shardproof.trainer.data.packed import numbers_given_by_op
from shardproof.trainer.data.shares import OfRanks as Shares
from shardproof.trainer.data.shares import shares_by_op
from shardproof.trainer.described import Described
from shardproof.trainer.judge.mechanism import mechanism
from shardproof.trainer.judge.twin import Told
from shardproof.trainer.lines.ends import End, ends_by_op
from shardproof.trainer.lines.lines_of_ranks import (
    drawn_by_ranks,
    left_alone,
    made_apart,
    of_ranks,
    scaled_by_ranks,
    touched_by_ranks,
)
from shardproof.trainer.lines.lines_of_state import that_ended
from shardproof.trainer.lines.statements import Moment, ran_by_op, unevenly_reduced
from shardproof.trainer.lines.statements import OfRanks as RanOfRanks
from shardproof.trainer.observed import records_of
from shardproof.trainer.step.calls import OfRanks, calls_by_op
from shardproof.trainer.step.collectives import OfRank, collectives_by_op, not_reduced
from shardproof.trainer.step.measured import OfStep, measured_by_op
from shardproof.trainer.step.model_calls import Call, model_calls_by_op
from shardproof.trainer.step.samples import Samples, samples_by_op
from shardproof.trainer.step.shared import Names, shared_by_op
from shardproof.trainer.values import wording
from shardproof.trainer.values.every_mesh import OF_A_RANK, fits, is_transient, without_rank
from shardproof.trainer.values.gradients import GRADIENT, ZEROS, OfParameters, gradients_by_op
from shardproof.trainer.values.notes import MADE_TOO_EARLY, OF_BEFORE, matches_nothing, shared_out_by_hand
from shardproof.trainer.values.pairs import Between
from shardproof.trainer.values.pickled import entry_apart
from shardproof.trainer.values.plain import Numbers, numbers_by_op
from shardproof.trainer.values.ranks_apart import Copies, alike_among, apart, copies_of, shared_out
from shardproof.trainer.values.retyped import of_another_type, same_number
from shardproof.trainer.values.rounding import PARAMS, At, rounded
from shardproof.trainer.values.state_calls import OfRanks as CallsOfRanks
from shardproof.trainer.values.state_calls import state_calls_by_op
from shardproof.trainer.values.telling import one_or_many, paragraphs
from shardproof.verdict import Verdict

SPOILT = "A save changes this trainer, as `unsaved` tells: what this is held against may be spoilt by that."


@dataclass
class Judging:
    """The judgement of one cell: its sessions, the observations of each, and the arms judged so far.

    element_by_element: the optimizer is one of torch's that steps each element alone, so that no mesh rounds otherwise.
    between: what was compared last.
    retyped: numbers of schedules that came back in another type, since the latest arm.
    without_effect: random states in which two sessions differed, while all that later steps made was the same.
    calls: operation → what modules came to in it, where an axis must not matter to the bit.
    given: operation → what the model was given in it. rows, elements: → how many that were, on all ranks.
    gradients: operation → what optimizers had of each parameter in it.
    shared: operation → the names of parameters that have several, where there is a way that must compute the same.
    plain: operation → the plain numbers on rank 0 after it.
    copies: what ranks have differently where they first do. collectives: operation → rank → what it took part in.
    samples: operation → what the loss made of each sample. model_calls: → rank → the calls of its model.
    measured: operation → rank → what it did to gradients. ran: → which of the trainer's statements ran.
    state_calls: → whose state was asked for or given. numbers_given: → rank → whole numbers that its models were given.
    ends: operation of a `fit` → what there was when it had returned, and what ran behind its last update.
    ties: two names that the trainer calls one parameter, and an operation → what the ranks said of them after it.
    """

    scenario: Scenario
    trainer: Described
    sessions: tuple[Session, ...]
    observed: Logical
    problems: list[Problem]
    notes: list[str]
    told: Mapping[int, Told]
    failures: Mapping[str, Failure]
    directory: Path
    ties: Mapping[tuple[str, int], set[str]]
    calls: Mapping[int, OfRanks]
    given: Mapping[int, Given]
    rows: Mapping[int, int]
    elements: Mapping[int, int]
    gradients: Mapping[int, OfParameters]
    shared: Mapping[int, set[Names]]
    plain: Mapping[int, Numbers]
    copies: Copies
    collectives: Mapping[int, Mapping[int, OfRank]]
    samples: Mapping[int, Samples]
    shares: Mapping[int, Shares]
    model_calls: Mapping[int, Mapping[int, Sequence[Call]]]
    measured: Mapping[int, Mapping[int, OfStep]]
    ran: Mapping[int, RanOfRanks]
    state_calls: Mapping[int, CallsOfRanks]
    numbers_given: Mapping[int, Mapping[int, Sequence[int]]]
    ends: Mapping[int, End]
    found: list[ArmResult] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    unsteady: set[tuple[str, str]] = field(default_factory=set)
    without_effect: set[tuple[str, str]] = field(default_factory=set)
    element_by_element: bool = False
    rounding: bool = False
    looked_at: int = 0
    retyped: set[str] = field(default_factory=set)
    between: Between | None = None

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Self:
        """What a request names."""
        scenario = Scenario.from_axes(request["scenario"])
        trainer, sessions = arms.trainer_of(scenario), arms.sessions_of(scenario)
        records: list[Record] = []
        failures = {name: Failure(**error) for name, error in request["failures"].items()}
        for session, paths in zip(sessions, request["observations"], strict=False):
            records += records_of(paths, session, whole=session.name not in failures)
        notes = [r.data.decode() for r in records if r.role == NOTE]
        ends, records = ends_by_op(records), [r for r in records if r.where != AT_THE_END]
        logical, problems = assemble([r for r in records if r.role not in NO_STATE])
        own = shared_out(records, problems)
        problems = [problem for problem in problems if problem.key not in own]
        notes += [shared_out_by_hand({(key.role, key.fqn) for key in own})] if own else []
        ties: dict[tuple[str, int], set[str]] = {}
        for record in records:
            if record.role == TIED:
                ties.setdefault((record.fqn, record.op), set()).add(record.data.decode())
        return cls(
            scenario, trainer, sessions, logical, list(problems), list(dict.fromkeys(notes)), Told.by_op(records),
            failures, Path(request["directory"]), ties, calls_by_op(records), given_by_op(records), rows_by_op(records),
            elements_by_op(records),
            gradients_by_op(records), shared_by_op(records), numbers_by_op(records), copies_of(records, problems),
            collectives_by_op(records), samples_by_op(records), shares_by_op(records), model_calls_by_op(records),
            measured_by_op(records),
            ran_by_op(records), state_calls_by_op(records),
            numbers_given_by_op(records), ends,
        )  # fmt: skip

    def named(self, kind: str) -> Session | None:
        """The session of that kind; None where the program has none."""
        return next((session for session in self.sessions if session.kind == kind), None)

    @property
    def whole(self) -> Session:
        return self.sessions[0]

    @cached_property
    def _by_op(self) -> dict[int, dict[tuple[str, str], Value]]:
        found: dict[int, dict[tuple[str, str], Value]] = {}
        for key, value in self.observed.items():
            found.setdefault(key.op, {})[key.role, key.fqn] = value
        return found

    @property
    def seen(self) -> Collection[int]:
        """The operations after which something was observed."""
        return self._by_op.keys()

    def at(self, op: int) -> dict[tuple[str, str], Value]:
        """What was observed after an operation, without what is unsteady."""
        return {key: value for key, value in self._by_op.get(op, {}).items() if key not in self.unsteady}

    def step(self, session: Session, iteration: int) -> int:
        """The operation of a session that is the step of an iteration; -1 where it has none."""
        return next((op.index for op in session.ops if op.kind == "step" and op.iteration == iteration), -1)

    @cached_property
    def before(self) -> int:
        return arms.program_of(self.trainer, self.scenario.program)[0]

    @property
    def saved(self) -> int:
        """The operation of the uninterrupted session whose state a checkpoint has."""
        save = self.whole.first("save")
        return save if save >= 0 else self.step(self.whole, self.before - 1)

    @cached_property
    def idle(self) -> set[tuple[str, str]]:
        """Generators from which nothing is drawn after the save: whether a load restores them has no effect."""
        first, last = self.at(self.saved), self.at(self.whole.ops[-1].index)
        return {key for key, value in first.items() if key[0] in OF_A_RANK and last.get(key) == value}

    @cached_property
    def seeded_anew(self) -> set[tuple[str, str]]:
        """Generators that a load does not restore, and that every step seeds: after each they are what they are in the
        run without a break. So what they are right after the load has no effect, and after a step they are compared."""
        resumed = self.named(arms.RESUMED)
        pairs = list(self.in_turn(resumed, self.whole)) if resumed else []
        if resumed is None or not pairs:
            return set()
        loaded, saved = self.at(self.loaded(resumed)), self.at(self.saved)
        after = [(self.at(one), self.at(other)) for one, other in pairs]
        return {key for key in saved if key[0] in OF_A_RANK and loaded.get(key) not in (None, saved[key])
                and all(one.get(key) == other.get(key) is not None for one, other in after)}  # fmt: skip

    @cached_property
    def transient(self) -> set[tuple[str, str]]:
        """What no checkpoint need hold, such as a loss that `state()` names: right after a load it may be anything."""
        return {name for name in self._observed_names if is_transient(name, self.trainer.transient)}

    @cached_property
    def _observed_names(self) -> set[tuple[str, str]]:
        return {(key.role, key.fqn) for key in self.observed}

    def patterns_of_nothing(self) -> list[str]:
        """A sentence for each pattern of names that fits none, as after a slip of the pen."""
        names = {(role, without_rank(name)) for role, name in self._observed_names}
        rows = [("transient", pattern, {" ".join(name) for name in names}) for pattern in self.trainer.transient]
        rows += [("local", pattern, {name for _, name in names}) for pattern in self.trainer.local]
        rows += [
            ("frozen", pattern, {name for role, name in names if role == PARAMS}) for pattern in self.trainer.frozen
        ]
        return [matches_nothing(*row) for row in rows if not any(fits(name, [row[1]]) for name in row[2])]

    def ranks_apart(self) -> str:
        """Why ranks may have a parameter differently, by what the first step made that parts them."""
        key = wording.first_problem(self.problems).key
        before, value = self.at(key.op - 1), self.at(key.op).get((key.role, key.fqn))
        if one := apart(self.copies, before, self.at(key.op)):
            return one.told()
        numbers = prod(value.shape) if value else 0
        reduced = not_reduced(numbers, self.collectives.get(key.op, {})) if numbers else ""
        reduced += self._reduced_in_others(key.op, numbers) if reduced else ""
        return wording.of_own_gradient(" ".join(filter(None, (alike_among(self.copies.get(key, {})), reduced))))

    def _reduced_in_others(self, op: int, numbers: int) -> str:
        """In which other steps of a session something is reduced that may be a gradient, where it is not in one, as a
        sentence with a space in front; empty where it is in none."""
        session = self._session_of(op)
        others = [each for each in session.ops if each.kind == "step" and each.index != op]
        ranks = [self.collectives.get(each.index, {}) for each in others]
        steps = [str(each.iteration) for each, own in zip(others, ranks, strict=True)
                 if len(own) > 1 and not not_reduced(numbers, own)]  # fmt: skip
        return f" In step{'s' * (len(steps) > 1)} {', '.join(steps)} of the same run it is." if steps else ""

    def _session_of(self, op: int) -> Session:
        return next(each for each in self.sessions if each.ops[0].index <= op <= each.ops[-1].index)

    def lines_of_ranks(self) -> str:
        """What the trainer's own lines say of the first operation after which ranks disagree."""
        op = wording.first_problem(self.problems).key.op
        ran = self.ran.get(op, {})
        wrong = {problem.key.fqn for problem in self.problems if problem.key.op == op and problem.key.role == PARAMS}

        def told() -> str:
            alone, uneven = (left_alone(ran[0], wrong), unevenly_reduced(ran[0])) if 0 in ran else ("", "")
            drawn = self._drawn_and_not_reduced(op, sorted(wrong)) if wrong else ""
            builds = any(each.index == op and each.kind == "build" for each in self._session_of(op).ops)
            drawn = drawn or (made_apart(ran, wrong) if builds else "")
            return paragraphs(of_ranks(ran), touched_by_ranks(ran) or alone, scaled_by_ranks(ran), uneven, drawn)

        return self.explained(told)

    def _drawn_and_not_reduced(self, op: int, wrong: Sequence[str]) -> str:
        """Of parameters that ranks have differently after a build: which lines of it draw otherwise on each rank, and
        that nothing is reduced in the first step that may be a gradient of one."""
        session = self._session_of(op)
        build, *later = (each for each in session.ops if each.index >= op)
        if build.kind != "build":
            return ""
        step = next((each.index for each in later if each.kind == "step"), -1)
        values, ranks = self.at(op), self.collectives.get(step, {})
        sizes = {name: prod(values[PARAMS, name].shape) for name in wrong if (PARAMS, name) in values}
        given = {name for name, word in self.gradients.get(step, {}).items() if word in (GRADIENT, ZEROS)}
        alone = {name: why for name, size in sizes.items() if name in given and (why := not_reduced(size, ranks))}
        seen = f"Gradients of {one_or_many([*alone])} are not seen to be reduced in the first step." if alone else ""
        gradients = f"{seen} {next(iter(alone.values()))}" if alone else ""
        return paragraphs(drawn_by_ranks([Moment(build, self.ran.get(op, {}))]), gradients)

    def compare(self, expected: At, observed: At, op: int, leave: Iterable[tuple[str, str]] = ()) -> list[Difference]:
        """What differs between two moments, as differences of operation `op`."""
        left_out = {*leave, *self.unsteady}

        def logical(values: At) -> Logical:
            return {Key(op, LIVE, *key): value for key, value in values.items() if key not in left_out}

        left = logical(expected)
        self.looked_at += len(left)
        found = diff(left, logical(observed), (), (LAZY_STATE,))
        session = self._session_of(op)
        before = self._by_op.get(op - 1, {}) if op > session.ops[0].index else {}
        settings = {name: value for name, value in self._by_op.get(op, {}).items() if name[0] == SETTING}
        steps = [one for one in session.ops if one.kind == "step" and one.index <= op]
        step = steps[-1].iteration if steps and steps[-1].index == op else -1
        loads = any(each.index == op and each.kind == "load" for each in session.ops)
        earlier = sum(one.index in self._moving for one in steps[:-1])
        self.between = Between(
            expected, observed, before, session.ops[0].mesh.world, settings=settings, step=step, earlier=earlier,
            gradients=self.gradients.get(op, {}), loaded=loads, seed=arms.seed_of(self.scenario, session.ops[0]),
        )  # fmt: skip
        same = {
            d
            for d in found
            if same_number(expected.get((d.key.role, d.key.fqn)), observed.get((d.key.role, d.key.fqn)))
        }
        self.retyped |= {d.key.fqn for d in same}
        return [_with_entry(d, expected, observed) for d in found if d.fails and d.key.role and d not in same]

    @cached_property
    def _moving(self) -> frozenset[int]:
        """The operations that change a parameter, which a step at a rate of zero does not."""
        return frozenset(
            op for op, after in self._by_op.items()
            if any(self._by_op.get(op - 1, {}).get(name) != value for name, value in after.items() if name[0] == PARAMS)
        )  # fmt: skip

    def add(self, name: str, found: list[Difference], sentence: str, notes: Iterable[str] = ()) -> None:
        """An arm's verdict: a mismatch if anything differs, and no verdict if there was nothing to compare."""
        told, looked_at = [*notes, *([wording.ROUNDING] if self.rounding else [])], self.looked_at
        told += [of_another_type(self.retyped)] if self.retyped else []
        self.rounding, self.looked_at, self.retyped = False, 0, set()
        if not found and not looked_at:
            why = wording.ALL_UNSTEADY if self.unsteady else wording.NOTHING_IN_COMMON
            self.not_compared(name, "; ".join([why, *notes]))
            return
        parted = not found and self._parted(name)
        verdict = Verdict.MISMATCH if found or parted else Verdict.PASS
        made = self._mechanism(found) if found else ""
        said = (paragraphs(sentence, made) if "\n" in sentence else f"{sentence} {made}".strip()) if found else ""
        if said and self.save_changes and name != arms.UNSAVED:
            said = paragraphs(said, SPOILT)
        disagreed = {p.key[2:] for p in self.problems}
        if parted or (found and {d.key[2:] for d in found} <= disagreed):
            said = wording.SAME_AS_AGREE
        self.found.append(ArmResult(name, verdict.value, said, tuple(told)))
        self.differences += found

    @property
    def save_changes(self) -> bool:
        """Whether the arm `unsaved` has failed already."""
        return any(arm.name == arms.UNSAVED and arm.verdict == Verdict.MISMATCH.value for arm in self.found)

    def _mechanism(self, found: list[Difference]) -> str:
        """What may have made these differences, in words."""
        between = self.between
        if self.unsteady or between is None:  # what is not the same twice may have made any difference
            return ""
        return self.explained(lambda: mechanism(found, between))

    def explained(self, explain: Callable[[], str]) -> str:
        """What an explanation says. One that raises is a mistake of ours, and takes no verdict away."""
        try:
            return explain()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}, line {where.lineno}"
            return f"(What explains it is not known: shardproof raised {type(error).__name__} in {place}: {error}.)"

    def _parted(self, name: str) -> bool:
        """Whether ranks disagree in the session of that name about what they agree on in the uninterrupted one. What is
        compared is what most of them have, which may be right."""
        session = next((session for session in self.sessions if session.name == name), None)
        if session is None:
            return False
        spans = [range(each.ops[0].index, each.ops[-1].index + 1) for each in (session, self.whole)]
        own, always = ({p.key[2:] for p in self.problems if p.key.op in span} for span in spans)
        return bool(own - always)

    def not_compared(self, name: str, why: str) -> None:
        """An arm that nothing can be said of: never a pass."""
        self.found.append(ArmResult(name, Verdict.UNSUPPORTED.value, why))

    def ended(self, session: Session) -> bool:
        """Whether a session failed, which then is the verdict of its arm."""
        error = self.failures.get(session.name)
        if error is not None:
            told = wording.of_failure(session, error, self.trainer)
            here = told.verdict == Verdict.CRASH.value and session.kind != arms.OTHER
            early = here and any(note.endswith(OF_BEFORE) for note in self.notes)
            self.found.append(replace(told, sentence=f"{told.sentence}. {MADE_TOO_EARLY}") if early else told)
        return error is not None

    def in_turn(self, session: Session, other: Session) -> Iterator[tuple[int, int]]:
        """The operations of the steps that two sessions share, after the save."""
        for op in session.ops:
            there = self.step(other, op.iteration)
            seen = op.index in self._by_op or not self.trainer.fits
            if op.kind == "step" and op.iteration >= self.before and there >= 0 and seen:
                yield there, op.index

    def on_ranks_apart(self, session: Session, other: Session, ops: tuple[int, int]) -> set[tuple[str, str]]:
        """What ranks have differently where two sessions are compared: after two operations, and after the steps that
        they share."""
        seen = {*ops, *(op for pair in self.in_turn(session, other) for op in pair)}
        conflicts = (one.key for one in self.problems if one.kind == "replica_conflict" and one.key.op in seen)
        return {(key.role, key.fqn) for key in conflicts}

    def with_its_end(self, session: Session, found: list[Difference], sentence: str) -> tuple[list[Difference], str]:
        """The differences of a session and their sentence or, where nothing else differs and a session with `fit` made
        fewer updates than it should have, that."""
        steps = [op for op in session.ops if op.kind == "step"]
        missing = [op.iteration for op in steps if op.index not in self._by_op]
        if found or not missing or not self.trainer.fits:
            return found, sentence
        ended = self.ends.get(session.ops[0].index)
        not_made = Difference(Key(steps[-1].index, LIVE, "step", "every parameter"), "missing", mismatched=1, total=1)
        return [not_made], (
            f"The run ends after {len(steps) - len(missing)} of {len(steps)} updates, without an error: step "
            f"{missing[0]} is not made, which the run without a break makes. Look at what a resumed run takes for the "
            f"end of its data or of its steps.{self.explained(lambda: that_ended(ended.ran)) if ended else ''}"
        )

    def steps_differ(
        self, session: Session, other: Session, leave: Iterable[tuple[str, str]] = (), *, rounds: bool
    ) -> list[Difference]:
        """The differences of the first shared step after which two sessions differ.

        Args:
            rounds: whether the processes of the two have another past, so that three ranks and more may add up their
                gradients in another order. What that makes is no difference, and the arm notes it; random states that
                differ beside it stay.
        """
        for there, here in self.in_turn(session, other):
            expected, observed = self.at(there), self.at(here)
            if found := self.compare(expected, observed, here, leave):
                ranks = session.ops[0].mesh.world
                if not rounds or self.exact:
                    return found
                beyond = [one for one in found if not rounded(one, expected, observed, ranks)]
                if any(one.key.role not in OF_A_RANK for one in beyond):
                    return found
                self.rounding = len(beyond) < len(found)
                return beyond
        return []

    @property
    def loads_data(self) -> bool:
        """Whether a loader hangs on the trainer, or an iterator of which nobody knows where it is."""
        return any(note.startswith(("found: ", "hidden: ")) and ": loader, " in note for note in self.notes)

    def loaded(self, session: Session) -> int:
        """The operation after which a session has what it loaded; -1 where only steps are observed."""
        return session.first("load")

    @property
    def exact(self) -> bool:
        """Whether gradients are exact, so that steps on another mesh come to the same bits."""
        return any(note == wording.PROBED for note in self.notes)


def step_of(session: Session, found: Sequence[Difference]) -> Op | None:
    """The step of a session after which it differs; None where it differs after anything else, or nowhere."""
    return next((op for op in session.ops if found and op.kind == "step" and op.index == found[0].key.op), None)


def _with_entry(difference: Difference, expected: At, observed: At) -> Difference:
    """A difference of pickled bytes with the entry that differs; any other as it is."""
    key = difference.key.role, difference.key.fqn
    one, other = expected.get(key), observed.get(key)
    entry = entry_apart(one, other) if difference.kind in ("bits", "shape") and one and other else ""
    return replace(difference, detail=entry) if entry else difference
