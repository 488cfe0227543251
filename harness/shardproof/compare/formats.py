"""Recognises the format of a checkpoint by its file names and first bytes, and indexes the checkpoint.

In this order: a `Layout` of a system that knows the folder; a folder with `.metadata` (torch's distributed checkpoint);
safetensors and torch.save shards with an index of Hugging Face's; any other folder, whose checkpoints are taken
together, each under the name of its file or folder. For example `model/` (safetensors) and `optim/` (distributed) make
one checkpoint with names `model.…` and `optim.…`. What lies beside a known format in its folder belongs to the
checkpoint too: `optimizer.pt` beside `model.safetensors` adds names `optimizer.…`. A file is told by its first bytes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardproof.compare import distributed, safetensors
from shardproof.compare.archives import add_archive
from shardproof.compare.contents import Contents
from shardproof.compare.files import FORM, Files
from shardproof.compare.legacy import MAGIC, add_legacy
from shardproof.protocol.checkpoint_layout import Layout
from shardproof.readers.errors import WHOLE, CheckpointError, bad, unfamiliar
from shardproof.readers.pieces import FULL_FILE, KeyPath

SAVED = (".pt", ".pth", ".bin", ".ckpt")
"""How files of torch.save are called."""

DEEPEST, MOST = 4, 100_000
"""How deep folders are looked through for checkpoints, and how many entries they may have."""

_BIN_INDEX = ".bin.index.json"
_ALLOWED = (
    "a folder of torch.distributed.checkpoint, Megatron-Core or DeepSpeed, a .safetensors file or a folder with some, "
    "or a file of torch.save"
)


def open_contents(
    path: Path,
    layouts: Iterable[Layout[Contents]],
    on_read: Callable[[int], None],
    *,
    checksums: bool = True,
    beside: bool = False,
) -> Contents:
    """The index of a checkpoint; close its files after use.

    Args:
        beside: also take up what lies beside the format of a folder, each file or folder under its own name.

    Raises:
        CheckpointError: there is none, it is damaged or foreign, or holds no element of a tensor.
    """
    contents = Contents(path, Files(path, on_read), checksums)
    try:
        if path.is_dir():
            contents.form = _add_folder(contents, path, tuple(layouts), beside=beside)
        elif path.exists():
            contents.form = _add_file(contents, path, ())
        else:
            raise bad("checkpoint", str(path), "an existing directory or file", FORM)
        contents.require_something()
    except BaseException:
        contents.files.close()
        raise
    return contents


def add_everything(contents: Contents, paths: Iterable[Path], layouts: Iterable[Layout[Contents]]) -> list[Path]:
    """Take up every checkpoint at or below some paths, each under its name below `contents.path`, also where files of
    several formats lie side by side: `optimizer.pt` beside `model.safetensors`, for example. Names begin with the file
    or folder: `global_step2.module.weight`. Where two files come to one name, as of `state.bin` and `state.pt`, the
    second has its suffix in it.

    Returns: the files that nobody can read, or that are damaged.

    Raises:
        CheckpointError: there are too many files.
    """
    unread: list[Path] = []
    for path, add in _units(contents.path, paths, tuple(layouts), [0]):
        try:
            one, form = _read(contents, path, add)
        except CheckpointError:
            unread.append(path)
            continue
        for entry in one.entries.values():
            contents.add(entry)
        contents.foreign |= one.foreign
        contents.extents += one.extents
        contents.form = contents.form if form in contents.form else " and ".join(filter(None, [contents.form, form]))
    return unread


def not_read(contents: Contents) -> list[Path]:
    """The files below a checkpoint's folder of which nothing was read, nor is: those that no format has taken. Files
    that hold nothing, and those that a distributed checkpoint's index speaks of, are none of them."""
    below = sorted(contents.path.rglob("*")) if contents.path.is_dir() else []
    files = [path for path in below if path.is_file() and not path.is_symlink() and path.stat().st_size]
    return [path for path in files if not contents.files.used(path) and not _is_of_index(path)]


def _is_of_index(path: Path) -> bool:
    return path.name.endswith(".distcp") and (path.parent / distributed.METADATA).is_file()


_Adds = Callable[[Contents, KeyPath], str]


