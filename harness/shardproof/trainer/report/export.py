"""A trainer's failure as a script without shardproof: its file word for word, the two arms that differ, and a look.

Three files are written. `repro.py` has the cell and two short functions of a trainer's own calls, such as
"build, step, save" and "build, load"; each runs in fresh ranks, and what the failing arm names is compared bit for bit.
The trainer's file lies beside it as its author wrote it, with the modules of its own folder that it imports. What the
file imports from shardproof is `stand_in.py`, which also starts the ranks and looks at the state.

    failing arm            expected                             observed
    twice                  the uninterrupted run                the same once more
    unsaved                the run without a save               the run with one; or the moments around the save
    cut, resumed           the uninterrupted run                the one that stops early; the one that loads
    used                   fresh ranks that load                ranks that have stepped, and load
    used, loaded twice     what was saved last                  what the second load in the process gives
    other mesh             what was saved                       what ranks of another number have loaded
    altered                the setting that is to win           the setting after the load

Of a crash or a hang the script does what the failing session does, and watches its last call. What the arms `again`,
`written`, `twin` and `ranks agree` see has no script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from shardproof.diff import Difference
from shardproof.export.case import FailureCase, NoExportError
from shardproof.export.script import Draft, fill, literal
from shardproof.models import ModelSpec, model_spec
from shardproof.observe.record import LIVE
from shardproof.program import FIT, NO_CHECKPOINT, Op
from shardproof.result import ArmResult, Result
from shardproof.trainer.arms import ALIKE, ALTERED, ANEW, OTHER, RESUMED, TWICE, UNSAVED, WHOLE, Session, sessions_of
from shardproof.trainer.cells import mesh_of, values_of
from shardproof.trainer.described import REFUSE, RUN, Described, text_of
from shardproof.trainer.values.every_mesh import OF_A_RANK
from shardproof.verdict import Verdict

HOME, SCRIPT, STAND_IN = "shardproof.trainer.report", "repro.py.j2", "stand_in.py.j2"
SERVED = ("shardproof", "shardproof.trainer", "shardproof.trainer.base")
"""What a trainer's file may import of shardproof."""

MOST_NAMES = 8
"""Of so many values of one role a script has the names; of more it compares all of the role."""

HANG_S = 60

EMULATED = (
    "its ranks ran on an emulated GPU, which a script without shardproof has not; a failure that `--device cuda` finds "
    "on a real one has a script"
)


@dataclass(frozen=True)
class Run:
    """One function of a script. name: of the function. session: whose operations, of which it does `ops`. after: of a
    trainer with `fit`, after how many updates its state is looked at; 0 for those that are watched to their end."""

    name: str
    session: Session
    ops: tuple[Op, ...]
    after: int = 0

    @property
    def reads(self) -> set[int]:
        """The numbers of the checkpoints that it loads."""
        return {op.checkpoint for op in self.ops if op.kind == "load"} | {op.taken for op in self.ops if op.kind == FIT}


@dataclass(frozen=True)
class Shown:
    """What a script shows of a failing arm.

    * runs: in their order. The last two are compared or, of a crash or a hang, the last must end.
    * names: role → names of what is compared. error: the exception's name, or `deadline`; empty for a comparison.
    """

    arm: ArmResult
    runs: tuple[Run, ...]
    names: Mapping[str, tuple[str, ...]]
    error: str = ""


def draft(case: FailureCase) -> Draft:
    """The script of a trainer's failure, and the files beside it.

    Raises:
        NoExportError: no failing arm has a script, or the file needs what a script cannot give it.
    """
    result, scenario = case.result, case.scenario
    sessions = sessions_of(scenario)
    trainer = _trainer(scenario.system)
    if scenario.faults:
        raise NoExportError.because(result, "its failure is a planted fault")
    if trainer.emulates and scenario.device == "cpu":
        raise NoExportError.because(result, EMULATED)
    shown = _shown(result, sessions, trainer, whole=case.whole)
    if shown.arm.name.startswith(ALTERED) and trainer.altered[shown.arm.name.removeprefix(f"{ALTERED} ")] == REFUSE:
        raise NoExportError.because(result, "`load` is to raise an error, and a script compares what it comes to")
    modules = _modules(trainer, result)
    values = _values(trainer, values_of(trainer, scenario))
    entries = [_entry(run, shown, scenario.seed, trainer, values, mesh_of(trainer, scenario)) for run in shown.runs]
    if scenario.device != "cpu":
        entries = [
            {**entry, "settings": f"{entry['settings']}, device={literal(scenario.device)}"} for entry in entries
        ]
    kinds = {"": "compare", "deadline": "must_end"}
    needed = [*(["checkpoint"] if _mentions(entries, "checkpoint(") else []), "in_fresh_ranks",
              kinds.get(shown.error, "must_not_raise")]  # fmt: skip
    beside = {**modules, "stand_in.py": fill(HOME, STAND_IN, probes=_probes(trainer, result, values))}
    told = {
        "names": sorted(needed), "module": next(iter(modules)).removesuffix(".py"), "trainer": trainer.name,
        "cell": values, "compared": {} if shown.error else shown.names, "sessions": entries,
    }  # fmt: skip
    calls = "\n\n".join(
        f"def {entry['name']}(trainer, cell):\n    " + "\n    ".join(entry["lines"]) for entry in entries
    )
    needs = " ".join(f'"{text}"' if re.search(r"[<>;\s]", text) else text for text in _requires(trainer, result))
    return Draft(
        HOME, SCRIPT, {"sessions": calls}, values=told, library=_needs(needs, modules), case=case, beside=beside,
        title=shown.arm.paragraphs[0], what=_what(shown),
    )  # fmt: skip


