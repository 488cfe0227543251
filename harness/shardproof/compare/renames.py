"""Names that two formats write differently, made comparable: `--rename 'REGEX=REPL'`, and a hint which one helps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from shardproof.compare.contents import Entry, Tensor
from shardproof.compare.roles import role_of
from shardproof.errors import UsageError

FORM = "--rename '^module[.]='"

MOST_BEFORE, MOST_BEHIND = 4, 2
"""So many parts of a name are taken off at its beginning and at its end while a hint is looked for."""


@dataclass(frozen=True)
class Rename:
    """What every match of a pattern in a name becomes."""

    pattern: re.Pattern[str]
    replacement: str

    def apply(self, name: str) -> str:
        return self.pattern.sub(self.replacement, name)


def parse_rename(text: str) -> Rename:
    """A `REGEX=REPL` of the command line; the pattern ends at the first `=`.

    Raises:
        UsageError: no `=`, a pattern that is none, or a replacement with groups that the pattern lacks.
    """
    pattern, equals, replacement = text.partition("=")
    if not equals or not pattern:
        raise UsageError.of("--rename", text, "REGEX=REPL", FORM)
    rename = Rename(parse_pattern("--rename", pattern), replacement)
    try:
        rename.apply("")
    except (re.error, IndexError) as error:
        raise UsageError.of("--rename", text, f"a replacement that re.sub takes ({error})", FORM) from None
    return rename


def parse_pattern(option: str, text: str) -> re.Pattern[str]:
    """A regular expression of the command line.

    Raises:
        UsageError: it is none.
    """
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError.of(option, text, f"a regular expression ({error})", f"{option} '^model[.]'") from None


def hint_of(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> str:
    """What to try where no tensor's name is on both sides, but some would be without what stands around it; empty
    otherwise.

    For example, DeepSpeed's folder has `optimizer.up.weight.fp32` where its export has `up.weight`. Plain values, such
    as the shapes that lie beside tensors under the same names, are not asked.
    """
    mine, its = ({name: entry for name, entry in side.items() if isinstance(entry, Tensor)} for side in (a, b))
    if mine.keys() & its.keys():
        return ""
    found = [
        (fit, which, around)
        for which, longer, shorter in (("A", mine, its), ("B", its, mine))
        for around, fit in _surroundings(longer, shorter).items()
    ]
    if not found:
        return "no tensor's name is on both sides: --rename 'REGEX=REPL' changes the names of both"
    fit, which, (prefix, suffix) = max(found, key=lambda one: one[0])
    without = " and ".join(repr(text) for text in (prefix, suffix) if text)
    begin = f"^{_escaped(prefix)}[.]" if prefix else ""
    end = f"[.]{_escaped(suffix)}$" if suffix else ""
    rename = f"{begin}(.*){end}=\\1" if prefix and suffix else f"{begin}{end}="
    return (
        f"no tensor's name is on both sides; {fit.names} of {which}'s are on the other one without {without}: "
        f"--rename '{rename}'"
    )


@dataclass(order=True)
class _Fit:
    """How well names agree without what stands around them. same: tensors of one dtype and shape that are weights on
    both sides, or neither. alike: those of any dtype. names: all. simple: whether only one end is taken off."""

    same: int = 0
    alike: int = 0
    names: int = 0
    simple: bool = True


def _surroundings(longer: Mapping[str, Tensor], shorter: Mapping[str, Tensor]) -> dict[tuple[str, str], _Fit]:
    """Prefix and suffix, either of which may be empty → the names that are on the shorter side without them."""
    found: dict[tuple[str, str], _Fit] = {}
    for name, mine in longer.items():
        parts = name.split(".")
        for start, end in product(range(min(len(parts), MOST_BEFORE + 1)), range(MOST_BEHIND + 1)):
            inner = parts[start : len(parts) - end]
            its = shorter.get(".".join(inner)) if start + end and inner else None
            if its is None:
                continue
            around = ".".join(parts[:start]), ".".join(parts[len(parts) - end :])
            fit = found.setdefault(around, _Fit(simple=not (start and end)))
            alike = _is_weight(mine) == _is_weight(its) and mine.shape == its.shape
            fit.names += 1
            fit.alike += alike
            fit.same += alike and mine.dtype == its.dtype
    return found


def _is_weight(tensor: Tensor) -> bool:
    return role_of(tensor.path, tensor=True) in ("param", "master", "tensor")


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\.", "[.]")