def _read(contents: Contents, path: Path, add: _Adds) -> tuple[Contents, str]:
    """What lies at a path, under names that `contents` does not have, and its format."""
    one, form = Contents(contents.path, contents.files, contents.checksums), ""
    for name in (_short(contents.path, path).parts, path.relative_to(contents.path).parts):
        one = Contents(contents.path, contents.files, contents.checksums)
        form = add(one, name)
        if one.entries.keys().isdisjoint(contents.entries):
            break
    return one, form


def _units(
    root: Path, paths: Iterable[Path], layouts: tuple[Layout[Contents], ...], seen: list[int]
) -> Iterator[tuple[Path, _Adds]]:
    """What can be read as one thing: a distributed checkpoint, all safetensors of a folder, or one other file."""
    for path in paths:
        seen[0] += 1
        if seen[0] > MOST:
            raise bad(f"{root}: files in it", f"more than {MOST}", "a checkpoint's own folder", FORM)
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            continue
        if path.is_file():
            yield path, partial(_add_at, _add_file, path)
        elif layout := next((each for each in layouts if each.recognises(path)), None):
            yield path, partial(_add_layout, layout, path)
        elif os.path.lexists(path / distributed.METADATA):
            yield path, partial(_add_at, _add_known, path)
        else:
            inside = sorted(path.iterdir())
            shards = [one for one in inside if one.name.endswith(safetensors.SUFFIX)]
            if len(shards) > 1:
                yield path, partial(_add_shards, shards)
                inside = [one for one in inside if one not in shards]
            yield from _units(root, inside, layouts, seen)


def _add_at(add: Callable[[Contents, Path, KeyPath], str], path: Path, contents: Contents, name: KeyPath) -> str:
    return add(contents, path, name)


def _add_layout(layout: Layout[Contents], folder: Path, contents: Contents, name: KeyPath) -> str:
    """Take up a folder that a system's layout reads, under the folder's name: a run may have several such folders."""
    form = layout.add(contents, folder)
    held, contents.entries = contents.entries, {}
    for entry in held.values():
        contents.add(replace(entry, path=(*name, *entry.path)))
    return form


def _add_shards(shards: list[Path], contents: Contents, path: KeyPath) -> str:
    safetensors.add_safetensors(contents, shards, path)
    return "safetensors"


def _add_folder(contents: Contents, folder: Path, layouts: tuple[Layout[Contents], ...], *, beside: bool) -> str:
    for layout in layouts:
        if layout.recognises(folder):
            return layout.add(contents, folder)
    if (folder / FULL_FILE).is_file():
        form = _add_file(contents, folder / FULL_FILE, ())
    else:
        form = _add_known(contents, folder, ())
    if not form:
        return _add_several(contents, folder)
    return " and ".join(dict.fromkeys([form, *(_add_beside(contents, folder) if beside else ())]))


def _add_known(contents: Contents, folder: Path, path: KeyPath) -> str:
    """Index a folder in a format that we know, such as `.metadata` of distributed checkpoints or safetensors shards.
    Returns the format's name; empty if the folder is in no known format."""
    if os.path.lexists(folder / distributed.METADATA):
        distributed.add_distributed(contents, folder, path)
        return distributed.FORM
    names = sorted(os.listdir(folder))
    indices = [name for name in names if name.endswith(safetensors.INDEX_SUFFIX)]
    if len(indices) == 1:
        safetensors.add_indexed(contents, folder / indices[0], path)
        return "safetensors with an index"
    shards = [folder / name for name in names if name.endswith(safetensors.SUFFIX)]
    if shards:
        safetensors.add_safetensors(contents, shards, path)
        return f"safetensors, {len(shards)} file{'s' * (len(shards) > 1)}"
    indices = [name for name in names if name.endswith(_BIN_INDEX)]
    if len(indices) == 1:
        files = safetensors.indexed_files(contents, folder / indices[0], ".bin")
        for file in sorted(set(files.values())):
            add_archive(contents, file, path)
        return "files of torch.save with an index"
    return ""


