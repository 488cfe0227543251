"""The title of a result: what went wrong, in words that need no glossary of ours.

A signature such as `save: exp_avg extra, exp_avg_sq extra, step extra` is made to be compared; a title is made to be
read: *Saving created optimizer state: AdamW's step is 1 for 12 parameters that never stepped*. It is put together from
three answers, each of which the result already has:

1. **When**: the operation that failed first (`Saving`, `The step`).
2. **What happened**: the phrase of the mechanism that explains the bits (`PHRASES`), or, where no rule knows them, of
   the kind of difference (`KINDS`). A rule of a plugin has no phrase here; then its own opening words are taken.
3. **To what**: the first thing that differs there, what is live before what is written, and of a step the first thing
   that it computes, since the rest follows from it.

What else there is room for within `LONGEST` characters follows behind a colon: the dtype, the factor, one number beside
the other. The raw signature stands below the title wherever there is a page for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter

from shardproof.diagnosis import Explanation
from shardproof.diagnosis.rules.engine import ALIKE, CAUSE_FIRST
from shardproof.diff import Difference
from shardproof.errors import CANNOT_IMPORT
from shardproof.observe.record import LIVE
from shardproof.result import ArmResult, Failure, Result
from shardproof.verdict import Verdict
from shardproof.wording.error_place import place_of
from shardproof.wording.lines import first_line

LONGEST = 120
"""Characters of a title: two lines of a page, one of a wide terminal."""

NEAR_ULP = 10_000
"""Below this a distance tells how a value was rounded; above it says only that it is another one."""

WHEN = {
    "build": "Building the model", "step": "The step", "overflow": "The step that overflows", "save": "Saving",
    "load": "Loading", "load_model_only": "Loading the weights alone", "reload_params": "Refreshing the masters",
    "load_optimizer_only": "Loading the optimizer alone", "keep": "Copying the state dicts",
    "load_schedule_only": "Loading the schedule alone", "replace_params": "Replacing the weights",
    "begin_save": "Beginning a save", "finish_save": "Ending the save", "save_kept": "Saving kept state dicts",
    "recall": "Loading kept state dicts", "accumulate": "A microbatch without synchronisation",
    "compute_gradients": "The backward passes", "apply_gradients": "The optimizer's step",
    "unfreeze": "Unfreezing", "add_group": "Adding a param group", "reshard": "Resharding", "restart": "Restarting",
}  # fmt: skip
"""Kind of operation → what opens a title."""

THINGS = {
    "param": "parameters", "compute_param": "the forward's weights", "grad": "gradients", "master": "masters",
    "direction": "Muon's directions",
    "exp_avg": "first moments", "exp_avg_sq": "second moments", "momentum": "momentum", "step": "step counters",
    "hyperparameter": "settings", "buffer": "buffers", "scheduler": "the schedule", "schedule": "the schedule",
    "scaler": "the loss scale",
    "quantised": "fp8 weights",
    "norm": "the gradient norm", "host": "the split between host and device", "quant_scale": "quantisation scales",
    "setting": "settings", "resolved": "settings", "tag": "parameters", "extra_state": "extra state",
    "rng": "random generators",
    "checkpoint": "the checkpoint", "unknown": "unknown entries",
}  # fmt: skip
"""Role → what it is called where no name follows."""

OPTIMIZER_STATE = ("exp_avg", "exp_avg_sq", "momentum", "step")
ALONE = ("scheduler", "schedule", "scaler", "norm", "checkpoint", "rng", "host")
"""Roles of which there is one: no parameter is named behind them."""
BY_NAME = ("hyperparameter", "setting", "resolved", "tag", "buffer", "quant_scale")
"""Roles whose values have names of their own, which say more than a count of parameters."""

PHRASES = {
    "overflow_not_skipped": "A step that overflowed was not skipped: it changed {what}",
    "norms_differ": "Ranks clip by different gradient norms",
    "norm_of_a_part": "The gradient norm is not that of all gradients",
    "replicas_diverged": "{When} left ranks with different copies of {what}",
    "tie_split": "{When} split {what}, which is tied",
    "bad_partition": "{When} left shards that do not add up to {what}",
    "counter_off": "{When} left {what} with a wrong count",
    "hyperparameter": "{When} lost a param group's own settings: {what}",
    "setting_changed": "{When} changed what a param group holds: {what}",
    "group_members": "{When} rebuilt the param groups differently",
    "other_dtype": "{When} left {what} in {observed} instead of {expected}",
    "optimizer_not_loaded": "{When} loaded no state of the optimizer at all",
    "narrowed_parts": "{When} added tensor-parallel parts of {what} up in a narrower dtype",
    "narrowed": "{When} rounded {what} to a narrower dtype",
    "partly_narrowed": "{When} rounded some elements of {what} to a narrower dtype",
    "no_gradient": "{When} had no gradient for {what}",
    "skipped_again": "{When} was skipped for an overflow that was over",
    "stream_of_another_rank": "{When} gave ranks other ranks' random generators",
    "scale_of_a_part": "{When} took the scale of a part for {what}",
    "quantised_twice": "{When} quantised {what} again",
    "missing_contribution": "{When} left contributions out of {what}",
    "reduced_twice": "{When} reduced {what} more than once",
    "stepped_without_gradient": "{When} moved {what} without a gradient",
    "gradient_kept": "{When} added earlier steps' gradients to {what}",
    "narrowed_sum": "{When} added {what} up in a narrower dtype",
    "scaled": "{When} gave {what} the wrong scale",
    "permuted": "{When} put the parts of {what} in the wrong order",
    "misplaced": "{When} took parts of {what} from a wrong offset",
    "transposed": "{When} exchanged the dims of {what}",
    "shifted": "{When} moved {what} to a wrong offset",
    "wrong_coordinates": "{When} described parts of {what} in wrong coordinates",
    "padding_counted": "{When} took padding for elements of {what}",
    "halves_of_a_part": "{When} cut {what} at the half of a shard",
    "empty_part_kept": "The checkpoint lacks {what}, of which some ranks own nothing",
    "other_rank": "{When} gave ranks other ranks' parts of {what}",
    "counted_anew": "{When} was taken for the first one, in {what}",
    "size_of_another": "{When} was given a tensor of another one's size",
    "from_neighbours": "{When} put parts of another tensor into {what}",
    "not_updated": "{When} did not reach all of {what}",
    "not_finite": "{When} made {what} infinite or NaN",
    "continued_from": "{When} went on from stale weights in {what}",
    "moment_continued_from": "{When} went on from an earlier {what}",
    "weight_decay": "{When} decayed {what} another number of times than it stepped",
    "other_kernel": "{When} rounded {what} differently",
    "torn_save": "{When} put {what} together from two saves",
    "unwritten_memory": "{When} took memory that nobody had written for {what}",
    "moved_by_a_factor": "{When} moved {what} by another factor",
    "part_of_a_step": "{When} went wrong on a part of {what}",
    "load_did_nothing": "{When} had no effect on {what}",
    "load_without_effect": "{When} had no effect on {what}",
    "permuted_parameters": "{When} stored {what} under each other's names",
    "other_parameter": "{When} put another parameter's values into {what}",
    "other_role": "{When} exchanged state tensors: {what}",
    "initial_value": "{When} left {what} as they were initialised",
    "remainder_as_value": "{When} took remainders for masters: {what}",
    "stale_remainder": "{When} did not refresh the low bits of {what}",
    "stale_value": "{When} did not refresh {what}",
    "later_value": "{When} wrote {what} of a later step than its own",
    "kept_state_changed": "{When} went back to {what} of a later moment than the one that was kept in memory",
    "stale_copy_won": "{When} undid the load: a stale copy won in {what}",
    "zeroed": "{When} dropped {what}, or never filled it in",
    "loaded_unasked": "{When} restored {what} too, unasked",
    "boxes_lie": "{When} wrote a checkpoint that describes other shapes than it holds",
    "resolved_otherwise": "A setting came to another value than was asked for: {what}",
    "marks": "Parameters are marked wrongly for tensor parallelism: {what}",
    "warned": "The library warns where nothing is wrong",
    "initialising_step": "{When} created {what} that never stepped",
    "not_saved": "The checkpoint lacks {what}",
    "state_missing": "{When} lost {what}",
    "state_invented": "{When} created {what} that must not exist",
    "wrong_shape": "{When} gave {what} the wrong shape",
    "one_rank": "{When} went wrong on a part of the ranks, in {what}",
}
"""Mechanism of `shardproof.diagnosis` → what happened. `{observed}` and `{expected}` come from its first evidence."""

KINDS = {
    "unreadable": "{When} wrote a checkpoint that cannot be read",
    "missing": "{When} lost {what}",
    "extra": "{When} created {what} that must not exist",
    "dtype": "{When} left {what} in another dtype",
    "shape": "{When} gave {what} another shape",
    "size": "{When} left {what} with another number of bytes",
    "gap": "{When} left parts of {what} that no rank holds",
    "overlap": "{When} left several ranks with the same part of {what}",
    "replica_conflict": "{When} left ranks with different copies of {what}",
    "bits": "{When} gave {what} wrong bits",
    "norm": "The gradient norm is off",
    "direction": "Muon steps in another direction than the whole matrix's",
}
"""Kind of difference → what happened, where no rule knows why."""

WRITTEN_PHRASES = {
    "torn_save": "The checkpoint holds {what} of two saves",
    "replicas_diverged": "The checkpoint holds different copies of {what}",
    "wrong_shape": "The checkpoint holds {what} in the wrong shape",
    "shifted": "The checkpoint holds {what} at a wrong offset",
}
"""The same, where it is what was written that differs, and that says it better."""

ABOUT = {"counter_off": ("step", "scheduler", "scaler", "hyperparameter")}
"""Mechanism → the roles that it is about, where its evidence names none."""

WRITTEN_KINDS = {"missing": "The checkpoint lacks {what}", "extra": "The checkpoint holds {what} that nobody saved"}


def title(result: Result) -> str:
    """What went wrong in plain words, on one line of at most `LONGEST` characters."""
    return shortened(_title_of_verdict(result))


def _title_of_verdict(result: Result) -> str:
    match result.verdict:
        case Verdict.PASS:
            return "Every compared bit is as expected"
        case Verdict.UNSUPPORTED:
            return f"Refused: {result.reason}" if result.reason else "Refused by the system"
        case Verdict.UNKNOWN if CANNOT_IMPORT in first_line(result.reason):
            return f"No verdict, since {first_line(result.reason)}"
        case Verdict.UNKNOWN if told := _of_blind_arm(result):
            return f"No verdict: {told}"
        case Verdict.UNKNOWN:
            return f"No verdict, since shardproof itself failed: {result.reason or 'it does not say how'}"
        case Verdict.NONDETERMINISTIC:
            return f"Not the same in fresh ranks: {_failure(result)}"
    return _failure(result)


def _of_blind_arm(result: Result) -> str:
    """Return what the first arm of a trainer's cell says that could tell nothing, as where a run trains nothing."""
    return next((arm.sentence for arm in result.arms if arm.verdict == Verdict.UNKNOWN.value and arm.sentence), "")


