"""Judges a trainer's cell: puts the observations of its arms side by side, bit for bit. Runs in a warm worker.

    arm           what is compared                                       what must hold
    twice         the uninterrupted session, in two worlds               equal, or not deterministic
    tied          names of one parameter, after every operation          one parameter, or one memory
    trains        the parameters, and counts of their steps              some move, or no other arm sees anything; no
                                                                         frozen one does; counts grow
    twin          each step, with torch's optimizer on whole tensors     equal, where gradients are exact (`twin`)
    unsaved       before and after the save; the same steps without one  saving changes nothing
    cut           the run that stops early, with the one that does not   equal as far as it goes
    resumed       after the load and each step, with the uninterrupted   equal
    cold          before the load, with what was saved                   other parameters, or a load cannot be seen
    used          a trainer that has stepped, and loads                  equal to a fresh one that loads
                  its second load of a folder that was written again     what was saved last
    again         the checkpoint, and what is saved right after its load equal files' contents
    other mesh    what the load gives on another mesh                    equal logical values; with `probe` after steps
    written       the bytes of what is live, in the files                all of it is there
    altered       a setting that differs from the checkpoint's           the one that is declared to win, wins
    alike         each step, with that of another way to compute it      equal parameters and state of optimizers

What the trainer does not do twice in the same way is named by `twice`, and no other arm claims anything of it.

*Verifies*: each row of the table, of all state that was found. *Does not verify*: state that nobody found, which a
result lists; that the trainer trains well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardproof.diff import Difference, diff
from shardproof.errors import UsageError
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE
from shardproof.observe.settings import SETTING
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.program import ARMS
from shardproof.result import TWIN, ArmResult, differences_to_json
from shardproof.trainer import arms
from shardproof.trainer.arms import (
    ALIKE,
    ALTERED,
    CUT,
    ONE,
    OTHER,
    RESUMED,
    TIED,
    TWICE,
    TWO,
    UNSAVED,
    USED,
    WHOLE,
    Session,
)
from shardproof.trainer.data.epochs import first_epoch_alone
from shardproof.trainer.judge.after_load import Loaded, of_resumed, of_second_load, of_used, refusal
from shardproof.trainer.judge.altered import altered
from shardproof.trainer.judge.at_the_end import end_not_seen, with_the_end
from shardproof.trainer.judge.harmless import beside_random_states, harmless, is_of_a_loader, random_before
from shardproof.trainer.judge.judging import Judging, step_of
from shardproof.trainer.judge.line_by_line import line_by_line
from shardproof.trainer.judge.other_mesh import on_another_mesh
from shardproof.trainer.judge.portrait import axes_of, end_of, portrayed
from shardproof.trainer.judge.saved_and_loaded import (
    never_looked,
    that_left_out,
    that_load,
    that_set,
    whose,
    with_rates,
)
from shardproof.trainer.judge.second_resume import resumed_again
from shardproof.trainer.judge.trains import all_seen, trains
from shardproof.trainer.judge.twin import NoTwin, stepped
from shardproof.trainer.judge.two_ways import alike
from shardproof.trainer.judge.unsteady import likely
from shardproof.trainer.judge.waiting import waiting_at
from shardproof.trainer.judge.whose_data import data_of, samples_of_steps
from shardproof.trainer.step.calls import where_they_part
from shardproof.trainer.values import wording
from shardproof.trainer.values.checkpoints import as_difference, differing, held_under, names_in, numbers_held, of_again
from shardproof.trainer.values.every_mesh import OF_A_RANK, Name
from shardproof.trainer.values.files_hold import absent_from, held_as_in, not_made_by_build, written
from shardproof.trainer.values.gradients import are_frozen
from shardproof.trainer.values.notes import (
    frozen_left_out,
    idle,
    left_by_a_save,
    not_loaded,
    on_ranks_apart,
    rounded_from_saved,
)
from shardproof.trainer.values.plain import left_behind, numbers_left_behind
from shardproof.trainer.values.rounding import PARAMS, At
from shardproof.trainer.values.telling import paragraphs
from shardproof.verdict import Verdict, merge


def serve(payload: bytes) -> bytes:
    """Worker entry. The request is JSON: `scenario` (axes), `directory`, `observations` (files by session) and
    `failures`: session → what ended it. Replies with what `Laboratory` makes a result of."""
    request = json.loads(payload)
    found = Judge.of(request).judged()
    return json.dumps(found).encode()


class Judge(Judging):
    """The arms of one cell."""

    def judged(self) -> dict[str, Any]:
        """All arms in order, in JSON types."""
        self._structure()
        if self._stateless():
            self.found.append(ArmResult(WHOLE, Verdict.UNKNOWN.value, wording.NO_STATE, ()))
        else:
            self._judge_arms()
        verdicts = [Verdict(arm.verdict) for arm in self.found]
        failed = [verdict for verdict in verdicts if verdict.is_failure]  # an arm that is blind hides none of them
        judged = failed or [verdict for verdict in verdicts if verdict is not Verdict.UNSUPPORTED]
        refused = self.failures.get(WHOLE)
        verdict = merge(judged or verdicts)
        return {
            "verdict": verdict.value,
            "arms": [vars(arm) for arm in self.found],
            "differences": differences_to_json(self.differences),
            "normalisations": [], "explanations": [],
            "distrust": refused.message if refused and verdict is Verdict.UNSUPPORTED else "",
            "notes": self.notes,
            "elements": "",
        }  # fmt: skip

    def _judge_arms(self) -> None:
        self.notes += self.patterns_of_nothing()
        self._twice()
        self._tied()
        trains(self)
        self.notes += [*portrayed(self), *([*end_of(self), *axes_of(self)] if WHOLE not in self.failures else [])]
        self._twin()
        self._unsaved()
        self._cut()
        self._resumed()
        resumed_again(self)
        self._cold()
        self._used()
        self._again()
        self._written()
        for session in self.sessions:
            if session.kind == OTHER:
                on_another_mesh(self, session)
            elif session.kind == ALTERED:
                altered(self, session)
            elif session.kind == ALIKE:
                alike(self, session)

    def _structure(self) -> None:
        """Report a session whose ranks disagree: pieces that overlap, or copies of one tensor with other bits."""
        if self.problems:
            self.differences += [d for d in diff({}, {}, self.problems) if d.key.role]
            told = wording.of_problems(self.problems, self.sessions, self.ranks_apart())
            told = paragraphs(told, self.lines_of_ranks())
            self.found.append(ArmResult(wording.AGREE, Verdict.MISMATCH.value, told, ()))

    def _stateless(self) -> bool:
        """Whether the uninterrupted session ran, and nothing but random generators was found on the trainer."""
        last = self._by_op.get(self.whole.ops[-1].index, {})
        return WHOLE not in self.failures and all(role in OF_A_RANK for role, _ in last)

    def _twice(self) -> None:
        whole, twice = self.whole, self.named(TWICE)
        if self.ended(whole):
            self._ends_after_the_save()
            return
        if twice is None:
            self.found.append(ArmResult(WHOLE, Verdict.PASS.value, "", ()))
            return
        if self.ended(twice):
            return
        for one, other in zip(whole.ops, twice.ops, strict=True):
            first, second = self._by_op.get(one.index, {}), self._by_op.get(other.index, {})
            new = {key for key in {*first, *second} if first.get(key) != second.get(key)} - self.unsteady
            if new and not self.unsteady:
                differing, self.looked_at = self.compare(first, second, other.index), 0
                calls = [self.calls.get(op.index, {}) for op in (one, other)]
                parted = where_they_part(calls[0], calls[1], ("In one run", "In the other run"))
                why = likely(differing, one.kind, (first, second), self._by_op.get(one.index - 1, {}))
                lines = line_by_line(self, twice, whole, differing, ("one run", "the other"))
                told = paragraphs(" ".join(filter(None, (wording.of_unsteady(differing, one, why), parted))), lines)
                self.found.append(ArmResult(TWICE, Verdict.NONDETERMINISTIC.value, told, ()))
                self.differences += differing
            self.unsteady |= new
        if not self.unsteady:
            self.found.append(ArmResult(TWICE, Verdict.PASS.value, "", ()))

    def _ends_after_the_save(self) -> None:
        """Say that the same steps come to their end where nothing is saved."""
        error, save, unsaved = self.failures[WHOLE], self.whole.first("save"), self.named(UNSAVED)
        ends = unsaved is not None and unsaved.name not in self.failures and unsaved.ops[-1].index in self._by_op
        if (error.op or 0) > save >= 0 and ends:
            self.found[-1] = replace(self.found[-1], sentence=f"{self.found[-1].sentence}. {wording.WITHOUT_SAVE}")

    def _tied(self) -> None:
        """Look for names that the trainer calls one parameter, and that are two after some operation."""
        if not self.ties:
            return
        for session in self.sessions:
            for op in session.ops:
                two = sorted(name for (name, at), told in self.ties.items() if at == op.index and TWO in told)
                if two:
                    self.differences += [untied(name, op.index) for name in two]
                    told = wording.of_untied(two, session, op, self.at(op.index))
                    self.found.append(ArmResult(TIED, Verdict.MISMATCH.value, told, ()))
                    return
        seen = {name for (name, _), told in self.ties.items() if ONE in told}
        unseen = next((name for name, _ in sorted(self.ties) if name not in seen), None)
        if unseen is None:
            self.found.append(ArmResult(TIED, Verdict.PASS.value, "", ()))
            return
        known = {key.fqn for key in self.observed if key.role == PARAMS}
        unknown = [name for name in unseen.split(" = ") if name not in known]
        verdict = Verdict.UNKNOWN if unknown else Verdict.UNSUPPORTED
        self.found.append(ArmResult(TIED, verdict.value, wording.never_tied(unseen, unknown), ()))

    def _twin(self) -> None:
        ops = [op for op in self.whole.ops if op.index in self._by_op]
        if WHOLE in self.failures or not ops:
            return
        found: list[Difference] = []
        try:
            for op, expected, observed in stepped(self.scenario, ops, self.told, self._by_op):
                found = found or self.compare(expected, observed, op.index)
        except NoTwin as reason:
            self.not_compared(TWIN, wording.no_twin(str(reason)))
            return
        self.element_by_element = True
        self.add(TWIN, found, wording.of_twin(found))

    def _unsaved(self) -> None:
        unsaved, save = self.named(UNSAVED), self.whole.first("save")
        if unsaved is None or WHOLE in self.failures or self.ended(unsaved):
            return
        found, beside = list[Difference](), self._left_by_saves(unsaved)
        for at in self._saves() if save >= 0 else ():
            if found := self.compare(self.at(at - 1), self.at(at), at, beside):
                save = at
                break
        at_once = bool(found)
        found = found or self.steps_differ(unsaved, self.whole, beside, rounds=False)
        ways = "the run without a save", "the one that saves"
        if at_once and self.between:
            self.between = replace(self.between, loaded=True)  # no step is between
        lines = that_set(self, save, found, "save") if at_once else line_by_line(self, self.whole, unsaved, found, ways)
        told = paragraphs(wording.of_saving(found, at_once=at_once), lines) if found else ""
        found, told = with_the_end(self, unsaved, found, told, ("in the run that saves", "in the one without"))
        self.add(UNSAVED, found, told, [*([left_by_a_save(beside)] if beside else []), *end_not_seen(self, unsaved)])

    def _left_by_saves(self, unsaved: Session) -> set[Name]:
        """What of the trainer's own is there behind a save alone, such as what it keeps of what it has written, and in
        no step of the run without one."""
        new = {key for at in self._saves() for key in self.at(at).keys() - self.at(at - 1).keys()}
        steps = [self.at(here) for _, here in self.in_turn(unsaved, self.whole)]
        return {key for key in new if key[0] == EXTRA_STATE and not any(key in step for step in steps)}

    def _saves(self) -> list[int]:
        """The saves of the run without a break, and of the resumed one, which may change something at its second
        time alone."""
        sessions = [self.whole, *([each] if (each := self.named(RESUMED)) and RESUMED not in self.failures else [])]
        return [op.index for session in sessions for op in session.ops
                if op.kind == "save" and {op.index, op.index - 1} <= self._by_op.keys()]  # fmt: skip

    def _cut(self) -> None:
        cut = self.named(CUT)
        if cut is None or WHOLE in self.failures or self.ended(cut):
            return
        found: list[Difference] = []
        for op in cut.ops:
            if op.kind == "step" and not found:
                found = self.compare(self.at(self.step(self.whole, op.iteration)), self.at(op.index), op.index)
        self.add(CUT, found, " ".join(filter(None, (wording.of_cut(found), data_of(self, cut, found)))))

    def _resumed(self) -> None:
        resumed = self.named(RESUMED)
        if resumed is None or WHOLE in self.failures or self.ended(resumed):
            return
        load, found = self.loaded(resumed), list[Difference]()
        left, notes = harmless(self, resumed, self.whole)
        if load >= 0:
            found = self.compare(self.at(self.saved), self.at(load), load, self._free_at_load | left)
        found = found or self.steps_differ(resumed, self.whole, self.idle | left, rounds=True)
        at_first = found
        found, more = beside_random_states(self, resumed, self.whole, at_first, self.idle | left)
        at_load = any(one.key.op == load for one in found)
        around = Loaded(self.at(self.saved), self.at(load - 1), self.at(load), self._earlier, self._free_at_load,
                        [(f"after {wording.at(op)}", self.at(op.index)) for op in self.whole.ops
                         if op.kind == "step" and op.index > self.saved],
                        arms.seed_of(self.scenario, resumed.ops[0]))  # fmt: skip
        disagreed = {problem.key[2:] for problem in self.problems if problem.key.op == load >= 0}
        data = data_of(self, resumed, found)
        step, random = step_of(resumed, found), random_before(at_first, found, data)
        sentence = of_resumed(found, around, after_load=at_load, disagreed=disagreed, data=data,
                              step=step.iteration if step else -1, random=random)  # fmt: skip
        if at_load and around.left_alone(found):
            sentence = with_rates(sentence, self, resumed, found)
            sentence = f"{sentence}{'' if never_looked(self, resumed) else self._under_other_names(found)}"
        elif at_load:
            sentence = f"{sentence}{self._numbers_held(found)}"
        if data or (disagreed and not at_load) or self._parameters_apart():
            self.between = None  # what a step made of them is no mechanism
        unseen = self.idle | self.seeded_anew
        notes += [*more, *([idle(unseen)] if unseen else [])]
        unequal = self.on_ranks_apart(resumed, self.whole, (self.saved, load))
        notes += [on_ranks_apart(unequal)] if unequal else []
        notes += [not_loaded(self.transient)] if self.transient and load >= 0 else []
        saves = self.named(CUT) or self.whole
        waits = "" if at_load or not found else waiting_at(self, saves, self.saved)
        ways = ("the run without a break", "the resumed one")
        lines = line_by_line(self, resumed, self.whole, found, ways, random=bool(random))
        loading = that_load(self, load, found) if at_load else ""
        owners = whose(self, resumed, found, at_load=at_load)
        sentence = paragraphs(" ".join(filter(None, (waits, sentence))), owners, loading, lines)
        tried = self.scenario.program != ARMS
        early = "" if found or not self.loads_data else (
            first_epoch_alone(samples_of_steps(self), self.before - 1, tried=tried)
        )  # fmt: skip
        notes += [early] if early else []
        behind = self._left_behind(resumed, load)
        notes += [numbers_left_behind(behind)] if behind else []
        found, sentence = self.with_its_end(resumed, found, sentence)
        found, sentence = with_the_end(self, resumed, found, sentence, (f"in {ways[0]}", f"in {ways[1]}"))
        notes += end_not_seen(self, resumed)
        self.add(RESUMED, found, sentence, notes)

    def _parameters_apart(self) -> bool:
        """Whether ranks had other copies of a parameter in the run without a break, of which a load gives them one."""
        return any(one.key.role == PARAMS and one.key.op <= self.whole.ops[-1].index for one in self.problems)

    def _under_other_names(self, found: list[Difference]) -> str:
        """That the checkpoint has what the load does not restore, under names that the load may not look for."""
        saved = self.at(self.saved)
        lost = {one.key.fqn: saved[PARAMS, one.key.fqn] for one in found if (PARAMS, one.key.fqn) in saved
                and one.key.role == PARAMS}  # fmt: skip
        return wording.under_other_names(held_under(self.directory / f"checkpoint{arms.FIRST}", lost))

    def _numbers_held(self, found: list[Difference]) -> str:
        """That the checkpoint has the right number, of one that is wrong after the load."""
        names, saved = {(one.key.role, one.key.fqn) for one in found}, self.at(self.saved)
        lost = {name[1]: saved[name] for name in names & saved.keys() if name[0] != SETTING}
        return wording.numbers_held(numbers_held(self.directory / f"checkpoint{arms.FIRST}", lost))

    def _left_behind(self, resumed: Session, load: int) -> list[str]:
        """Plain numbers that the resumed run has not; none where no moment of the load or no second run was seen."""
        twice, build, save = self.named(TWICE), self.whole.first("build"), self.whole.first("save")
        if twice is None or load < 0 or not {build, save, load} <= self.plain.keys():
            return []
        again = self.plain.get(twice.first("save"), {})
        steps = [
            (self.plain.get(one, {}), self.plain.get(other, {})) for one, other in self.in_turn(resumed, self.whole)
        ]
        found = left_behind(self.plain[build], self.plain[save], again, self.plain[load], steps)
        compared = {key.fqn for key in self.observed}
        return [name for name in found if name not in compared]

    @property
    def _earlier(self) -> list[tuple[str, At]]:
        """The moments of the uninterrupted run before the last one that a checkpoint has, the latest first."""
        ops = [
            op for op in self.whole.ops if op.index < self.step(self.whole, self.before - 1) and op.index in self._by_op
        ]
        return [(f"after {wording.at(op)}", self.at(op.index)) for op in reversed(ops)]

    @property
    def _free_at_load(self) -> set[tuple[str, str]]:
        """What may be anything right after a load."""
        return self.idle | self.seeded_anew | self.transient

    def _cold(self) -> None:
        resumed = self.named(RESUMED)
        load = self.loaded(resumed) if resumed else -1
        if resumed is None or load < 0 or {WHOLE, resumed.name} & self.failures.keys():
            return
        built, saved = self.at(load - 1), self.at(self.saved)
        params = {key for key, value in saved.items() if key[0] == PARAMS and value.data}
        same = {key for key in params if built.get(key) == saved[key]}
        if not params:
            return
        if same == params:
            self.found.append(ArmResult("cold", Verdict.UNKNOWN.value, wording.BLIND, ()))
        else:
            notes = [wording.seen_too_little(sorted(name for _, name in same), len(params))] if same else []
            self.found.append(ArmResult("cold", Verdict.PASS.value, "", tuple(notes)))

    def _used(self) -> None:
        used, resumed = self.named(USED), self.named(RESUMED)
        if used is None or resumed is None or WHOLE in self.failures:
            return
        refused = refusal(used, self.failures.get(USED), self.directory / f"checkpoint{arms.ANEW}")
        if not refused and self.ended(used):
            return
        if RESUMED in self.failures:
            return
        load = self.loaded(used)
        right = self.at(self.loaded(resumed))
        left, notes = harmless(self, used, resumed, self.loaded(resumed))
        left |= self.without_effect
        found = self.compare(right, self.at(load), load, self._free_at_load | left)
        found = found or self.steps_differ(used, resumed, self.idle | left, rounds=True)
        early = found
        found, more = beside_random_states(self, used, resumed, early, self.idle | left)
        data = data_of(self, used, found)
        random = random_before(early, found, data)
        sentence = of_used(found, self.at(load - 1), right, self.at(load), data, random)
        ways = ("a fresh trainer that loads", "one that has stepped before")
        lines = line_by_line(self, used, resumed, found, ways, random=bool(random))
        at_load = any(one.key.op == load for one in found)
        sentence = paragraphs(sentence, that_load(self, load, found) if at_load else "", lines)
        refused = refused or (wording.LEFT_AS_IT_IS if wording.LEFT_AS_IT_IS in self.notes else "")
        if not found and not refused:
            found, sentence = self._loaded_twice(used)
        self.add(USED, found, sentence, [*notes, *more, *([refused] if refused else [])])

    def _loaded_twice(self, used: Session) -> tuple[list[Difference], str]:
        """Differences after the second load of a folder that was written again, of values which the first load
        restores; and the sentence. What a loader says of itself is left out: the step that would show whether it
        matters, or sets it, does not follow."""
        saves, loads = ([op.index for op in used.ops if op.kind == kind and op.checkpoint == arms.ANEW]
                        for kind in ("save", "load"))  # fmt: skip
        (saved, saved_anew), (first, second) = map(self.at, saves), map(self.at, loads)
        wrong = {key for key in {*saved, *first} if saved.get(key) != first.get(key)}
        wrong |= {key for key in {*saved_anew, *second} if is_of_a_loader(key)}
        found = self.compare(saved_anew, second, loads[1], self._free_at_load | wrong)
        step = next(op.iteration for op in reversed(used.ops) if op.kind == "step" and op.index < saves[0])
        return found, of_second_load(found, first, second, step) if found else ""

    def _again(self) -> None:
        resumed = self.named(RESUMED)
        if resumed is None or resumed.first("save") < 0 or {WHOLE, RESUMED} & self.failures.keys():
            return
        first, second = (self.directory / f"checkpoint{number}" for number in (arms.FIRST, arms.AGAIN))
        try:
            found = differing(first, second)
        except UsageError:
            self.not_compared("again", wording.NO_FORMAT)
            return
        if found and self.unsteady:
            self.not_compared("again", wording.ALL_UNSTEADY)
            return
        verdict = Verdict.MISMATCH if found else Verdict.PASS
        self.found.append(ArmResult("again", verdict.value, of_again(found)))
        self.differences += [as_difference(one, resumed.first("save")) for one in found]

    def _written(self) -> None:
        if WHOLE in self.failures or all(op.checkpoint != arms.FIRST for op in self.whole.ops):
            return
        at = self.saved if self.whole.first("save") >= 0 else self.whole.ops[-1].index
        ranks = self.whole.ops[0].mesh.world
        both = [one for one in (self.whole, self.named(arms.RESUMED)) if one is not None]
        # of `fit`, which two sessions began with other seeds, what was there after the first step of each
        first = "step" if self.trainer.fits and len(both) > 1 else "build"
        fresh = [self.at(one.first(first)) for one in both]
        seen = all_seen(self, [op.index for op in self.whole.ops])
        frozen = [(PARAMS, name) for name in seen if are_frozen([name], seen)]
        live = not_made_by_build(self.at(at), fresh, frozen)
        folder = self.directory / f"checkpoint{arms.FIRST}"
        held = written(folder, live, self.trainer.transient, ranks)
        if held.converted:
            self.not_compared("written", wording.CONVERTED)
            return
        self.looked_at = held.looked_for
        notes = wording.too_small(held.too_small, names_in(folder))
        alike_in_builds = {key: self.at(at)[key] for key in frozen if key in self.at(at) and key not in live}
        absent = absent_from(folder, alike_in_builds) if alike_in_builds else []
        notes += [frozen_left_out(absent)] if absent else []
        notes += [rounded_from_saved(held.rounded)] if held.rounded else []
        told = wording.of_written(held)
        out = that_left_out(self, at) if held.missing else ""
        older = next((when for when, values in self._earlier_than(at) if held_as_in(folder, held.missing, values)), "")
        self.add(
            "written", held.differences(at), paragraphs(f"{told}{older and wording.written_older(older)}", out), notes
        )

    def _earlier_than(self, at: int) -> Iterator[tuple[str, At]]:
        """The moments of the uninterrupted run before an operation, the latest first, with what there was then."""
        before = (op for op in reversed(self.whole.ops) if op.index < at and op.index in self._by_op)
        return ((f"after {wording.at(op)}", self.at(op.index)) for op in before)


def untied(names: str, op: int) -> Difference:
    """Two names of what must be one parameter, as a difference of the operation after which they are two."""
    _, _, other = names.partition(" = ")
    return Difference(Key(op, LIVE, PARAMS, other), "bits", mismatched=1, total=1, detail=f"not one parameter: {names}")
