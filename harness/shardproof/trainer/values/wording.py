"""What the arms of a trainer say, in whole plain sentences.

Every function gets what differs and says what that means to somebody whose training goes on from a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from math import inf

from shardproof.diff import Difference
from shardproof.observe.logical import Problem, Value
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.program import Op
from shardproof.result import ArmResult, Failure
from shardproof.trainer.arms import OTHER, Session
from shardproof.trainer.crashes import caused_by, message_of, method_of, raised_by
from shardproof.trainer.described import Described
from shardproof.trainer.values.every_mesh import BESIDE, OF_MODULES, ROLES, is_of_data
from shardproof.trainer.values.files_hold import Written, nameless
from shardproof.trainer.values.retyped import retyped
from shardproof.trainer.values.telling import most_telling
from shardproof.verdict import Verdict
from shardproof.wording.waits import told_waits

PROBED = "gradients are exact: every model comes from Trainer.probe"
INEXACT = (
    "compared at the load only: on another number of ranks gradients add up in another order, unless the model comes "
    "from self.probe"
)
ROUNDING = (
    "after the load all is equal; after the next step values are apart by what another order of the sums of gradients "
    "makes, which three ranks and more have in a fresh process, so that steps were not compared further; a model from "
    "self.probe has exact sums"
)
ROUNDED = "equal up to rounding"
AGREE = "ranks agree"
"""The name of the arm that says that ranks hold other copies of one value."""
FIT_ELSEWHERE = (
    "not compared: a trainer with fit is observed after steps only, which come to other bits on another number of ranks"
)
NO_STATE = (
    "Nothing with state was found on the trainer after `build`: make model and optimizer attributes of self, or return "
    "them from `state()`."
)
LEFT_AS_IT_IS = (
    "a second load in the same process was not compared, since `save` leaves a folder as it is that has a checkpoint"
)
ALL_UNSTEADY = "not compared: what there is to compare is not deterministic"
NOTHING_IN_COMMON = "not compared: there is nothing that both have in the same shape"
NO_FORMAT = "not compared: no reader takes these files as one checkpoint; `shardproof diff` may compare them one by one"
CONVERTED = "not compared: the files hold the parameters in another form than memory does"
EMPTY = "The folder that `save` was given is empty: it wrote somewhere else, or nothing."
BLIND = (
    "Before the load the parameters are what was saved already: a load that does nothing would pass. Let `build` "
    "initialise the model from cell.seed."
)


BUILDING = (
    "An extension of torch was being built, or waited for: `--deadline-s 600` gives it time, and later runs find it "
    "built."
)


def of_failure(session: Session, error: Failure, trainer: Described) -> ArmResult:
    """The verdict of an arm whose ranks failed, and whose method it was.

    One rank is tried whether or not a trainer names it: where `build` raises there, nothing can be loaded. A rank that
    dies or does not come to an end has refused nothing.
    """
    name = session.name
    if error.type == "Unsupported":
        return ArmResult(name, Verdict.UNSUPPORTED.value, error.message, ())
    unasked = session.kind == OTHER and session.of not in trainer.axes.get("mesh", ())
    raised = is_raised(error)
    if unasked and raised and session.ops and error.op == session.ops[0].index:
        told = f"not compared: the trainer cannot be built on one rank, which it does not name ({error.type})"
        return ArmResult(name, Verdict.UNSUPPORTED.value, told, ())
    method = method_of(error, trainer)
    who = f" in {method}" if method else ""
    where = f"rank {error.rank}" if error.rank is not None else "the ranks"
    if error.type == "deadline":
        first = error.message.strip().split("\n", 1)[0]
        waits = told_waits(error, str(trainer.file))
        built = BUILDING if "torch/utils/cpp_extension.py" in error.traceback else ""
        told = " ".join(filter(None, (f"The ranks did not come to an end{who}: {first}.", waits, built)))
        return ArmResult(name, Verdict.HANG.value, told, ())
    told = f"{error.type} on {where}{who}{raised_by(error, trainer)}: {message_of(error)}{caused_by(error, trainer)}"
    return ArmResult(name, Verdict.CRASH.value, told, ())


def first_problem(problems: Sequence[Problem]) -> Problem:
    """What is seen first of pieces that do not make a whole, of a parameter if there is one."""
    return min(problems, key=lambda problem: (problem.key.op, problem.key.role != "param"))


def of_problems(problems: Sequence[Problem], sessions: Sequence[Session], why: str = "") -> str:
    """Pieces that do not make a whole, with the arm and the operation after which they are first seen.

    Args:
        why: what is known of a parameter that ranks have differently after a step, and not before it.
    """
    first = first_problem(problems)
    where = [(session.name, op) for session in sessions for op in session.ops if op.index == first.key.op]
    told = "".join(f", in {name} after {at(op)}" for name, op in where)
    others = len({problem.key[2:] for problem in problems}) - 1
    more = f", and {others} more value{'s' * (others > 1)}" if others else ""
    named = first.key.role == EXTRA_STATE
    apart = first.key.role in ("param", "setting") and first.kind in ("replica_conflict", "shape")
    after = first.key.role == "param" and first.kind == "replica_conflict" and any(op.kind == "step" for _, op in where)
    own = f" {why or NOT_REDUCED}" if after else f" {OF_EVERY_RANK}" if apart else f" {OF_STATE}" if named else ""
    what = called(first.key.role, first.key.fqn)
    pieces = f"The ranks' pieces of {what} do not fit together"
    if first.kind == "replica_conflict":
        pieces = f"The ranks do not have the same {what}"
    return f"{pieces}{told}: {first.detail}{more}.{own}"


def written_older(when: str) -> str:
    """That the files have the parameters as they were at an earlier moment, with a space in front."""
    return f" The files have the parameters as they were {when}: look at when what is written is taken, or copied."


def of_untied(names: Sequence[str], session: Session, op: Op, values: Mapping[tuple[str, str], Value]) -> str:
    """Two parameters, seen after an operation, though the trainer calls them one. values: of all state after it."""
    one, _, other = names[0].partition(" = ")
    first, second = (values.get(("param", name)) for name in (one, other))
    apart = "of different values" if first != second else "of the same values so far"
    more = f" The same holds of {len(names) - 1} more." if len(names) > 1 else ""
    return (
        f"After {at(op)} in {session.name}, {one} and {other} are two parameters {apart}; `tied` says that they are "
        "one. Each is stepped with its own gradient, and a checkpoint that holds one of them does not fill the "
        f"other.{more}"
    )


def never_tied(names: str, unknown: Collection[str]) -> str:
    """Why a tie cannot be judged: no rank has both parameters. unknown: names that no rank has a parameter for."""
    if not unknown:
        return f"not compared: no rank has both parameters of {names}, as where stages of a pipeline have one each"
    return (
        f"`tied` names {' and '.join(unknown)}, and no parameter is called so. Names are those of the model as its "
        "author wrote it, without the words that wrappers put in, such as `module.`."
    )


OF_ITS_OWN = "Before this step the ranks had the same, so each has stepped with a gradient of its own"
LOCAL = 'Where every rank is to have its own, as of experts, `local = ["NAME"]` says so.'
NOT_REDUCED = f"{OF_ITS_OWN}: look at which ranks gradients are reduced among. {LOCAL}"


def of_own_gradient(reduced: str) -> str:
    """That ranks step a parameter apart. reduced: a sentence about what is reduced in the step; empty if not known."""
    return f"{OF_ITS_OWN}. {reduced} {LOCAL}" if reduced else NOT_REDUCED


OF_STATE = (
    "What `state()` names has to be equal on all ranks, such as a metric that was reduced over them; where every rank "
    'has its own, `local = ["NAME"]` says so.'
)

OF_EVERY_RANK = (
    "What is plain has to be equal on all ranks; where every rank has its own, as of experts, "
    '`local = ["NAME"]` says so.'
)


def of_unsteady(found: Sequence[Difference], op: Op, why: str) -> str:
    """What is not deterministic, with the likely reason."""
    return (
        f"The trainer is not deterministic: two runs with the same seed differ after {at(op)} in {listed(found)}; "
        f"{why}. Nothing else is claimed of what differs."
    )


def unsteady_way(first: str, own: str) -> str:
    """Why two ways to compute the same cannot be compared. first, own: such as `shard=no` and `shard=yes`."""
    return f"not compared: with {own} two runs with the same seed differ, so that nothing can be held against {first}"


SAME_AS_AGREE = (
    f"What differs is what `{AGREE}` names: the ranks had it differently, and nothing more is said of it here."
)


def no_twin(why: str) -> str:
    """Why the twin has nothing to say."""
    return f"not compared with torch's optimizer on whole tensors: {why}"


def of_twin(found: Sequence[Difference]) -> str:
    """What the same optimizer on whole tensors comes to."""
    if not found:
        return ""
    return (
        f"torch's optimizer on whole tensors, with the mean of the ranks' gradients, comes to other values: "
        f"{differ(found)}. {first_of(found)} Where the trainer clips, scales or accumulates gradients, call "
        "self.probe with twin=False."
    )


def of_saving(found: Sequence[Difference], *, at_once: bool) -> str:
    """What a save changed."""
    if not found:
        return ""
    first = found[0]
    if at_once and len(found) == 1 and first.expected_first:
        return (
            f"Saving changed {first.key.role} {first.key.fqn} from {shown(first.expected_first)} to "
            f"{shown(first.observed_first)}."
        )
    return f"A run that saves goes on differently from one that does not: {differ(found)}."


def of_cut(found: Sequence[Difference]) -> str:
    """A run that was to stop early, and did other things before."""
    return (
        f"The run that stops early is not the beginning of the longer one: {differ(found)}. Does a schedule "
        "depend on `until`?"
    )


def of_mesh(found: Sequence[Difference], mesh: str, *, at_load: bool) -> str:
    """What is wrong on another mesh, right after the load or after a step there."""
    if not found:
        return ""
    if at_load:
        return f"Loaded on mesh {mesh}, {differ(found)} from what was saved. {first_of(found)}"
    what = "steps come to other values than on the mesh that saved"
    return f"After a load on mesh {mesh}, {what}: {differ(found)}. {first_in_a_step(found)}"


def of_written(held: Written) -> str:
    """What no file holds."""
    if held.empty:
        return EMPTY
    several = f", among them {called(*held.missing[0])}" if len(held.missing) > 1 else ""
    what = f"`save` leaves {_named(held.missing)} out of the checkpoint"
    if held.no_optimizer:
        rest = [key for key in held.missing if key[0] not in BESIDE]
        more = f", and {_named(rest)}" if rest else ""
        what = f"`save` leaves all state of the optimizer{more} out of the checkpoint"
    return f"{what}: the bytes that were live at the save are in no file{several}."


def too_small(keys: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """What was not looked for in the files, and what of it has no name there. names: of all that the checkpoint holds;
    none where they cannot be read."""
    told = (
        [f"not looked for, since texts and short values cannot be told by their bytes: {_named(keys)}"] if keys else []
    )
    absent = nameless(keys, names) if names else ()
    if absent:
        more = f" and {len(absent) - MOST_WORDS} more" if len(absent) > MOST_WORDS else ""
        words = ", ".join(absent[:MOST_WORDS])
        told.append(f"`save` may have left some of these out: no value in the checkpoint has {words}{more} in its name")
    return told


MOST_WORDS = 6

MOST_NAMES = 3
"""Of several values of the trainer's own, whose names say what no role does."""


