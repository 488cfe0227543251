"""Determines what a script has to show for a failure: the operations that lead to it, and the comparison at the end.

A program has arms that have nothing to do with a failure. For example, of `build step step save step | build step |
build load step` with a failure at its last step, the script needs `build step step save | build load step` alone: what
was built last, the checkpoint that was loaded into it, and what wrote that. That is the *path* to a failure.

The *focus* is what the script compares at its end, taken from the first divergence of the result. For a step it is the
same step of one process on whole tensors; for a save or a load the state from before it; for an error or a hang that
there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardproof.diff import Difference
from shardproof.errors import UsageError
from shardproof.models import ModelSpec, ModuleSpec, model_spec
from shardproof.observe.record import LIVE
from shardproof.program import NO_CHECKPOINT, WRITES, Op, expand, is_arms
from shardproof.result import Result
from shardproof.scenario import Mesh, Scenario

RAISES, HANGS, KEPT, TRAINED, WRITTEN, TYPED, OTHER = (
    "raises", "hangs", "kept", "trained", "written", "typed", "other",
)  # fmt: skip
"""What a script shows at its end: an error, that an operation does not end, that a save or load changed the state, that
a build or a step gave another state than plain torch, that a checkpoint holds another state than was saved, that the
live state has another dtype than was asked for, or something else, which only a system knows how to compare."""

SETTING = "hyperparameter"
"""The role of a param group's own setting, such as its learning rate."""

GROUP = "group"
"""What a param group is called by, before its number, where its settings are not known by a parameter."""

ROLES = ("step", "param", "master", "momentum", "exp_avg", "exp_avg_sq", SETTING)
"""What a script can compare, what a reader understands at once first."""

TYPED_ROLES = (*ROLES, "compute_param", "buffer")
"""Of what a script can compare the dtype."""

MOVES = ("load", "load_model_only", "reload_params", "recall", "replace_params")
"""Operations that give a model, or an optimizer's masters, weights from elsewhere."""

UNCOMPARED = ("unreadable", "gap", "overlap", "replica_conflict")
"""Kinds of differences for which there is no single value on each side."""


class NoExportError(UsageError):
    """No script can be written for a failure; says why, and what is possible."""

    @classmethod
    def because(cls, result: Result, reason: str, instead: str = "") -> NoExportError:
        """The error for a result: the reason, and another way to show the failure."""
        other = instead or result.replay
        return cls(f"no script can be written for {result.id}: {reason}; what shows it: {other}")

    @classmethod
    def unless_all_done(cls, result: Result, library: str, undone: Mapping[str, object]) -> None:
        """Refuse a scenario of which a library's scripts cannot do something; a simpler one may do without it.

        Args:
            undone: what those scripts do not do → whether the scenario needs it.

        Raises:
            NoExportError: it needs something of it.
        """
        if lacking := [what for what, needed in undone.items() if needed]:
            reason = f"scripts for {library} do not do {' and '.join(lacking)} yet"
            simpler = f"perhaps a simpler one has a script: {shrink_of(result.id)}, then shardproof export bug.toml"
            raise cls.because(result, f"{reason}; {simpler}")


def shrink_of(name: str) -> str:
    """The command that looks for a simpler scenario with the same failure, where `name` has its options behind it."""
    return f"shardproof shrink {name} --toml bug.toml"


@dataclass(frozen=True)
class Focus:
    """What is shown at `op`. kind: one of the words above. error: type of the exception. difference: what is compared,
    where something is."""

    kind: str
    op: Op
    error: str = ""
    difference: Difference | None = None

    @property
    def role(self) -> str:
        return self.difference.key.role if self.difference else ""

    @property
    def fqn(self) -> str:
        """Of the parameter; of a setting, that of a parameter whose group has it."""
        named = self.difference.key.fqn if self.difference else ""
        return named.rpartition(".")[0] if self.role == SETTING else named

    @property
    def setting(self) -> str:
        """Of a param group's setting that is compared: its name, such as `lr`."""
        return self.difference.key.fqn.rpartition(".")[2] if self.difference and self.role == SETTING else ""

    @property
    def group(self) -> int | None:
        """Of a param group's setting that is compared: the group's number, where it is known by that."""
        number = self.fqn.removeprefix(GROUP) if self.setting else ""
        return int(number) if number.isdecimal() else None

    @property
    def expected_dtype(self) -> str:
        """The dtype that the oracle expects, when the difference shown is a wrong dtype; empty otherwise."""
        return self.difference.detail.rpartition("instead of ")[2].split(";")[0] if self.difference else ""


