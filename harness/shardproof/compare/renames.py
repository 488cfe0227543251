"""Names that two formats write differently, made comparable: `--rename 'REGEX=REPL'`, and a hint which one helps."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from shardproof.errors import UsageError

FORM = "--rename '^module[.]='"


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


def hint_of(a: Collection[str], b: Collection[str]) -> str:
    """What to try where no name is on both sides, but most would be without a prefix; empty otherwise."""
    if set(a) & set(b):
        return ""
    for which, longer, shorter in (("A", a, set(b)), ("B", b, set(a))):
        prefixes: dict[str, int] = {}
        for name in longer:
            parts = name.split(".")
            for length in range(1, min(len(parts), 5)):
                if ".".join(parts[length:]) in shorter:
                    prefix = ".".join(parts[:length])
                    prefixes[prefix] = prefixes.get(prefix, 0) + 1
        if prefixes:
            prefix, count = max(prefixes.items(), key=lambda item: item[1])
            pattern = re.escape(prefix).replace("\\.", "[.]")
            return (
                f"no name is on both sides; {count} of {which}'s are on the other one without {prefix!r}: "
                f"--rename '^{pattern}[.]='"
            )
    return "no name is on both sides: --rename 'REGEX=REPL' changes the names of both"
