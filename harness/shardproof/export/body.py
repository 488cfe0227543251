"""The main function of a script: the operations of a case in the library's calls, and the comparison at its end.

A system says how it does each kind of operation, in lines (`Draft.calls`). What a script does once stands in `main`
itself; what it does twice becomes a function of the operation's name. In these lines `$number` stands for the number of
the build, which draws other initial values than the one before, or of the step.

A checkpoint that goes to another mesh needs ranks of another number. There are then two main functions, `saving` and
`loading`, and what is compared goes from one to the other through a file.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardproof.export.case import KEPT, SETTING, TRAINED, TYPED, WRITTEN, FailureCase
from shardproof.export.model import TORCH_NAME
from shardproof.program import Op

WORKS = {
    "build": "the model is built",
    "step": "the step ends",
    "overflow": "the step ends",
    "save": "the checkpoint is written",
    "load": "the checkpoint is loaded",
    "load_model_only": "the weights are loaded",
    "reload_params": "the masters are refreshed",
    "unfreeze": "the parameters are unfrozen",
    "compute_gradients": "the backward passes end",
    "apply_gradients": "the step ends",
    "keep": "the state dicts are copied",
    "save_kept": "the kept state dicts are written",
    "recall": "the kept state dicts are loaded",
    "replace_params": "the parameters are given other values",
}
"""What must happen at an operation, for a sentence that begins with "expected that"."""

NAMES = {
    "load_model_only": "load of the weights",
    "reload_params": "refresh of the masters",
    "compute_gradients": "backward passes",
    "apply_gradients": "optimizer step",
    "overflow": "step that overflows",
    "keep": "copy of the state dicts",
    "save_kept": "save of the kept state dicts",
    "recall": "load of the kept state dicts",
    "replace_params": "change of the parameters",
}
"""What an operation is called behind "the" where its kind is no word of a reader's."""

INLINE = ("keep", "save_kept", "recall")
"""Operations that never become a function: what they keep is a variable of the main function."""

LONG = 400
"""How many characters of an error a script prints."""

STATE = "model, optimizer"
"""What a build returns, and what other operations are given, where a system does not say otherwise (`state`)."""


def name_of(kind: str) -> str:
    """What an operation is called behind "the" in a sentence."""
    return NAMES.get(kind, kind.replace("_", " "))


def what_works(kind: str, calls: Mapping[str, str]) -> str:
    """What must happen at an operation: as the system says it for this case (`works`), else as for any."""
    return calls.get("works", WORKS.get(kind, f"the {name_of(kind)} ends"))


@dataclass(frozen=True)
class Main:
    """One main function. name: `main`, or `saving` and `loading`. lines: its body. world: number of ranks."""

    name: str
    lines: tuple[str, ...]
    world: int


def mains(case: FailureCase, calls: Mapping[str, str], values: str) -> list[Main]:
    """The main functions of a case.

    Args:
        calls: kind of operation → lines that do it. values: the expression of what is compared.
    """
    parts = case.parts
    names = ("main",) if len(parts) == 1 else ("saving", "loading")
    often = repeated(case)
    return [
        Main(name, tuple(_main(case, part, calls, often, values)), part[0].mesh.world)
        for name, part in zip(names, parts, strict=True)
    ]


def repeated(case: FailureCase) -> dict[str, bool]:
    """The kinds of operations that a case does more than once; whether they differ in their number."""
    counts = Counter(op.kind for op in case.ops)
    numbered = ("build", "step", "overflow", "compute_gradients")
    return {kind: kind in numbered for kind, count in counts.items() if count > 1 and kind not in INLINE}


def functions(case: FailureCase, calls: Mapping[str, str]) -> str:
    """A function for each kind of operation that a case does more than once."""
    found = []
    for kind, numbered in repeated(case).items():
        state = calls.get("state", STATE)
        given = "" if kind == "build" else state
        body = calls[kind] + (f"\nreturn {state}" if kind == "build" else "")
        for name, told in (("number", numbered), ("checkpoint", True)):
            if told and f"${name}" in body:
                given = ", ".join(filter(None, (given, name)))
            body = body.replace(f"${name}", name)
        body = textwrap.indent(body, "    ")
        found.append(f"def {kind}({given}):\n{body}\n")
    return "\n\n".join(found)


def subject(case: FailureCase) -> str:
    """What is compared, for the beginning of a sentence."""
    focus = case.focus
    if case.is_shape:
        whose = focus.fqn if focus.role == "param" else f"{focus.role} of {focus.fqn}"
        return f"shape of {whose} in the checkpoint"
    if case.is_missing:
        return f"whether the checkpoint holds {focus.role} of {focus.fqn}"
    if focus.setting:
        return f"{focus.setting} of the param group of {focus.fqn} after the {name_of(focus.op.kind)}"
    place = "in the checkpoint" if focus.kind == WRITTEN else f"after the {name_of(focus.op.kind)}"
    if focus.kind == TYPED:
        seen = ", as the forward sees it," if focus.role == "compute_param" else ""
        return f"dtype of {focus.fqn}{seen} {place}"
    return f"{focus.role} of {focus.fqn} {place}"


def _main(
    case: FailureCase, part: tuple[Op, ...], calls: Mapping[str, str], often: Mapping[str, bool], value: str
) -> list[str]:
    lines = calls["start"].splitlines()
    for op in part:
        call = _call(op, calls, often)
        if op is case.reference_op and not (
            _says_subject(calls) or case.is_shape or (case.is_missing and "holds" in calls)
        ):
            lines.append(f"expected = {value}")
            if len(case.parts) > 1:
                lines.append('torch.save(expected, CHECKPOINT + ".expected")')
        lines += _last(case, op, part, call, calls, value) if op is case.ops[-1] else call
    return lines if part[-1] is case.ops[-1] else [*lines, "return 0"]