def of_alike(found: Sequence[Difference], first: str, own: str, share: float, most: str = "", when: str = "") -> str:
    """What two ways to compute the same come to, none of which is known to be the right one.

    Args:
        first, own: the two ways, such as `shard=yes` and `shard=no`. share: how far apart they are. most: what counts
            as rounding, in words; empty where nothing does. when: after which step, where they were equal before.
    """
    if not found:
        return ""
    taken = f"; what counts as rounding is {most}" if most else ""
    told = "" if share > MOST_TOLD else f" They are apart by up to {share:.2g} of the largest change so far{taken}."
    axis = first.partition("=")[0]
    what = f"{axis} must not matter, but {first} and {own} come to different values{when}: {differ(found)}."
    of_data = [one for one in found if is_of_data((one.key.role, one.key.fqn))]
    each = _of_each(most_telling(of_data or found), first, own)
    return f"{what} {'The data differ: ' * bool(of_data)}{each}{told} Which of the two is right, this arm cannot tell."


WITHOUT_SAVE = "The same steps without the save come to their end: look at what `save` leaves otherwise than it was."

ROUNDS_ALONE = (
    'All of it is as little as another order of sums makes: `"rounding"` in the place of `"bits"` lets that pass.'
)


def begin_apart(found: Sequence[Difference], first: str, own: str) -> str:
    """That two ways are apart before any step."""
    of_model = any(one.key.role == OF_MODULES[0] for one in found)
    of_buffers = not of_model and any(one.key.role in OF_MODULES for one in found)
    what = "other weights" if of_model else "other buffers" if of_buffers else "another state"
    return (
        f"{first} and {own} are apart right after `build`: they begin with {what}, so that this arm says nothing of "
        f"their steps.{BEFORE_WEIGHTS * (of_model and all(one.kind == 'bits' for one in found))}"
    )


