"""Cures: patches of a library under test, each of which takes one known defect away.

A defect that strikes early hides all that lies behind it. For example, a checkpoint of Megatron-Core 0.16.1 that swaps
the moments of two parameters (issue 2777) makes every later step differ, so that nothing can be said of those steps. On
the same release with that one defect cured, they must be right. A cure is a unified diff of a few lines beside the
system's other data, `scenarios/<name>/cures/<issue>.patch`, with paths below `site-packages`. It is applied in memory
(`shardproof.world.cure_import_hook`): the installed library is never changed.

After a version, `+cured` asks for all cures, `+cured:2777,5077` for two of them, `+cured:-2777` for all but one.

A line `Or:` in a patch begins another form of the same cure, for releases where the same lines read otherwise. The
first form that applies counts.

Every cure is laid onto the library's own text, not onto what another cure made of it: whether it applies depends on the
release alone, and the order of cures does not matter. Two cures can stand together unless they change the same lines.

*Verifies*: that a hunk's context and removed lines are there, word for word, as near as possible to the line it names;
on anything but the newest release, also that the names its new lines read are there (`shardproof.issues.added_names`).
*Does not verify*: that the defect is gone; running its scenario does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from shardproof.errors import UsageError
from shardproof.issues.added_names import missing_name
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.tables import text_of
from shardproof.versions import CURED

REPAIRED, MOVED = "already repaired there", "the code moved"
"""Why a cure does not apply: its lines are in the library as the cure would leave them, or they are not there."""
UNRESOLVED, CLASH = "it reads", "it changes the same lines"
"""How the reason begins where its lines are there and a name that it brings is not; where another cure came first."""

_SHOWN_BY, _HIDDEN_BY = "Shown-by: ", "Hidden-by: "

REPAIR, WORKAROUND, SWITCH = "repair", "workaround", "switch"
"""What a cure is: it mends the lines that are wrong, it takes the failure away elsewhere than at its cause, or it takes
a feature of the library away."""
_NO_REPAIR = re.compile(f"^({WORKAROUND}|{SWITCH}): (.+)$", re.MULTILINE | re.IGNORECASE)
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@.*")


@dataclass(frozen=True)
class Hunk:
    """One place of a file. line: where the patch saw it, from 0. lines: with their mark, ` `, `-` or `+`."""

    line: int
    lines: tuple[str, ...]

    @property
    def before(self) -> list[str]:
        """The lines of the library's file that the hunk replaces, without the cure applied."""
        return [line[1:] for line in self.lines if line[0] != "+"]

    @property
    def after(self) -> list[str]:
        """The lines of the library's file after the cure is applied."""
        return [line[1:] for line in self.lines if line[0] != "-"]


@dataclass(frozen=True)
class Cure:
    """id: as in `+cured:ID`, the name of its file. files: path below `site-packages` → its hunks. others: further forms
    of it, each like `files`. shown_by: the regressions that fail without it, by name, those of other systems as
    `SYSTEM/NAME`; where the patch does not begin with a line `Shown-by: ONE, ANOTHER`, the one of the cure's own
    name. hidden_by: other cures with which those regressions pass as well, `Hidden-by: ANOTHER`. kind: `repair`, or
    what a line `Workaround: SENTENCE` or `Switch: SENTENCE` says that it is instead; that sentence is `instead`."""

    id: str
    files: Mapping[str, tuple[Hunk, ...]]
    shown_by: tuple[str, ...]
    hidden_by: tuple[str, ...]
    others: tuple[Mapping[str, tuple[Hunk, ...]], ...] = ()
    kind: str = REPAIR
    instead: str = ""

    @property
    def all_but_this(self) -> str:
        """The words after `+cured:` that ask for every cure of the system but this one and the cures that hide its
        defect as well, such as `-4423,-fsdp-plain-state`."""
        return ",".join(f"-{each}" for each in (self.id, *self.hidden_by))

    @property
    def changed_lines(self) -> int:
        """How many lines it adds and takes away."""
        return sum(line[0] != " " for hunks in self.files.values() for hunk in hunks for line in hunk.lines)


@dataclass(frozen=True)
class Cured:
    """What cures came to on a library. applied: ids. left: id → why it could not be applied. sources: path below
    `site-packages` → the whole text of the file, with every cure that applies."""

    applied: tuple[str, ...]
    left: Mapping[str, str]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class _Edit:
    """Lines `start` to `end`, the end excluded, become `lines`. cure: its id."""

    start: int
    end: int
    lines: tuple[str, ...]
    cure: str


@cache
def cures_of(system: System) -> tuple[Cure, ...]:
    """The cures of a system, by id; none where its data has no folder `cures`.

    Raises:
        UsageError: a file there is no unified diff.
    """
    folder = system.folder.joinpath("cures")
    if not folder.is_dir():
        return ()
    return read_folder(folder, f"{system.name}/cures")