def _call(op: Op, calls: Mapping[str, str], often: Mapping[str, bool]) -> list[str]:
    number = op.init_seed if op.kind == "build" else op.iteration
    numbers = {"$number": str(number), "$checkpoint": str(op.checkpoint)}
    if op.kind not in often:
        call = calls[op.kind]
        for name, value in numbers.items():
            call = call.replace(name, value)
        return call.splitlines()
    state = calls.get("state", STATE)
    given = [] if op.kind == "build" else [state]
    given += [value for name, value in numbers.items() if name in calls[op.kind]]
    return [f"{f'{state} = ' if op.kind == 'build' else ''}{op.kind}({', '.join(given)})"]


def _last(
    case: FailureCase, op: Op, part: tuple[Op, ...], call: list[str], calls: Mapping[str, str], value: str
) -> list[str]:
    """The operation at which the failure shows, and the comparison."""
    focus, works = case.focus, f"expected that {what_works(op.kind, calls)}"
    if _says_subject(calls):
        told = [f"expected = {calls['expected']}", f"observed = {value}"]
        return [*call, *told, *_compared(case, op.mesh.world, calls)]
    if case.is_shape:
        shape = case.spec.param(focus.fqn).spec.shape
        return [*call, f"expected = {shape!r}", f"observed = {calls['shape']}", *_compared(case, op.mesh.world, calls)]
    if case.is_missing and "holds" in calls:
        return [*call, "expected = True", f"observed = {calls['holds']}", *_compared(case, op.mesh.world, calls)]
    match focus.kind:
        case "raises":
            return _raising(case, call, calls, works)
        case "hangs":
            return [
                f'watch("{works}; observed that it has not ended after a minute")',
                *call,
                *(["dist.barrier()"] if op.mesh.world > 1 else []),  # it has ended when no rank is left in it
                f'print("{works}; it is so", flush=True)',
                "os._exit(0)",
            ]
    if focus.kind == KEPT and case.reference_op and case.reference_op not in part:
        call = [*call, 'expected = torch.load(CHECKPOINT + ".expected")']
    if focus.kind == KEPT and case.reference_op is None and "expected" not in calls:
        call = [*call, "expected = weight(model)"]
    if "expected" in calls:
        call = [*call, f"expected = {calls['expected']}"]
    elif focus.kind == TRAINED:
        call = [*call, f"expected = plain({op.iteration + (op.kind == 'step')})"]
    if focus.kind == TYPED:
        call = [*call, f"expected = {TORCH_NAME[focus.expected_dtype]}"]
    return [
        *call,
        f"observed = {'written(model)' if focus.kind == WRITTEN else value}",
        *_compared(case, op.mesh.world, calls),
    ]


def _says_subject(calls: Mapping[str, str]) -> bool:
    """Whether the system says itself what is compared: the beginning of the sentence, and what is expected."""
    return "subject" in calls and "expected" in calls


def _raising(case: FailureCase, call: list[str], calls: Mapping[str, str], works: str) -> list[str]:
    """An operation that must not raise. Of several ranks each says what it met: the first to end is heard in any
    case. An error without a message is told by the line of the library that raised it."""
    several = case.ops[-1].mesh.world > 1
    before = "rank {dist.get_rank()}: " if several else ""
    error = case.result.error
    mute = error is not None and not error.message.strip() and "unwrap" not in calls
    said = "{traceback.extract_tb(error.__traceback__)[-1].line}" if mute else "{error}"
    if error is not None and len(error.message) > LONG:
        said = f"{{str(error)[:{LONG}]}}"
    return [
        "try:",
        *(f"    {line}" for line in call),
        f"except {calls.get('except', case.focus.error.rpartition('.')[2])} as error:",
        *(f"    {line}" for line in calls.get("unwrap", "").splitlines()),
        f'    print(f"{before}{works}; observed {{type(error).__name__}}: {said}", flush=True)',
        "    return 1",
        f'print({"f" if several else ""}"{before}{works}; no error here", flush=True)',
        "return 0",
    ]


def _compared(case: FailureCase, world: int, calls: Mapping[str, str]) -> list[str]:
    """The last lines of a comparison: a sentence with the first element that differs, and the exit status."""
    speaker = calls.get("speaker", str(case.speaker))
    lines = [f"if dist.get_rank() != {speaker}:", "    return 0"] if world > 1 else []
    flush = ", flush=True" if world > 1 else ""
    if (
        _says_subject(calls)
        or case.focus.role in ("step", SETTING)
        or case.focus.kind == TYPED
        or case.is_shape
        or case.is_missing
    ):
        named = calls["subject"] if _says_subject(calls) else subject(case)
        sentence = f"{named}: expected {{expected}}, observed {{observed}}"
        return [*lines, f'print(f"{sentence}"{flush})', "return int(expected != observed)"]
    told = "element {at}: expected {expected[at]}, observed {observed[at]}"
    return [
        *lines,
        "wrong = (expected != observed).nonzero().tolist()",
        "at = tuple(wrong[0] if wrong else [0] * expected.dim())",
        f'print(f"{subject(case)}, {told}"{flush})',
        "return int(len(wrong) > 0)",
    ]