@dataclass(frozen=True)
class FailureCase:
    """A failure as a script shows it. ops: the path to it; the last one is the focus' own. whole: with all of the
    model and of the path, where a script of less does not show it. needs: fully qualified names of the parameters that
    the failure needs, which alone are in the script's model; empty where all are."""

    result: Result
    ops: tuple[Op, ...]
    focus: Focus
    whole: bool = False
    needs: tuple[str, ...] = ()

    @property
    def scenario(self) -> Scenario:
        return self.result.scenario

    @property
    def first(self) -> Difference | None:
        """The first difference of the result, which a script may not be able to read."""
        return min((d for d in self.result.differences if d.fails), key=lambda d: d.key.op, default=None)

    @property
    def first_ones(self) -> tuple[Difference, ...]:
        """The differences at the operation of the first."""
        failing = [d for d in self.result.differences if d.fails]
        at = min((d.key.op for d in failing), default=0)
        return tuple(d for d in failing if d.key.op == at)

    @property
    def reads_earlier(self) -> bool:
        """Whether a checkpoint is read that is not the latest one of its moment."""
        latest = NO_CHECKPOINT
        for op in self.ops:
            if op.kind in WRITES:
                latest = max(latest, op.checkpoint)
            elif op.kind.startswith("load") and op.checkpoint < latest:
                return True
        return False

    def only(self, ops: tuple[Op, ...]) -> FailureCase:
        """The same with some of the operations; the last of them shows it."""
        return replace(self, ops=ops, focus=replace(self.focus, op=ops[-1]))

    def until(self, kind: str) -> FailureCase:
        """The same up to the last operation of a kind, where a script compares something that shows there."""
        last = max(at for at, op in enumerate(self.ops) if op.kind == kind)
        return self.only(self.ops[: last + 1])

    def require_comparable(self) -> None:
        """Check that a script can read what differs, in the way that all systems have in common.

        Raises:
            NoExportError: it cannot.
        """
        if self.focus.kind == OTHER:
            told = ", ".join(sorted({f"{d.key.role} {d.kind}" for d in self.result.differences[:9]}))
            raise NoExportError.because(self.result, f"a script cannot read what differs first: {told}")

    @cached_property
    def spec(self) -> ModelSpec:
        """The model, of which a script has the parameters that the failure needs."""
        found = model_spec(self.scenario.model)
        return found.of_params(self.needs) if self.needs and not self.whole else found

    @property
    def parts(self) -> tuple[tuple[Op, ...], ...]:
        """The operations by the world that runs them: two where a checkpoint goes to another mesh, otherwise one."""
        found: list[list[Op]] = []
        for op in self.ops:
            if not found or found[-1][-1].mesh != op.mesh:
                found.append([])
            found[-1].append(op)
        return tuple(map(tuple, found))

    @property
    def is_local(self) -> bool:
        """Whether every rank compares its own shard, since the state is on one mesh before and after; a step counter is
        no shard."""
        return self.focus.kind == KEPT and len(self.parts) == 1 and self.focus.role != "step"

    @property
    def speaker(self) -> int:
        """The rank that prints the difference in a script. When shards are compared, a rank that holds a deviating
        element."""
        ranks = self.focus.difference.ranks if self.focus.difference else ()
        return ranks[0] if ranks and self.is_local else 0

    @property
    def is_shape(self) -> bool:
        """Whether what differs is the shape of what a checkpoint holds."""
        return self._writes("shape")

    @property
    def is_missing(self) -> bool:
        """Whether a checkpoint lacks something."""
        return self._writes("missing")

    def _writes(self, kind: str) -> bool:
        return self.focus.kind == WRITTEN and bool(self.focus.difference and self.focus.difference.kind == kind)

    def on_one_rank(self) -> FailureCase:
        """The same without other ranks, where these have no part in it."""
        alone = Mesh(1, 1, 1)
        return self.only(tuple(replace(op, mesh=alone) for op in self.ops))

    def on_tensor_parallel_ranks(self) -> FailureCase:
        """The same with the ranks of one tensor-parallel group alone."""
        mesh = Mesh(1, 1, self.ops[-1].mesh.tp)
        return self.only(tuple(replace(op, mesh=mesh) for op in self.ops))

    @property
    def weights_alone(self) -> bool:
        """Whether it is about weights that go through a checkpoint, for which no step has to be taken."""
        focus = self.focus
        rebuilt = sum(op.kind == "build" for op in self.ops) > 1  # otherwise only a step changes the weights
        moved = focus.kind == KEPT and focus.op.kind in MOVES and focus.role in ("param", "master") and rebuilt
        about = moved or (self.is_shape and focus.role == "param")
        return not self.whole and about and self.spec.param(focus.fqn).spec.trainable == "yes"

    @cached_property
    def modules(self) -> tuple[ModuleSpec, ...]:
        """The modules of the model that have parameters; of weights that go through a checkpoint, their own alone."""
        found = tuple(m for m in self.spec.modules if m.params)
        own = tuple(m for m in found if any(f"{m.path}.{p.name}" == self.focus.fqn for p in m.params))
        return own if own and self.weights_alone else found

    def does(self, *kinds: str) -> bool:
        """Whether the path has an operation of one of these kinds."""
        return any(op.kind in kinds for op in self.ops)

    @property
    def reference_op(self) -> Op | None:
        """Of a focus that must keep the state: the operation before which that state is read. Of a load, the save that
        wrote what it loads; of a load of the model alone, which must leave the optimizer's state as it is, itself;
        none where masters must be those of the weights that it has loaded."""
        if self.focus.kind not in (KEPT, WRITTEN):
            return None
        if self.focus.op.kind in ("save", "keep"):
            return self.focus.op
        if self.focus.op.kind == "load_model_only" and self.focus.role != "param":
            return None if self.focus.role == "master" else self.focus.op
        if self.focus.op.kind == "recall":
            return next((op for op in reversed(self.ops) if op.kind == "keep"), None)
        taken = {op.taken for op in self.ops if op.kind in WRITES and op.checkpoint == self.focus.op.checkpoint}
        return next((op for op in self.ops if op.index in taken), None)


