"""Files of torch.save in the form before release 1.6, which `_use_new_zipfile_serialization=False` still writes.

Five pickles one after the other: a magic number, the protocol, facts about the machine, the object, the keys of its
storages. Then each storage: its element count, and its elements. There are no checksums.
"""

from __future__ import annotations

import struct
from pathlib import Path

from shardproof.compare.contents import Contents, Plain, whole
from shardproof.compare.dtypes import WIDE, itemsize
from shardproof.compare.files import Extent
from shardproof.compare.pickles import OpenDecoder
from shardproof.compare.views import View
from shardproof.readers.errors import bad
from shardproof.readers.pieces import KeyPath, leaves
from shardproof.readers.symbolic import Mapping, parse_first
from shardproof.readers.values import FORM, Storage, Tensor

MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
"""The first pickle, torch's magic number, as protocol 2 writes it."""


def add_legacy(contents: Contents, file: Path, path: KeyPath = ()) -> None:
    """Take up everything that such a file holds, under names that begin with `path`.

    Raises:
        CheckpointError: it is damaged.
    """
    size = contents.files.size(file)
    data = contents.files.read(file, len(MAGIC), min(size - len(MAGIC), WIDE.pickle_bytes))
    nodes, at = [], 0
    for _ in range(4):
        node, end = parse_first(data[at:] if at else data, str(file))
        nodes.append(node)
        at += end
    version, machine, saved, keys = nodes
    _require_little(version, machine, file)
    value = OpenDecoder(str(file), contents.foreign).decoded(saved)
    found = [(at_, leaf) for at_, leaf in leaves(path, value)]
    storages: dict[str, Storage] = {}
    for _, leaf in found:
        if isinstance(leaf, Tensor) and storages.setdefault(leaf.storage.key, leaf.storage) != leaf.storage:
            raise bad(f"{file}: storage {leaf.storage.key}", "of two dtypes or sizes", "one", FORM)
    extents = _extents(contents, file, len(MAGIC) + at, keys, storages)
    for where, leaf in found:
        if isinstance(leaf, Tensor):
            view = View(
                extents[leaf.storage.key], leaf.dtype, leaf.offset_elements, leaf.shape, leaf.stride, leaf.flags
            )
            view.require_inside()
            contents.add(whole(where or (file.stem,), view))
        else:
            contents.add(Plain(where, leaf))


def _require_little(version: object, machine: object, file: Path) -> None:
    pairs = machine.pairs if isinstance(machine, Mapping) else []
    if version != 1001 or ("little_endian", True) not in pairs:
        raise bad(f"{file}: header", f"protocol {version}", "1001, little endian", FORM)


def _extents(
    contents: Contents, file: Path, position: int, keys: object, storages: dict[str, Storage]
) -> dict[str, Extent]:
    """Where each storage lies. Those that no tensor uses cannot be skipped, since nothing says how large they are."""
    extents = {}
    for key in keys if isinstance(keys, list) else []:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise bad(f"{file}: storage", str(key), "one that a tensor uses", FORM)
        (count,) = struct.unpack("<q", contents.files.read(file, position, 8))
        if count != storage.numel:
            raise bad(f"{file}: elements of storage {key}", count, f"{storage.numel}, as its tensors say", FORM)
        length = count * itemsize(storage.dtype)
        extents[key] = Extent(contents.files, file, position + 8, length, f"storage {key}")
        position += 8 + length
    if storages.keys() - extents.keys() or position != contents.files.size(file):
        raise bad(f"{file}: storages", "not those of its tensors", "all of them, then the file's end", FORM)
    return extents