def _trainer(system: str) -> Described:
    from shardproof.protocol.registry import system_named

    found: Described = system_named(system).trainer  # type: ignore[attr-defined]
    return found


def _requires(trainer: Described, result: Result) -> list[str]:
    """What to install: the release that ran of the first package, and what stands beside it."""
    first, *beside = trainer.requires or ("",)
    release = result.version
    return [f"{first.partition('==')[0]}=={release}", *beside] if first else []


def _needs(requires: str, modules: Mapping[str, str]) -> str:
    """The paragraphs at the head of a script that say what it needs."""
    names = ", ".join(modules)
    found = f"Beside it lie {names}, the training script as it is, and stand_in.py, which reads its state. "
    return found + (f"Besides torch they need:\n\n    pip install {requires}" if requires else "They need torch.")


def _what(shown: Shown) -> str:
    """What should hold, for the text of an issue."""
    *_, last = shown.runs
    if shown.error:
        return f"`{last.name}` below should come to its end."
    return f"`{last.name}` below should leave the same state as `{shown.runs[-2].name}`, bit for bit."


# Which arm, and which runs


def _shown(result: Result, sessions: Sequence[Session], trainer: Described, *, whole: bool) -> Shown:
    """The first failing arm that has a script; that of a trainer that is not deterministic at last."""
    failing = [arm for arm in result.arms if Verdict(arm.verdict).is_failure]
    reasons = []
    for arm in sorted(failing, key=lambda arm: arm.name == TWICE):
        try:
            runs, found, error = _runs(arm, result, sessions, trainer)
        except _NoScript as reason:
            reasons.append(f"the arm `{arm.name}` {reason}")
            continue
        return Shown(arm, (*_savers(runs, sessions), *runs), _names(found, whole=whole), error)
    raise NoExportError.because(result, "; ".join(reasons) or "no arm failed")


class _NoScript(Exception):  # noqa: N818 (the reason why an arm has none)
    """Why an arm has no script."""


def _runs(
    arm: ArmResult, result: Result, sessions: Sequence[Session], trainer: Described
) -> tuple[list[Run], list[Difference], str]:
    """The runs of an arm, its differences, and the exception that ends the last one.

    Raises:
        _NoScript: it has none.
    """
    if arm.verdict in (Verdict.CRASH.value, Verdict.HANG.value):
        session = next((session for session in sessions if session.name == arm.name), None)
        error = result.error
        if session is None or error is None or error.op not in [op.index for op in session.ops]:
            raise _NoScript("ended by an error that the result does not keep")
        if error.type == "killed":
            raise _NoScript("ended because a rank was killed")
        return [_until(session, error.op)], [], error.type.rpartition(".")[2]
    if reason := UNSHOWN.get(arm.name.split()[0] if arm.name.startswith(ALIKE) else arm.name):
        raise _NoScript(reason)
    found = [d for d in result.differences if d.fails and d.key.where == LIVE and d.kind in COMPARED]
    left, right, found = _compared(arm.name, found, sessions, trainer)
    return [left, right], found, ""


UNSHOWN = {
    ALIKE: "compares two values of an axis up to rounding, which no script does",
    "again": "compares files, which `shardproof diff` shows",
    "written": "looks into files, and compares no state",
    "twin": "compares with torch's optimizer on whole tensors, which no script has",
    "ranks agree": "compares ranks with one another, which no script does",
}
"""Arms without a script, and why."""

COMPARED = ("bits", "missing", "extra", "dtype", "shape")