def _failure(result: Result) -> str:
    """What failed first: the differences, where an error only follows from them; otherwise the error. Of a trainer's
    cell, what the first arm that failed says, which its judge has put into words already."""
    if result.headline_arm is not None and result.headline_arm.sentence:
        return _of_arm(result.headline_arm)
    first = min((d.key.op for d in result.differences), default=None)
    error = result.error
    if error is not None and (first is None or error.op is None or error.op <= first):
        return _error(error, _when(result))
    if first is not None:
        return _difference(result, first)
    return result.reason or result.signature or "It failed, and nothing says how"


def _of_arm(arm: ArmResult) -> str:
    """What an arm says without its last full stop. Of what is too long the first sentence, and of a sentence that is
    still too long what stands before its colon."""
    told = arm.paragraphs[0].strip().removesuffix(".")
    told = told.split(". ", 1)[0] if len(told) > LONGEST else told
    clause = told.split(": ", 1)[0]
    return clause if len(told) > LONGEST and len(clause) >= LONGEST // 4 else told


def _when(result: Result) -> str:
    first = next((course for course in result.courses if course.first and course.marks), None)
    course = result.kind_of(first.marks[-1][0]) if first else ""  # a rank that dies says nothing of where it was
    kind = result.failed_op.name if result.failed_op else course
    return WHEN.get(kind, kind) if kind else "Starting"