def case_of(result: Result, *, whole: bool = False, needs: tuple[str, ...] = ()) -> FailureCase:
    """The case of a result.

    Args:
        whole: nothing is left out of the model and of the path that the failure may not need. needs: names of the
            parameters that it needs, as an entry says; empty where it says nothing.

    Raises:
        NoExportError: there is no failure, none that came again, or none that a script could compare.
    """
    if not result.verdict.is_failure or not (result.failed_op and result.signature):
        raise NoExportError.because(result, f"its verdict is {result.verdict.value}", "a scenario that fails")
    ops = expand(result.scenario)
    if is_arms(result.scenario.program):  # whose runs its system chooses
        return FailureCase(result, ops, Focus(OTHER, ops[result.failed_op.index]), whole, needs)
    focus = _focus(result, ops)
    case = FailureCase(result, path_to(ops, focus.op), focus, whole, needs)
    if not case.weights_alone or case.reads_earlier:
        return case
    return replace(case, ops=tuple(op for op in case.ops if op.kind not in ("step", "overflow")))


def path_to(ops: Sequence[Op], last: Op) -> tuple[Op, ...]:
    """The operations that a script must run to reproduce a failure at `last`: from its build on, and the earlier saves
    that it loads from."""
    start = max(op.index for op in ops[: last.index + 1] if op.kind == "build")
    own = tuple(ops[start : last.index + 1])
    wanted = {op.checkpoint for op in own if op.kind.startswith("load")}
    written = [op for op in ops[:start] if op.kind in WRITES]
    before = [op for op in written if op.checkpoint in wanted]
    if before and before[-1] is not written[-1]:  # a later one may be read in its place
        before.append(written[-1])
    kinds = [op.kind for op in own]
    if "recall" in kinds and "keep" not in kinds[: kinds.index("recall")]:
        before += [op for op in ops[:start] if op.kind == "keep"]
    led = {op for end in before for op in path_to(ops, end)}
    return (*sorted(led, key=lambda op: op.index), *own)


def _focus(result: Result, ops: Sequence[Op]) -> Focus:
    first = min((d.key.op for d in result.differences if d.fails), default=None)
    error = result.error
    failed = result.failed_op.index if result.failed_op else 0
    if error is not None and (first is None or first >= (failed if error.op is None else error.op)):
        if error.type == "deadline":
            return Focus(HANGS, ops[failed])
        if error.type == "killed":
            raise NoExportError.because(result, "a rank was killed")
        return Focus(RAISES, ops[failed], error.type)
    found = _difference_to_show(result, ops)
    if found is None:
        unread = min((d for d in result.differences if d.fails), key=lambda d: d.key.op)
        return Focus(OTHER, ops[unread.key.op], difference=unread)
    op = ops[found.key.op]
    if found.key.where != LIVE:
        return Focus(WRITTEN, op, difference=found)
    if found.kind == "dtype":
        return Focus(TYPED, op, difference=found)
    return Focus(TRAINED if op.kind in ("step", "build", "overflow") else KEPT, op, difference=found)


def _difference_to_show(result: Result, ops: Sequence[Op]) -> Difference | None:
    """The difference to show: of the first operation with one that a script can compare, live state before files."""
    failing = [d for d in result.differences if d.fails and d.kind not in UNCOMPARED]
    able = [d for d in failing if d.key.role in _roles(d, ops[d.key.op])]
    first = min((d.key.op for d in able), default=0)
    here = [d for d in able if d.key.op == first]
    live = [d for d in here if d.key.where == LIVE]
    shaped = any(d.kind == "shape" and d.key.role == "param" for d in here)
    order: tuple[str, ...] = TYPED_ROLES if live or shaped else ("exp_avg", "exp_avg_sq", "momentum", *ROLES)
    return min(live or here, key=lambda d: (order.index(d.key.role), -d.mismatched, d.key.fqn), default=None)


def _roles(difference: Difference, op: Op) -> tuple[str, ...]:
    """The roles of which a script can compare what differs. Of a setting that is its value in the run's own groups,
    after a load that must restore it; one that a group lacks altogether is known by the group's number."""
    live = difference.key.where == LIVE
    if difference.kind == "dtype" and live:
        return TYPED_ROLES
    kinds = ("bits", "missing") if difference.key.fqn.startswith(GROUP) else ("bits",)
    restored = live and difference.kind in kinds and op.kind == "load"
    return ROLES if restored else tuple(role for role in ROLES if role != SETTING)