def read_folder(folder: Traversable, origin: str) -> tuple[Cure, ...]:
    """The cures in a folder, by id.

    Args:
        origin: what an error calls it.

    Raises:
        UsageError: a file there is no unified diff.
    """
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".patch")), key=lambda file: file.name)
    return tuple(parse(file.name.removesuffix(".patch"), text_of(file, origin)) for file in files)


@cache
def available(system: System) -> tuple[Cure, ...]:
    """The cures of a system, and after them those of the systems that it stands on. NeMo Automodel shards with FSDP2:
    what is wrong in torch shows there too, and has one cure. Of two with one id, the system's own counts."""
    found = {cure.id: cure for cure in cures_of(system)}
    for name in system.stands_on:
        for cure in available(system_named(name)):
            found.setdefault(cure.id, cure)
    return tuple(found.values())


def home_of(system: System, cure: str) -> System:
    """The system whose data folder holds a cure's patch. A cure of Megatron-Core, for example, is also available to
    Megatron-Bridge, which stands on Megatron-Core."""
    if any(own.id == cure for own in cures_of(system)):
        return system
    below = map(system_named, system.stands_on)
    return next(home_of(one, cure) for one in below if any(each.id == cure for each in available(one)))


def cures_asked_for(system: System, wanted: str, beside: Iterable[Cure] = ()) -> tuple[Cure, ...]:
    """The cures of a system, and of those that it stands on, that a version asks for.

    Args:
        wanted: what follows `+cured:`: ids, or ids that each follow a `-`, joined by commas; empty for all. An id may
            be that of the known issue, with the system's name before it.
        beside: cures that may be asked for beside those.

    Raises:
        UsageError: the system has no such cure, or ids with and without a `-` are mixed.
    """
    every = {cure.id: cure for cure in (*available(system), *beside)}
    names = [name for name in wanted.split(",") if name]
    ids = [name.removeprefix("-").removeprefix(f"{system.name}-") for name in names]
    without = [name.startswith("-") for name in names]
    unknown = [one for one in ids if one not in every]
    if not every or unknown or len(set(without)) > 1:
        allowed = ", ".join(every) or f"none: {system.name} has no cures"
        form = f"{system.name}@{CURED}:{next(iter(every), 'ID')}"
        raise UsageError.of(
            f"cures of {system.name}", wanted or CURED, f"ids, or ids that each follow a `-`, of: {allowed}", form
        )
    if not names:
        return tuple(every.values())
    return tuple(cure for cure in every.values() if (cure.id in ids) is not without[0])


def cure_of(system: System, scenario: str) -> str:
    """The id of the cure of the defect that a scenario file shows; empty where it has none. The cure of a system below
    names it with its system: `automodel/164929`.

    Args:
        scenario: as a known issue names it, such as `regressions/2777.toml`.
    """
    name = PurePosixPath(scenario).stem
    own = next((cure.id for cure in cures_of(system) if name in cure.shown_by), "")
    return own or next((cure.id for cure in available(system) if f"{system.name}/{name}" in cure.shown_by), "")


def apply(cures: Iterable[Cure], source: Callable[[str], str | None], *, unseen: bool = False) -> Cured:
    """Lay cures onto a library.

    Args:
        source: the text of the library's file at a path below `site-packages`; None where there is no such file.
        unseen: nobody walks this library every night with its cures. Then one that fits its lines, and reads a name
            that the library does not have, is left out.
    """
    texts: dict[str, str | None] = {}
    edits: dict[str, list[_Edit]] = {}
    applied, left = [], {}
    for cure in cures:
        for path in {path for files in (cure.files, *cure.others) for path in files} - texts.keys():
            texts[path] = source(path)
        own, why = _edits(cure, texts)
        why = why or next((w for path, new in own.items() if (w := _clash(edits.get(path, []), new))), "")
        why = why or (_unresolved(own, texts, source) if unseen else "")
        if why:
            left[cure.id] = why
            continue
        applied.append(cure.id)
        for path, new in own.items():
            edits.setdefault(path, []).extend(new)
    sources = {path: _edited(text, edits[path]) for path, text in texts.items() if text is not None and path in edits}
    return Cured(tuple(applied), left, sources)


def parse(cure_id: str, text: str) -> Cure:
    """Read a unified diff.

    Raises:
        UsageError: it has no hunk, or a line that no diff has.
    """
    files, *others = (_parsed(cure_id, form) for form in re.split(r"^Or:$", text, flags=re.MULTILINE))
    shown_by, hidden_by = _names(text, _SHOWN_BY) or (cure_id,), _names(text, _HIDDEN_BY)
    other = _NO_REPAIR.search(text.partition("--- ")[0])
    kind, instead = (other[1].lower(), other[2]) if other else (REPAIR, "")
    return Cure(cure_id, files, shown_by, hidden_by, tuple(others), kind, instead)


def _names(text: str, header: str) -> tuple[str, ...]:
    """The comma-separated names in a header line of a patch file, such as the scenarios after `Shown-by:`. Empty
    without such a line."""
    line = next((line for line in text.splitlines() if line.startswith(header)), header)
    return tuple(name.strip() for name in line.removeprefix(header).split(",") if name.strip())


