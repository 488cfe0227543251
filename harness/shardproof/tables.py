"""Tables of our TOML files, read with their keys and types checked: one error form for all of them.

Every error is a `UsageError` that says where, what was given, what is allowed, and a correct example.
"""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path
from typing import Any

from shardproof.errors import UsageError
from shardproof.plain_values import require_plain

_HERE = Path(__file__).parent
SHIPPED: Traversable = next(path for path in (_HERE / "scenarios", _HERE.parents[1] / "scenarios") if path.is_dir())
"""The scenario files and the systems' data that ship with shardproof: a part of an installed package; in a source tree
the top-level folder `scenarios/`."""

SCHEMA = 1
"""The number that every file of ours states: what `schema = 1` means."""


class Table:
    """A table of a file. Every method raises UsageError for a value of another type.

    Args:
        content: as parsed. where: how errors call the table, such as `scenarios/nightly.toml: [space]`.
    """

    def __init__(self, content: object, where: str) -> None:
        if not isinstance(content, Mapping):
            raise UsageError.of(where, content, "a table", f"[{where.rpartition('[')[2].strip('] ') or 'name'}]")
        self.content: Mapping[str, Any] = content
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def only(self, allowed: Sequence[str], needed: Iterable[str] = ()) -> Table:
        """The table, once it is known to have no other keys than `allowed`, and all that are `needed`."""
        for key in self.content:
            if key not in allowed:
                raise UsageError.of(f"{self.where}: key", key, allowed, f"{allowed[0]} = …")
        for key in needed:
            if key not in self.content:
                raise UsageError.of(f"{self.where}: keys", sorted(self.content), f"{key} too", f"{key} = …")
        return self

    def text(self, key: str, absent: str = "") -> str:
        """A text."""
        found = self.content.get(key, absent)
        if not isinstance(found, str):
            raise self.wrong(key, found, "a text", f'{key} = "…"')
        return found

    def texts(self, key: str, absent: Sequence[str] = (), *, empty: bool = True) -> tuple[str, ...]:
        """A list of texts; a text alone is a list of one. empty: an empty text may be among them."""
        found = self.content.get(key, list(absent))
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not all(isinstance(item, str) and (item or empty) for item in found):
            raise self.wrong(key, found, "a list of texts", f'{key} = ["…"]')
        return tuple(found)

    def numbers(self, key: str, absent: Sequence[float] = ()) -> tuple[float, ...]:
        """A list of numbers."""
        found = self.content.get(key, list(absent))
        if not isinstance(found, list) or not all(_is_number(item) for item in found):
            raise self.wrong(key, found, "a list of numbers", f"{key} = [0.5]")
        return tuple(map(float, found))

    def positive(self, key: str, *, or_zero: bool = False) -> float:
        """A number above 0; 0 too, where that is taken."""
        found = self.content.get(key)
        if not _is_number(found) or float(found or 0) < 0 or not (found or or_zero):
            raise self.wrong(key, found, "0 or a number above it" if or_zero else "a number above 0", f"{key} = 900")
        return float(found or 0)

    def flag(self, key: str, absent: bool) -> bool:
        """true or false."""
        found = self.content.get(key, absent)
        if not isinstance(found, bool):
            raise self.wrong(key, found, "true or false", f"{key} = {str(not absent).lower()}")
        return found

    def table(self, key: str) -> Table:
        """A table inside; empty where there is none."""
        return Table(self.content.get(key, {}), f"{self.where}: {key}")

    def tables(self, key: str) -> list[Table]:
        """A list of tables `[[key]]`; a table alone is a list of one."""
        found = self.content.get(key, [])
        found = [found] if isinstance(found, Mapping) else found
        if not isinstance(found, list):
            raise self.wrong(key, found, "a list of tables", f"[[{key}]]")
        return [Table(item, f"{self.where}: {key} {number}") for number, item in enumerate(found, 1)]

    def wrong(self, key: str, given: object, allowed: Iterable[object] | str, form: str) -> UsageError:
        """The error about a key's value."""
        return UsageError.of(f"{self.where}: {key}", given, allowed, form)


def text_of(file: Traversable, origin: str) -> str:
    """The text of one of our files, which errors call `origin`.

    Raises:
        UsageError: it is not in UTF-8.
    """
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError.of(origin, f"byte {error.start}", "a text file in UTF-8", "iconv -t UTF-8") from None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def load_toml(text: str, origin: str) -> dict[str, Any]:
    """Parse a TOML document of ours and check its schema number.

    Raises:
        UsageError: malformed TOML (with line and column), or another schema number.
    """
    form = f"correct form: schema = {SCHEMA}, then [scenario]"
    try:
        document = tomllib.loads(text)
        require_plain(document)
    except RecursionError:
        raise UsageError(f"{origin}: malformed TOML: tables or lists in each other too deep; {form}") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than python reads
        raise UsageError(f"{origin}: malformed TOML: {error}; {form}") from None
    if document.get("schema") != SCHEMA or type(document["schema"]) is not int:
        raise UsageError.of(f"{origin}: schema", document.get("schema"), (SCHEMA,), f"schema = {SCHEMA}")
    return document


MOST_BYTES = 1 << 20
"""How large a scenario file may be; the largest of ours has some thousand."""


def read_scenario_file(path: Path, name: str) -> str:
    """The text of a regular file; a pipe might never end, and is not read.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        UsageError: it is no regular file, or larger than any scenario file is.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise UsageError.of("scenario file", name, "a regular file, no pipe or device", "shardproof run smoke")
    if found.st_size > MOST_BYTES:
        raise UsageError.of("scenario file", name, f"a file of up to {MOST_BYTES} bytes", "shardproof run smoke")
    return path.read_text("utf-8")
