"""What two checkpoints of a trainer do not have in common, as `shardproof diff` finds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardproof.compare.contents import Contents, Plain
from shardproof.compare.differences import EntryDifference
from shardproof.compare.formats import add_everything, not_read, open_contents
from shardproof.compare.misplaced import read_all
from shardproof.compare.progress import SilentProgress
from shardproof.compare.run import CompareRequest, compare
from shardproof.diagnosis.arrangement import DISTINCT, distinct
from shardproof.diff import STRUCTURE, Difference, as_numbers
from shardproof.errors import UsageError
from shardproof.observe.logical import Key, Value
from shardproof.protocol.checkpoint_layout import Layout
from shardproof.protocol.registry import all_systems
from shardproof.trainer.values.own_folders import own_folders, without_folders

MOST_BYTES = 64 << 20
"""Of a tensor that is read whole."""


def differing(first: Path, second: Path) -> tuple[EntryDifference, ...]:
    """The entries in which two folders' checkpoints differ, but for a text that lies in the folder of its session or of
    its checkpoint.

    Raises:
        UsageError: nothing here reads this form of checkpoint.
    """
    found = compare(CompareRequest(_file_of(first), _file_of(second), _layouts()), SilentProgress()).found
    folders = own_folders(first.parent, second.parent)
    return tuple(one for one in found if not _is_of_the_folder(one, folders))


def _is_of_the_folder(one: EntryDifference, folders: tuple[str, ...]) -> bool:
    whole = one.kind == "value" and not one.a.endswith("…")
    return whole and without_folders(one.a, folders) == without_folders(one.b, folders)


MOST_OF_A_TEXT = 1 << 20
"""Bytes of a text in which names are looked for."""


def names_in(folder: Path) -> tuple[str, ...]:
    """The names of all tensors and plain values in a folder's checkpoint, and the texts of files such as JSON that have
    names of their own; none where nothing here reads one of its files."""
    try:
        with _opened(folder) as contents:
            beside = add_everything(contents, not_read(contents), _layouts())
            texts = [_text_of(file) for file in beside]
            return (*contents.entries, *filter(None, texts)) if None not in texts else ()
    except UsageError:
        return ()


def _text_of(file: Path) -> str | None:
    """The content of a text file; None of a file that is no text, or that is too large."""
    try:
        return file.read_bytes().decode() if file.stat().st_size <= MOST_OF_A_TEXT else None
    except UnicodeDecodeError:
        return None


def held_under(folder: Path, values: Mapping[str, Value]) -> dict[str, str]:
    """Name of a value → the first other name under which a folder's checkpoint has all of its bits. A value that is
    there under its own name has none, and neither has any where nothing here reads the checkpoint.

    A value of one number alone, such as zeros, is not looked for, since any other may have the same.
    """
    names: dict[Value, list[str]] = {}
    for name, value in values.items():
        if distinct(as_numbers(value)) >= DISTINCT:
            names.setdefault(value, []).append(name)
    classes = {(value.dtype, value.shape) for value in names}
    found: dict[str, list[str]] = {}
    try:
        with _opened(folder) as contents:
            for other, tensor in contents.tensors.items():
                if (tensor.dtype, tensor.shape) in classes and tensor.nbytes <= MOST_BYTES:
                    held = Value(tensor.dtype, tensor.shape, read_all(tensor).tobytes())
                    for name in names.get(held, ()):
                        found.setdefault(name, []).append(other)
    except UsageError:
        return {}
    return {name: others[0] for name, others in found.items() if name not in others}


def numbers_held(folder: Path, values: Mapping[str, Value]) -> dict[str, str]:
    """Name of a number → under which name a folder's checkpoint has it, with the value, where one name alone ends alike
    and has that value; none where nothing here reads the checkpoint. A value is a text such as `int 2`; any other is no
    number."""
    numbers = {name: value.data.decode(errors="replace") for name, value in values.items() if value.dtype == "utf8"}
    found: dict[str, str] = {}
    try:
        with _opened(folder) as contents:
            plain = {name: entry.value for name, entry in contents.entries.items() if isinstance(entry, Plain)}
    except UsageError:
        return {}
    for name, text in numbers.items():
        kind, _, value = text.partition(" ")
        last = name.rpartition(".")[2].lstrip("_")
        alike = [other for other, held in plain.items() if other.rpartition(".")[2].lstrip("_") == last
                 and type(held).__name__ == kind and str(held) == value]  # fmt: skip
        if len(alike) == 1 and value:
            found[name] = f"{alike[0]} = {value}"
    return found


@contextmanager
def _opened(folder: Path) -> Iterator[Contents]:
    """What a folder's checkpoint holds.

    Raises:
        UsageError: nothing here reads its form, or it is damaged.
    """
    file = _file_of(folder)
    contents = open_contents(file, _layouts(), lambda _: None, checksums=False, beside=file.is_dir())
    try:
        yield contents
    finally:
        contents.files.close()


def _layouts() -> list[Layout[Any]]:
    """The kinds of checkpoint folders that `shardproof diff` knows."""
    return [layout for system in all_systems() for layout in system.layouts]


def as_difference(one: EntryDifference, op: int) -> Difference:
    """What two checkpoints do not have in common, as a difference of the operation that wrote the second one."""
    kind, total = one.kind if one.kind in STRUCTURE else "bits", max(1, one.total)
    return Difference(Key(op, "written", one.role, one.name), kind, mismatched=one.mismatched or total, total=total)


AGAIN = {
    "missing": "is not there any more", "extra": "was not there before", "kind": "is no tensor any more, or now is one",
    "dtype": "has another dtype", "shape": "has another shape", "gap": "has gaps", "overlap": "has overlaps",
    "bits": "has other bits", "value": "has another value",
}  # fmt: skip
"""What became of a value between a load and the save after it."""


def of_again(found: Sequence[EntryDifference]) -> str:
    """What a checkpoint lost on its way through a load and a save; empty if nothing."""
    if not found:
        return ""
    others = len(found) - 1
    more = f", and {others} more value{'s differ' if others > 1 else ' differs'}" if others else ""
    one = found[0]
    was, now = (text.rpartition(" (")[0] or text for text in (one.a, one.b))
    is_now = f"is {now}, and was {was}" if one.kind == "value" else AGAIN[one.kind]
    return f"What is saved right after a load is not what was loaded: {one.name} {is_now}{more}."


def _file_of(folder: Path) -> Path:
    """The file of a folder that has one file and nothing else; the folder itself otherwise."""
    inside = list(folder.iterdir()) if folder.is_dir() else []
    return inside[0] if len(inside) == 1 else folder
