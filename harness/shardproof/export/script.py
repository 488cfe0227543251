"""Fills in a script's template and then removes the definitions and imports that the script does not use.

A template may define more than one case needs, as long as every function is right by itself. What `main` does not
reach, directly or through other functions, is left out, imports too, so that a script has no line without a purpose.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from shardproof.export.body import Main, functions, mains, subject
from shardproof.export.case import FailureCase, NoExportError
from shardproof.program import Op, is_arms

WIDTH = 120
SCRIPT = "repro.py"


@dataclass(frozen=True)
class Draft:
    """What a system gives for a case.

    * home: the package whose folder `templates` holds the template. template: its name; it extends `frame.py.j2`.
    * calls: kind of operation → the lines that do it (`shardproof.export.body`). `start`: what comes first. `except`
      and `unwrap`: the class that the library raises an error in, where that is another one, and lines that take it
      out.
    * value: the expression of what is compared, after any operation.
    * values: what the template needs beside the case.
    * library: name and release of the library, for a reader.
    * case: what the script shows, where the system needs less than it was given.
    * extends: another package with templates, whose template this one extends.
    * shims: name → text of modules that stand in for a device, written beside the script.
    * beside: name → text of other modules that it imports, written beside it too, such as a trainer's own file.
    * title, what: what goes wrong in a sentence, and what should be, where nothing is known of the defect.
    """

    home: str
    template: str
    calls: Mapping[str, str]
    value: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    library: str = ""
    shims: Mapping[str, str] = field(default_factory=dict)
    extends: str = ""
    case: FailureCase | None = None
    beside: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    what: str = ""


def render(draft: Draft, case: FailureCase, title: str) -> str:
    """The script of a case.

    Args:
        title: what goes wrong, in a sentence; it opens the script.

    Raises:
        NoExportError: its path has an operation that the draft has no calls for.
    """
    case = draft.case or case
    if is_arms(case.scenario.program):
        return fill(draft.home, draft.template, opening=_opening_of_arms(title, draft.library), **draft.values)
    unknown = sorted({op.kind for op in case.ops} - draft.calls.keys())
    if unknown:
        raise NoExportError.because(case.result, f"no script says how {' and '.join(unknown)} is done")
    if case.reads_earlier and "$checkpoint" not in draft.calls["save"]:
        raise NoExportError.because(case.result, "no script says how a checkpoint before the latest one is read")
    told = mains(case, draft.calls, draft.value)
    text = (
        _environment(draft.home, draft.extends)
        .get_template(draft.template)
        .render(
            case=case,
            scenario=case.scenario,
            focus=case.focus,
            spec=case.spec,
            mains=told,
            world=told[0].world,
            functions=functions(case, draft.calls),
            opening=_opening(title, draft.library, told),
            subject=subject(case),
            **draft.values,
        )
    )
    return without_unused(text)


def fill(home: str, template: str, **values: object) -> str:
    """A module that stands in for a device, from a template of a package."""
    return _environment(home).get_template(template).render(**values)


def _environment(*homes: str) -> Environment:
    environment = Environment(  # the text is Python, not HTML: names go through `literal`
        loader=ChoiceLoader([PackageLoader(home) for home in (*homes, "shardproof.export") if home]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(literal=literal, block=_block, packed=_packed, table=_table)
    return environment


def _opening(title: str, library: str, told: list[Main]) -> str:
    """The docstring of the script."""
    commands = [f"torchrun --nproc-per-node {one.world} {SCRIPT}" for one in told]
    if len(told) > 1:
        commands = [f"{command} {one.name}" for command, one in zip(commands, told, strict=True)]
    others = "" if len(told) == 1 and told[0].world == 1 else f" or `{' && '.join(commands)}`"
    run = f"{library}. Run `python {SCRIPT}`{others}"
    end = "status 1 if the bug is there, 0 if it is not, 125 if that cannot be told, so that `git bisect run` is right."
    return "\n\n".join([textwrap.fill(_plain(title), 118), textwrap.fill(f"{run}: {end}", 118)])


def _plain(text: str) -> str:
    """A text that can stand in a docstring."""
    return text.replace("\\", "/").replace('"""', "'''")


def _opening_of_arms(title: str, needs: str) -> str:
    """The docstring of a trainer's script."""
    end = (
        f"Run `python {SCRIPT}`: status 1 if the bug is there, 0 if it is not, 125 if that cannot be told, as where a "
        f"library is missing or something else fails, so that `git bisect run python {SCRIPT}` finds the right commit."
    )
    beside, *install = needs.split("\n\n")
    filled = (textwrap.fill(_plain(text), 118, break_on_hyphens=False) for text in (title, end, beside))
    return "\n\n".join([*filled, *install])


def literal(value: object) -> str:
    """A value as Python source, with the quotes that formatters want."""
    text = repr(value)
    return text.replace("'", '"') if '"' not in text else text


def _table(table: Mapping[str, object]) -> str:
    """A dict as Python source: in one line where it is short, else in a line an entry."""
    short = literal(table)
    if len(short) < WIDTH - 12:
        return short
    return "{\n" + "".join(f"    {literal(key)}: {literal(value)},\n" for key, value in table.items()) + "}"