def _compared(
    name: str, found: Sequence[Difference], sessions: Sequence[Session], trainer: Described
) -> tuple[Run, Run, list[Difference]]:
    """What is expected, what is observed, and the differences between the two."""
    by_name = {session.name: session for session in sessions}
    whole, session = by_name[WHOLE], by_name[name]
    save = whole.first("save")
    ops = {op.index for op in session.ops}
    if name == UNSAVED and any(d.key.op == save for d in found):
        before = replace(_until(whole, save - 1), name="not_saved")
        return before, replace(_until(whole, save), name="saved"), [d for d in found if d.key.op == save]
    here = [d for d in found if d.key.op in ops]
    if not here:
        raise _NoScript("has no difference in live state")
    at = min(d.key.op for d in here)
    here = [d for d in here if d.key.op == at]
    right, op = _until(session, at), next(op for op in session.ops if op.index == at)

    def same(other: Session) -> Run:
        """Another session up to the same moment."""
        if op.kind == "load" and other is whole:
            return _until(whole, save)
        kinds = [each for each in other.ops if (each.kind, each.iteration) == (op.kind, op.iteration)]
        return _until(other, kinds[0].index)

    match session.kind:
        case "unsaved":
            return right, same(whole), here
        case "used" if op.checkpoint == ANEW:
            *_, again = (each.index for each in session.ops if each.kind == "save")
            return replace(_until(session, again), name="saved_again"), replace(right, name="loaded_again"), here
        case "used":
            return same(by_name[RESUMED]), right, here
        case "altered" if trainer.altered[session.of] == RUN:
            built = replace(_until(session, session.ops[0].index), name="built")
            return built, right, here
        case "altered":
            return same(by_name[RESUMED]), right, here
    return same(whole), right, here


def _until(session: Session, index: int) -> Run:
    """A session up to an operation."""
    name = session.kind.replace(" ", "_")
    ops = tuple(op for op in session.ops if op.index <= index)
    if ops[0].kind == FIT:
        return Run(name, session, ops[:1], len(ops) - 1)
    return Run(name, session, ops)


def _savers(runs: Sequence[Run], sessions: Sequence[Session]) -> list[Run]:
    """The runs that write the checkpoints which `runs` load and do not write."""
    saved = {op.checkpoint for run in runs for op in run.ops if op.kind in ("save", FIT)}
    wanted = sorted({number for run in runs for number in run.reads} - saved - {NO_CHECKPOINT, -1})
    found = []
    for number in wanted:
        session, op = next(
            (session, op) for session in sessions for op in session.ops
            if op.kind in ("save", FIT) and op.checkpoint == number
        )  # fmt: skip
        found.append(replace(_until(session, op.index), name=f"{session.kind}_to_save", after=0))
    return [*_savers(found, sessions), *found] if found else []


def _names(found: Sequence[Difference], *, whole: bool) -> dict[str, tuple[str, ...]]:
    """Role → names of what is compared."""
    roles: dict[str, list[str]] = {}
    for difference in found:
        name = re.sub(r"^rank\d+\.", "", difference.key.fqn)
        roles.setdefault(difference.key.role, []).append(name)
    return {
        role: ("*",) if role not in OF_A_RANK and (whole or len(names) > MOST_NAMES) else tuple(dict.fromkeys(names))
        for role, names in roles.items()
    }


# The text of the runs


def _entry(
    run: Run, shown: Shown, seed: int, trainer: Described, values: Mapping[str, Any], mesh: str
) -> dict[str, Any]:
    """The lines and the settings of one run, for the template."""
    last = run is shown.runs[-1]
    lines = _lines(run.ops)
    if shown.error and last:
        watch = f"must_end({HANG_S})" if shown.error == "deadline" else f"must_not_raise({literal(shown.error)})"
        at = 0 if shown.error == "deadline" else len(lines) - 1  # a rank that waits may be an operation further
        lines = [*lines[:at], f"with {watch}:", *(f"    {line}" for line in lines[at:])]
    on = run.session.of if run.session.kind == OTHER else mesh
    settings = [f'mesh="{on}"', f"seed={(seed * 1000 + run.ops[0].init_seed) % 2**32}"]
    settings += [f"after={run.after}"] if run.after and not shown.error else []
    settings += ["gathered=True"] if any(each.session.kind == OTHER for each in shown.runs) and not shown.error else []
    kept = {id(shown.runs[-1]): "observed = ", id(shown.runs[-2] if len(shown.runs) > 1 else run): "expected = "}
    cell = "CELL"
    if run.session.kind == ALTERED:
        axis = run.session.of
        other = next(value for value in trainer.literals[axis] if value != values[axis])
        cell = f'{{**CELL, "{axis}": {literal(other)}}}'
    return {"name": run.name, "lines": lines, "settings": ", ".join(settings), "cell": cell,
            "kept": "" if shown.error else kept.get(id(run), "")}  # fmt: skip