# --- errors -------------------------------------------------------------------------------------------


def _error(error: Failure, when: str) -> str:
    if error.type == "deadline":
        return _hang(error, when)
    if error.type in ("died", "killed"):
        rank = "A rank" if error.rank is None else f"Rank {error.rank}"
        return f"{rank} died: {_lower(when)} did not end"
    name = error.type.rpartition(".")[2]
    message, place = _message(error.message), place_of(error)
    where = [f" in {place.short}", f" in {place.function}"] if place else []
    told = f"{when} raised {name}: {message}" if message else f"{when} raised {name}"
    if not message and name == "AssertionError":
        told = f"{when} failed an assertion"
    return next((f"{told.rstrip('.')}{at}" for at in where if len(told + at) <= LONGEST), told)


def _message(text: str) -> str:
    """The first line of a message, and the next where the first only announces it; paths by their last part."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    line = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    line = re.sub(r"\b(D?[Tt]ensor)\((?:\[|local_tensor).*", r"\1(…)", line)
    return re.sub(r"(?:/[^/\s'\":,]+){2,}/([^/\s'\":,]+)", r"…/\1", line)


def _hang(error: Failure, when: str) -> str:
    seconds = re.search(r"no end after (\d+) s", error.message)
    ranks = len(set(re.findall(r"\brank (\d+) in ", error.message)))
    held = f"{_count(ranks, 'rank')} {'was' if ranks == 1 else 'were'} still in it"
    waited = f" after {seconds[1]} s" if seconds else ""
    return f"{when} never ended: {held}{waited}" if ranks else f"{when} never ended"


# --- differences --------------------------------------------------------------------------------------


def _difference(result: Result, first: int) -> str:
    here = [d for d in result.differences if d.key.op == first]
    best = result.explanations[0] if result.explanations else None
    evidence: Sequence[Mapping[str, object]] = ()
    phrase = _phrase_of_kind(here[0])
    if best is not None and not best.text.startswith("Nothing explains"):
        phrase, evidence = _phrase_of(best), best.evidence
        here = _explained(here, best)
    told = _subject(here, result)
    if best is not None and evidence and told[0].key.where != LIVE:
        phrase = WRITTEN_PHRASES.get(best.mechanism, phrase)
    values = {"When": _when(result), "what": what(told), **_plain(evidence)}
    if any(name and name not in values for _, name, _, _ in Formatter().parse(phrase)):
        phrase = _phrase_of_kind(told[0])
    if created := _created(result):
        return f"{_when(result)} created {_things(dict.fromkeys(d.key.role for d in told))}: {created}"
    sentence = phrase.format(**values)
    details = [] if "{observed}" in phrase else _details(told, evidence)
    joint = ", " if ": " in sentence else ": "
    fitting = (joined for detail in details if len(joined := f"{sentence}{joint}{detail}") <= LONGEST)
    return next(fitting, sentence)


def _phrase_of(best: Explanation) -> str:
    """The phrase for a mechanism in a title. A mechanism without a phrase in `PHRASES` is described by the opening
    words of its explanation."""
    told = re.search("“(.+?)”", best.text) if best.mechanism == "warned" else None
    if told:
        return f"{PHRASES['warned']}: {told[1].replace('{', '{{').replace('}', '}}')}"
    opening = best.text.split(": ")[0].rstrip(".").replace("{", "{{").replace("}", "}}")
    return PHRASES.get(best.mechanism) or f"{{When}}: {_lower(opening)}: {{what}}"


def _phrase_of_kind(difference: Difference) -> str:
    table = KINDS if difference.key.where == LIVE else {**KINDS, **WRITTEN_KINDS}
    return table.get(difference.kind, "{When} went wrong in {what}")


def _explained(differences: list[Difference], best: Explanation) -> list[Difference]:
    """The differences that an explanation is about, as far as its evidence names them."""
    names = {str(item.get("name", "")) for item in best.evidence}
    roles = {str(item["role"]) for item in best.evidence if "role" in item}
    for item in best.evidence:
        several = item.get("roles")
        roles |= set(several) if isinstance(several, list | tuple) else set()
    roles = roles or set(ABOUT.get(best.mechanism, ()))
    named = [(d.key.fqn in names or not names) and (not roles or d.key.role in roles) for d in differences]
    looks = [(d.key.role, d.key.where, d.kind) for d in differences]
    alike = Counter(look for look, is_named in zip(looks, named, strict=True) if is_named)
    # Rules look at no more than `ALIKE` of those that look alike: where that many are named, all are meant.
    found = [d for d, look, is_named in zip(differences, looks, named, strict=True) if is_named or alike[look] == ALIKE]
    return found or [d for d in differences if d.key.role in roles] or differences


def _subject(differences: list[Difference], result: Result) -> list[Difference]:
    """Those that a title names: live before written, of a step those of the role that it computes first."""
    live = [d for d in differences if d.key.where == LIVE]
    found = live or differences
    op = result.failed_op.name if result.failed_op else ""
    ranked = [CAUSE_FIRST.index(d.key.role) for d in found if d.key.role in CAUSE_FIRST]
    if op in ("step", "overflow") and ranked:
        return [d for d in found if d.key.role == CAUSE_FIRST[min(ranked)]]
    return found


def what(differences: Sequence[Difference]) -> str:
    """The things that differ, as the object of a sentence: `moments of 4 parameters`, `up.weight`."""
    roles = tuple(dict.fromkeys(d.key.role for d in differences))
    if all(role in BY_NAME for role in roles):
        return _listed([d.key.fqn for d in differences], THINGS[roles[0]])
    if all(role in ALONE for role in roles):
        return _things(roles)
    others = [role for role in roles if role != "param"]
    counted = [d for d in differences if d.key.role not in (*BY_NAME, *ALONE)]
    if "param" in roles:
        counted = [d for d in counted if d.key.role == "param"]
    names = tuple(dict.fromkeys(d.key.fqn for d in counted))
    owners = names[0] if len(names) == 1 else _count(len(names), "parameter")
    if "param" not in roles:
        return f"{_things(roles)} of {owners}"
    whose = "" if others and others[0] in (*BY_NAME, *ALONE) else "its " if len(names) == 1 else "their "
    return f"{owners} and {whose}{_things(others)}" if others else owners


def _things(roles: Iterable[str]) -> str:
    """Roles in words; what Adam keeps of a parameter is `optimizer state`, its two moments are `moments`."""
    found = list(roles)
    state = [role for role in found if role in OPTIMIZER_STATE]
    if len(state) > 1:
        joined = "moments" if set(state) == {"exp_avg", "exp_avg_sq"} else "optimizer state"
        words = [joined, *(THINGS.get(role, role) for role in found if role not in state)]
    else:
        words = [THINGS.get(role, role) for role in found]
    words = words if len(words) <= 3 else [*words[:2], "more"]
    return " and ".join(words) if len(words) < 3 else f"{words[0]}, {words[1]} and {words[2]}"


def _listed(names: Sequence[str], things: str) -> str:
    """One name or two; of more how many there are."""
    found = tuple(dict.fromkeys(names))
    return " and ".join(found) if len(found) <= 2 else f"{found[0]} and {len(found) - 1} more {things}"


def _details(told: Sequence[Difference], evidence: Sequence[Mapping[str, object]]) -> list[str]:
    """What there may be room for behind the sentence, the best first."""
    first: Mapping[str, object] = evidence[0] if evidence else {}
    expected, observed = first.get("expected"), first.get("observed")
    if first.get("is"):
        return [str(first["is"])]
    if "factor" in first:
        named = (first.get("known_as"), _number(first["factor"]))
        return [f"{factor} times what it must be" for factor in named if factor]
    if first.get("holds"):
        return [f"{first.get('name')} holds {first['holds']}'s"]
    if first.get("through"):
        return [str(first["through"])]
    if isinstance(expected, str) and isinstance(observed, str):
        return [f"{observed} instead of {expected}"]
    one_role = len({d.key.role for d in told}) == 1 or told[0].kind in ("dtype", "shape")
    seen = _seen(told[0], alone=len(told) == 1) if one_role else ""
    return [seen] if seen else []


def _created(result: Result) -> str:
    """Of optimizer state that nothing but a step may create: what its step counter says."""
    if not result.explanations or result.explanations[0].mechanism != "initialising_step" or not result.failed_op:
        return ""
    steps = [
        d for d in result.differences
        if d.key.role == "step" and d.kind == "extra" and d.key.where == LIVE and d.key.op == result.failed_op.index
    ]  # fmt: skip
    counted = [d for d in steps if _first_number(d.observed_first) not in ("", "0")]
    if not counted:
        return ""
    optimizer = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}[result.scenario.optimizer.kind]
    whose = f"{len(counted)} parameters that" if len(counted) > 1 else f"{counted[0].key.fqn}, which"
    return f"{optimizer}'s step is {_first_number(counted[0].observed_first)} for {whose} never stepped"


def _seen(difference: Difference, *, alone: bool) -> str:
    """One difference in numbers: a scalar's both values, or how many elements of a tensor and how far off; empty where
    that says nothing, as that all elements differ by a lot."""
    expected, observed = _first_number(difference.expected_first), _first_number(difference.observed_first)
    if difference.kind in ("dtype", "shape"):
        return difference.detail.removeprefix("dtype ").removeprefix("shape ")
    if difference.kind not in ("bits", "norm"):
        return ""
    name = "" if alone else difference.key.fqn
    if difference.total <= 1 and expected and observed and expected != observed:
        return f"{name} is {observed} instead of {expected}" if name else f"{observed} instead of {expected}"
    near = difference.max_ulp is not None and 0 < difference.max_ulp < NEAR_ULP
    told = f"up to {difference.max_ulp} ULP off" if near else ""
    if difference.mismatched < difference.total:
        counted = f"{difference.mismatched} of {difference.total} elements{f' of {name}' if name else ''}"
        return f"{counted}, {told}" if told else counted
    return f"{name} {told}".strip() if told else ""


# --- words --------------------------------------------------------------------------------------------


def _plain(evidence: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """The two sides of the first piece of evidence, where it has them as words."""
    first = evidence[0] if evidence else {}
    return {key: str(first[key]) for key in ("expected", "observed") if isinstance(first.get(key), str)}


def _first_number(shown: str) -> str:
    """The number of `1.0 (0x3f800000)`, without a needless `.0`; of a text the text."""
    return _number(shown.partition(" (0x")[0])


def _number(value: object) -> str:
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value)


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text on one line, without control characters, cut between words where it is too long."""
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069]+", " ", text)
    line = " ".join(line.split())
    if len(line) <= longest:
        return line
    cut = line[: longest - 1]
    at = cut.rfind(" ")
    return (cut[:at] if at > longest // 2 else cut).rstrip(" ,;:") + "…"