def _packed(table: Mapping[str, object]) -> str:
    """A dict as Python source in few lines: as the rule that its keys follow, or with several entries in a line."""
    kinds = {literal(value) for value in table.values()}
    first = next(iter(table), "").rpartition(".")[0]
    if len(kinds) == 1 and len(table) > 2 and list(table) == [f"{first}.{number}" for number in range(len(table))]:
        return f'{{f"{first}.{{n}}": {kinds.pop()} for n in range({len(table)})}}'
    if len(literal(table)) < WIDTH - 12:
        return literal(table)
    lines = [""]
    for entry in (f"{literal(key)}: {literal(value)}," for key, value in table.items()):
        if lines[-1] and len(lines[-1]) + len(entry) > WIDTH - 5:
            lines.append("")
        lines[-1] += f" {entry}" if lines[-1] else entry
    return "\n".join(["{", *(f"    {line}" for line in lines), "}"])


def _block(lines: Iterable[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


HOOK = "sys.excepthook"
"""How the statement begins that gives a script its status where something else raises than what it shows."""


def without_unused(text: str) -> str:
    """A script without the imports, constants, functions and classes that nothing in it uses."""
    tree = ast.parse(text)
    lines = text.splitlines()
    body = tree.body
    used = _reached(body)
    head = lines[: body[0].end_lineno] if isinstance(body[0], ast.Expr) else []
    first = [node for node in body if _is_early(node)]
    told = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in first]
    early = "\n".join(text for text in told if not text.startswith(HOOK))
    found = ["\n".join(head), *_imports(body, used, early, "\n".join(text for text in told if text.startswith(HOOK)))]
    for node, before in zip(body, [None, *body], strict=False):
        if isinstance(node, ast.Import | ast.ImportFrom) or node in (body[0], *first):
            continue
        if _names(node) and not _names(node) & used:
            continue
        start = before.end_lineno or 0 if before else 0
        own = "\n".join(lines[start : node.end_lineno]).strip("\n")
        apart = isinstance(node, ast.FunctionDef | ast.ClassDef) or (isinstance(node, ast.If) and "main" in own)
        constant = isinstance(node, ast.Assign) and found[-1].lstrip("\n").partition(" ")[0].isupper()
        found.append(("\n\n" if apart else "" if constant else "\n") + own)
    return _spaced(found)


def _spaced(parts: Iterable[str]) -> str:
    text = "\n".join(part for part in parts if part.strip())
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text.rstrip("\n") + "\n"


def _is_early(node: ast.stmt) -> bool:
    """Whether a statement has to run before the library is imported: it imports a shim, sets the environment, or says
    what becomes of errors."""
    if isinstance(node, ast.If):
        return isinstance(node.body[0], ast.Import)
    return ast.unparse(node).startswith(("os.environ", HOOK))


def _names(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds: a function, a class or the targets of an assignment. Empty for a
    statement that is run for its effect."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            named = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            return {name.id for name in named if isinstance(name.ctx, ast.Store)}
    return set()


def _reached(body: list[ast.stmt]) -> set[str]:
    """The names that a script needs: names used by statements that run for their effect, and, transitively, names used
    by the definitions of those names. Definitions of other names are removed."""
    uses = {id(node): {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} for node in body}
    modules = {id(n): _dotted(n) for n in body}
    waiting = [node for node in body if not _names(node) and not isinstance(node, ast.Import | ast.ImportFrom)]
    reached: set[str] = set()
    while waiting:
        node = waiting.pop()
        new = (uses[id(node)] | modules[id(node)]) - reached
        reached |= new
        waiting += [other for other in body if _names(other) & new]
    return reached


def _dotted(node: ast.stmt) -> set[str]:
    return {n.value.id for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}


def _imports(body: list[ast.stmt], used: set[str], early: str, hook: str) -> Iterator[str]:
    """The imports that are used, one line a module: the standard library's, torch's, then others'. early: what has to
    run before these others; where it is empty they follow torch's at once. hook: what has to run before torch's."""
    plain: set[tuple[str, str]] = set()
    members: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.Import):
            plain |= {(a.name, a.asname or "") for a in node.names if (a.asname or a.name.partition(".")[0]) in used}
        elif isinstance(node, ast.ImportFrom) and node.module:
            wanted = {alias.name for alias in node.names if (alias.asname or alias.name) in used}
            if wanted:
                members.setdefault(node.module, set()).update(wanted)
    told = [(name, f"import {name}" + (f" as {alias}" if alias else "")) for name, alias in sorted(plain)]
    told += [(name, line) for name, wanted in sorted(members.items()) for line in [_from(name, sorted(wanted))]]
    groups: dict[str, list[str]] = {"standard": [], "torch": [], "library": []}
    for name, line in told:
        top = name.partition(".")[0]
        late = "library" if early and top != "torch" else "torch"
        groups["standard" if top in sys.stdlib_module_names else late].append(line)
    for name, group in groups.items():
        if group:
            yield "\n" + "\n".join(group)
        if name == "standard" and hook:
            yield "\n" + hook
        if name == "torch" and early:
            yield "\n" + early


def _from(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def lines_of(op: Op, draft: Draft) -> list[str]:
    """The library calls that perform one operation, such as `optimizer.step()`, as lines of a script."""
    number = op.init_seed if op.kind == "build" else op.iteration
    return draft.calls[op.kind].replace("$number", str(number)).splitlines()