def _lines(ops: Sequence[Op]) -> list[str]:
    """The calls of a session, four steps and more in a row as a loop. The last step stands by itself, since it may be
    the one that is watched."""
    found: list[str] = []
    for kind, group in groupby(ops, lambda op: op.kind):
        own = list(group)
        if kind == "step" and len(own) > 3:
            found += [f"for index in range({own[0].iteration}, {own[-1].iteration}):", "    trainer.step(index)"]
            own = own[-1:]
        found += map(_line, own)
    return found


def _line(op: Op) -> str:
    match op.kind:
        case "build":
            return "trainer.build(cell)"
        case "step":
            return f"trainer.step({op.iteration})"
        case "save" | "load":
            return f"trainer.{op.kind}(checkpoint({op.checkpoint}))"
    folder = None if op.checkpoint == NO_CHECKPOINT else f"checkpoint({op.checkpoint})"
    resume = None if op.taken < 0 else f"checkpoint({op.taken})"
    return f"trainer.fit(cell, {op.iteration}, {folder}, {resume})"


def _values(trainer: Described, texts: Mapping[str, str]) -> dict[str, Any]:
    """Axis → value as it stands in the file; the mesh is no part of it."""
    return {
        axis: next((value for value in trainer.literals[axis] if text_of(value) == text), text)
        for axis, text in texts.items()
        if axis != "mesh"
    }


def _mentions(entries: Sequence[Mapping[str, Any]], text: str) -> bool:
    return any(text in line for entry in entries for line in entry["lines"])


# The files beside a script


def _modules(trainer: Described, result: Result) -> dict[str, str]:
    """Name → text of the trainer's file, which comes first, and of the modules of its folder that it imports.

    A file with the name of a library that it imports, such as `accelerate.py`, would stand in that library's place
    where a script lies beside it. So a trainer's file of that kind gets another name, and any other is no module.

    Raises:
        NoExportError: it imports of shardproof what a script has not, or a package of its folder, or has the name of
            one of a script's own files.
    """
    found: dict[str, str] = {}
    waiting = [trainer.file]
    while waiting:
        file = waiting.pop(0)
        text = file.read_text("utf-8")
        imported = set(_imported(ast.parse(text)))
        of_a_library = file.stem in {name.partition(".")[0] for name in imported}
        if of_a_library and file != trainer.file:
            continue
        found[f"{file.stem}_trainer.py" if of_a_library else file.name] = text
        if strange := [name for name in imported if name.partition(".")[0] == "shardproof" and name not in SERVED]:
            reason = f"{file.name} imports {min(strange)}, which is not there without shardproof"
            raise NoExportError.because(result, reason)
        for top in sorted({name.partition(".")[0] for name in imported} - {file.stem}):
            if (file.parent / top / "__init__.py").is_file():
                raise NoExportError.because(result, f"{file.name} imports the package {top} that lies beside it")
            beside = file.parent / f"{top}.py"
            if beside.is_file() and beside.name not in found and beside not in waiting:
                waiting.append(beside)
    if taken := {"repro.py", "stand_in.py"} & found.keys():
        reason = f"a script has a file {min(taken)} of its own; give the trainer's another name"
        raise NoExportError.because(result, reason)
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _probes(trainer: Described, result: Result, values: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Name of a model that the trainer takes from `self.probe` → module → parameter → shape.

    Raises:
        NoExportError: nobody can read in the file which model it is, or a model has more than plain parameters.
    """
    found = {}
    for node in ast.walk(ast.parse(trainer.file.read_text("utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "probe"
            and node.args
        ):
            match node.args[0]:
                case ast.Constant(value=str(name)):
                    pass
                case ast.Attribute(attr=axis) if axis in values:
                    name = values[axis]
                case other:
                    reason = f"which model `{ast.unparse(other)}` is that self.probe gives cannot be read in its file"
                    raise NoExportError.because(result, reason)
            spec = model_spec(name)
            if not _plain(spec):
                reason = f"the model {name} of self.probe has parameters or buffers of a kind that no script has"
                raise NoExportError.because(result, reason)
            found[name] = {m.path: {p.name: p.shape for p in m.params} for m in spec.modules if m.params}
    return found


def _plain(model: ModelSpec) -> bool:
    """Whether a model has nothing but parameters that every forward uses and every step trains."""
    return all(
        p.used and p.trainable == "yes" and not (p.tied_to or p.idle or p.partial or p.rare) for m in model.modules
        for p in m.params
    ) and not any(m.buffers or m.opaque or m.draws or m.quantised for m in model.modules)  # fmt: skip