RENAMED = (
    " If it has another name there, as in a wrapper of your own, give what both have in common under common names in "
    "`state()`."
)


BEFORE_WEIGHTS = " Look at what draws random numbers before the weights are made, and at what changes them then."


def _of_each(one: Difference, first: str, own: str) -> str:
    """What the first value that differs is on either side."""
    if one.kind in ("missing", "extra"):
        there, absent = (first, own) if one.kind == "missing" else (own, first)
        renamed = RENAMED if one.key.role == OF_MODULES[0] else ""
        return f"{_value(one)} is there with {there}, and not with {absent}.{renamed}"
    if one.kind != "bits":
        return f"With {own}, {first_of([one])}"
    sides = f"{shown(one.expected_first)} with {first} and {shown(one.observed_first)} with {own}"
    where = " in its first element that differs" if one.total > 1 else ""
    return f"{_value(one)} is {sides}{where}."


MOST_TOLD = 1e6
"""Behind a first step a share of what had changed before it may be anything."""

NOT_MEASURED = inf
"""The share where nothing has changed yet."""


def seen_too_little(names: Sequence[str], number: int) -> str:
    """Parameters of which a load cannot be seen."""
    told = f"{len(names)} of {number} parameters are what was saved before the load already"
    return f"{told}, so that it cannot be seen in them: {', '.join(names[:3])}{', …' * (len(names) > 3)}"