def _parsed(cure_id: str, text: str) -> Mapping[str, tuple[Hunk, ...]]:
    """One form of a cure: path → its hunks."""
    files: dict[str, list[Hunk]] = {}
    path, start, lines = "", 0, list[str]()

    def close() -> None:
        if lines:
            files.setdefault(path, []).append(Hunk(start, tuple(lines)))
            lines.clear()

    every = text.splitlines()
    for number, (line, following) in enumerate(zip(every, [*every[1:], ""], strict=False), 1):
        if line.startswith("--- ") and following.startswith("+++ "):
            close()
            path = ""
        elif line.startswith("+++ ") and not path:
            path = line[4:].partition("\t")[0].removeprefix("b/")
        elif hunk := _HUNK.fullmatch(line):
            close()
            start = int(hunk[1]) - 1
        elif path and (not line or line[0] in " +-"):
            lines.append(line or " ")
        elif path:
            raise _malformed(cure_id, f"line {number}: {line[:80]!r}")
    close()
    if not files:
        raise _malformed(cure_id, "no hunk")
    return {name: tuple(hunks) for name, hunks in files.items()}


def _malformed(cure_id: str, given: str) -> UsageError:
    return UsageError.of(f"cure {cure_id}", given, "a unified diff of files below site-packages", "diff -u OLD NEW")


def _edits(cure: Cure, texts: Mapping[str, str | None]) -> tuple[dict[str, list[_Edit]], str]:
    """Path → what the first form of a cure that applies changes there; or why none does."""
    whys = []
    for files in (cure.files, *cure.others):
        found, why = _edits_of_form(cure.id, files, texts)
        if not why:
            return found, ""
        whys.append(why)
    return {}, REPAIRED if REPAIRED in whys else whys[0]


def _edits_of_form(
    cure_id: str, files: Mapping[str, tuple[Hunk, ...]], texts: Mapping[str, str | None]
) -> tuple[dict[str, list[_Edit]], str]:
    found: dict[str, list[_Edit]] = {}
    repaired = []
    for path, hunks in files.items():
        text = texts[path]
        if text is None:
            return {}, f"{MOVED}: there is no {path}"
        lines = text.splitlines()
        for hunk in hunks:
            at = _place(lines, hunk.before, hunk.line)
            repaired.append(at is None and _place(lines, hunk.after, hunk.line) is not None)
            if at is None and not repaired[-1]:
                return {}, f"{MOVED}: {path}, line {hunk.line + 1}"
            found.setdefault(path, []).extend(_changes(hunk, at or 0, cure_id))
    if all(repaired):
        return {}, REPAIRED
    return ({}, f"{MOVED}: a part of it is {REPAIRED}") if any(repaired) else (found, "")


def _place(lines: list[str], wanted: list[str], near: int) -> int | None:
    """Where `wanted` stands in a file, as near as possible to a line; None where it does not."""
    places = range(len(lines) - len(wanted) + 1)
    fitting = (at for at in places if lines[at : at + 1] == wanted[:1] and lines[at : at + len(wanted)] == wanted)
    return min(fitting, key=lambda at: abs(at - near), default=None)


def _changes(hunk: Hunk, at: int, cure_id: str) -> list[_Edit]:
    """The runs of lines that a hunk takes out or puts in, without what stands around them."""
    found: list[_Edit] = []
    start, new = at, list[str]()
    for line in (*hunk.lines, " "):
        if line[0] == "-":
            at += 1
        elif line[0] == "+":
            new.append(line[1:])
        else:
            if at > start or new:
                found.append(_Edit(start, at, tuple(new), cure_id))
            at += 1
            start, new = at, []
    return found


def _clash(there: Iterable[_Edit], new: Iterable[_Edit]) -> str:
    """Which earlier cure changes lines that `new` changes otherwise; empty where none does."""
    for old in there:
        for edit in new:
            same = (old.start, old.end, old.lines) == (edit.start, edit.end, edit.lines)
            if not same and old.start < edit.end and edit.start < old.end:
                return f"{CLASH} as {old.cure}"
    return ""


def _unresolved(
    own: Mapping[str, Sequence[_Edit]], texts: Mapping[str, str | None], source: Callable[[str], str | None]
) -> str:
    """Which name of a cure's new lines its library does not have; empty where it has all."""
    for path, edits in own.items():
        shift, added = 0, set[int]()
        for edit in sorted(edits, key=lambda edit: edit.start):
            first = edit.start + shift + 1
            added |= set(range(first, first + len(edit.lines)))
            shift += len(edit.lines) - (edit.end - edit.start)
        if gone := missing_name(_edited(texts[path] or "", edits), added, source):
            return f"{UNRESOLVED} {gone}, which {path} lacks"
    return ""


def _edited(text: str, edits: Iterable[_Edit]) -> str:
    """A file with its edits; two cures that make the same change make it once."""
    lines, once = text.splitlines(), {(e.start, e.end, e.lines) for e in edits}
    for start, end, new in sorted(once, reverse=True):
        lines[start:end] = new
    return "\n".join(lines) + "\n"