def _add_several(contents: Contents, folder: Path) -> str:
    """Take up all checkpoints below a folder: one alone as it is, several under the names of their files or folders."""
    found = list(_checkpoints(folder, folder, 0, [0]))
    if not found and (parts := sorted(path.name for path in folder.glob("*.distcp"))):
        allowed = "the file that says what lies where, which a save writes last: this one did not come to its end"
        raise bad(f"{folder}: {distributed.METADATA}", f"none beside {parts[0]}", allowed, WHOLE)
    if not found:
        raise unfamiliar(f"{folder}: checkpoints in it", "none", _ALLOWED, FORM)
    named = [(found[0], ())] if len(found) == 1 else _names_below(folder, found)
    return " and ".join(dict.fromkeys(_add_each(contents, named)))


def _add_beside(contents: Contents, folder: Path) -> list[str]:
    """Take up the checkpoints below a folder that its format has not taken. Returns: their formats."""
    loose = [path for path in sorted(folder.iterdir()) if path.name.endswith(safetensors.SUFFIX)]
    found = [path for path in (*loose, *_checkpoints(folder, folder, 0, [0])) if not contents.files.used(path)]
    is_read = [path for path in found if path.is_dir() or _kind_of(contents.files, path)]
    return _add_each(contents, _names_below(folder, is_read))


def _names_below(folder: Path, paths: Iterable[Path]) -> list[tuple[Path, KeyPath]]:
    """Pairs of a checkpoint and the prefix of its tensors: a path without the suffix of a saved file, but with it where
    a folder or a file beside has the same name without one."""
    relative = {path: path.relative_to(folder) for path in paths}
    short = {path: _short(folder, path) for path in relative}
    taken = Counter(short.values())
    return [(path, (short[path] if taken[short[path]] == 1 else below).parts) for path, below in relative.items()]


def _short(folder: Path, path: Path) -> Path:
    """A path below a folder without the suffix of a saved file."""
    below = path.relative_to(folder)
    return below.with_suffix("") if path.is_file() and path.suffix in (*SAVED, safetensors.SUFFIX) else below


def _add_each(contents: Contents, named: Iterable[tuple[Path, KeyPath]]) -> list[str]:
    return [(_add_known if path.is_dir() else _add_file)(contents, path, name) for path, name in named]


def _checkpoints(root: Path, folder: Path, depth: int, seen: list[int]) -> Iterator[Path]:
    """Files of torch.save and folders that are a checkpoint each, below `root`."""
    names = sorted(os.listdir(folder))
    seen[0] += len(names)
    if seen[0] > MOST:
        raise bad(f"{root}: files in it", f"more than {MOST}", "a checkpoint's own folder", FORM)
    if folder != root and _is_known(names):
        yield folder
        return
    for path in (folder / name for name in names):
        is_folder = path.is_dir() and not path.is_symlink()
        if path.name.endswith(SAVED) and not is_folder:
            yield path
        elif is_folder and depth < DEEPEST:
            yield from _checkpoints(root, path, depth + 1, seen)


def _is_known(names: Iterable[str]) -> bool:
    ends = (safetensors.SUFFIX, safetensors.INDEX_SUFFIX, _BIN_INDEX)
    return any(name == distributed.METADATA or name.endswith(ends) for name in names)


def _kind_of(files: Files, file: Path) -> str:
    """The format that a file has by its first bytes; empty text if it is in no format that can be read here."""
    head = files.read(file, 0, min(16, files.size(file)))
    if head.startswith(b"PK"):
        return "file of torch.save"
    if head.startswith(MAGIC):
        return "file of torch.save, before release 1.6"
    return "safetensors" if safetensors.looks_like_safetensors(head) else ""


def _add_file(contents: Contents, file: Path, path: KeyPath) -> str:
    kind = _kind_of(contents.files, file)
    if kind == "file of torch.save":
        add_archive(contents, file, path)
    elif kind == "safetensors":
        safetensors.add_safetensors(contents, [file], path)
    elif kind:
        add_legacy(contents, file, path)
    else:
        head = contents.files.read(file, 0, min(8, contents.files.size(file)))
        given = f"a file that begins with {head.hex(' ')}" if head else "an empty file"
        if file.name == distributed.METADATA:
            raise bad(
                f"{file}: kind of file",
                "the index of a folder",
                "the folder itself",
                f"shardproof diff {file.parent} …",
            )
        raise unfamiliar(f"{file}: kind of file", given, _ALLOWED, FORM)
    return kind