def listed(found: Sequence[Difference]) -> str:
    """The values that differ, grouped by role as `_named` groups names."""
    return _named((one.key.role, one.key.fqn) for one in found)


def differ(found: Sequence[Difference]) -> str:
    """The values that differ, with the verb."""
    return f"{listed(found)} differ{'s' * (len({d.key[2:] for d in found}) == 1)}"


def _named(keys: Iterable[tuple[str, str]]) -> str:
    """Values by role, those of the same names together: `exp_avg and step of 4 parameters, 4 values of scheduler`."""
    roles: dict[str, set[str]] = {}
    for role, name in keys:
        roles.setdefault(role, set()).add(name)
    groups: dict[frozenset[str], list[str]] = {}
    for role, names in sorted(roles.items()):
        groups.setdefault(frozenset(names), []).append(role)
    return ", ".join(_group(roles, names) for names, roles in groups.items())


def _group(roles: Sequence[str], names: Collection[str]) -> str:
    """Roles that the same names have."""
    *others, last = roles
    told = f"{', '.join(others)} and {last}" if others else last
    if len(names) == 1:
        return called(told, min(names))
    if set(roles) <= {"grad", *ROLES.values()}:
        return f"{told} of {len(names)} parameters"
    if roles == [EXTRA_STATE]:
        told = ", ".join(sorted(names)[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
        return f"{len(names)} {KINDS[last]} ({told})"
    return f"{len(names)} {KINDS[last]}" if roles[0] in KINDS and not others else f"{len(names)} values of {told}"


KINDS = {
    "param": "parameters", "buffer": "buffers", "setting": "settings of param groups", "rng": "random states",
    EXTRA_STATE: "values of the trainer's own",
}  # fmt: skip
"""Role → what several values of it are called."""


def _value(one: Difference) -> str:
    """The name of a value, with its role where that says more."""
    return called(one.key.role, one.key.fqn)


def called(role: str, name: str) -> str:
    """A name with its role, unless it begins with it, as that of a scheduler does, or is of the trainer's own."""
    if role == "setting":
        return f"setting {name}"
    return name if role == EXTRA_STATE or name.startswith(f"{role}.") else f"{role} of {name}"


def first_of(found: Sequence[Difference], against: str = "should be") -> str:
    """A sentence about the first difference: the name of the value, the observed number and the expected one.

    Args:
        against: what stands in front of the expected one, as `in the fresh one`, which need not be right.
    """
    one = most_telling(found)
    what = _value(one)
    if one.kind in ("missing", "extra"):
        return f"{what} is {'not there' if one.kind == 'missing' else 'there, and should not be'}."
    if one.key.role == "rng":
        what = f"The random state of {one.key.fqn} is another one"
        return f"{what}: it was not restored, not for this rank, or drawn from afterwards."
    if one.detail and one.expected_first[:1] not in ("'", '"'):
        return f"{what}: {one.detail}.{retyped(one)}"
    wrong, right = shown(one.observed_first), shown(one.expected_first)
    several = one.total > 1 and one.kind == "bits" and one.expected_first[:1] not in ("'", '"')
    where = " in its first wrong element" if several else ""
    return f"{what} is {wrong}{where}, and {against} {right}{_as_a_factor(wrong, right)}.{retyped(one)}"


def under_other_names(names: Mapping[str, str]) -> str:
    """What a checkpoint has of parameters that its load does not restore, as a sentence with a space in front.

    Args:
        names: name of a parameter → that in the checkpoint.
    """
    if not names:
        return ""
    told = ", ".join(f"{name} as {other}" for name, other in sorted(names.items())[:MOST_NAMES])
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    look_at = "look at the names under which `save` writes, and at those that `load` looks for"
    return f" The checkpoint has {told}{more}: {look_at}."


def numbers_held(names: Mapping[str, str]) -> str:
    """What a checkpoint has of numbers that are wrong after a load, as a sentence with a space in front.

    Args:
        names: name of a number → its name in the checkpoint, with the value.
    """
    told = ", ".join(f"{name} as {other}" for name, other in sorted(names.items())[:MOST_NAMES])
    look = "look at the name that `load` looks for, and at what changes the number when it is read"
    return f" The checkpoint has the right one, {told}: {look}." if names else ""


def first_in_a_step(found: Sequence[Difference], against: str = "should be") -> str:
    """As `first_of`, of what a step makes: data come first, since a step begins with them."""
    of_data = [one for one in found if is_of_data((one.key.role, one.key.fqn))]
    plain = bool(of_data) and of_data[0].expected_first.startswith("'")
    says = plain or any(word in one.key.fqn for one in of_data[:1] for word in ("loader", "sampler"))
    what = "The data, or what is said of their place, differ" if says else "The data differ"
    return f"{what}: {first_of(of_data, against)}" if of_data else first_of(found, against)


def _as_a_factor(wrong: str, right: str) -> str:
    """How much more the right number is, where it is a power of two times the wrong one, as a loss scale that was taken
    out or left in would make it; empty for factors so small that they may be chance."""
    try:
        ratio = Fraction(float(right)) / Fraction(float(wrong))
    except (ValueError, OverflowError, ZeroDivisionError):
        return ""
    more, less = ratio.numerator, ratio.denominator
    if min(more, less) != 1 or max(more, less) < 8 or (more * less).bit_count() != 1:
        return ""
    return f", {more} times as much" if less == 1 else f", 1/{less} of it"


def shown(first: str) -> str:
    """The number of an element as a difference has it, without its bits or its type."""
    if first[:1] in ("'", '"'):  # a plain value, with its type in front
        text = first[1:].rpartition(first[0])[0] or first[1:].partition(first[0])[0]
        return re.sub(r"\b(float|int|str|bool) ", "", text) if "(" in text else text.partition(" ")[2] or text
    return first.split(" ", 1)[0] if first else "nothing"


def is_raised(error: Failure) -> bool:
    """Whether a rank has raised an exception, and has neither died nor hung."""
    return error.type not in ("died", "killed", "deadline")


def at(op: Op) -> str:
    """The operation in words, such as `step 1`."""
    return f"step {op.iteration}" if op.kind == "step" else f"`{op.kind}`"
