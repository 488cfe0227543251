"""A folder that torch's distributed checkpoint wrote: the tensors of its `.metadata`, cut into the chunks of the ranks.

*Verifies*: what `shardproof.readers.metadata` does; items lie inside their files and apart; an item, when it is opened,
is a tensor of the dtype and shape that the metadata give it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import groupby
from math import prod
from pathlib import Path

from shardproof.compare.archives import SCALE, Archive, add_leaves
from shardproof.compare.contents import Contents, Part, Tensor, flat_parts
from shardproof.compare.dtypes import WIDE
from shardproof.compare.views import View
from shardproof.readers import metadata
from shardproof.readers.errors import bad
from shardproof.readers.metadata import Item, read_metadata
from shardproof.readers.pieces import KeyPath, check_layout
from shardproof.readers.values import Quantised, Value
from shardproof.readers.values import Tensor as Stored

METADATA = ".metadata"
FORM = "distributed checkpoint of torch"


def add_distributed(contents: Contents, folder: Path, path: KeyPath = ()) -> None:
    """Take up everything that a distributed checkpoint holds, under names that begin with `path`.

    Raises:
        CheckpointError: missing, truncated, foreign or inconsistent.
    """
    meta = folder / METADATA
    size = contents.files.size(meta)
    if size > WIDE.pickle_bytes:
        raise bad(f"{meta}: size of the pickle", size, f"at most {WIDE.pickle_bytes} bytes", metadata.FORM)
    items = read_metadata(contents.files.read(meta, 0, size), str(meta), WIDE)
    for file in check_layout(folder, items):
        contents.files.size(folder / file)
    for _, group in groupby(items, key=lambda item: item.key):
        _Key(contents, folder, path, list(group)).add()


class _Key:
    """An entry of the checkpoint's `.metadata`: a key of the state dict, and the items (chunks of a tensor, or a
    pickled object) that are stored under the key."""

    def __init__(self, contents: Contents, folder: Path, prefix: KeyPath, items: list[Item]) -> None:
        self.contents, self.folder, self.items = contents, folder, items
        self.path = (*prefix, *items[0].path)

    def add(self) -> None:
        first = self.items[0]
        if first.box is None:
            for item in self.items:
                archive = self.archive(item)
                add_leaves(self.contents, self.path, archive, archive.value())
        elif isinstance(self.archive(first).value(), Quantised):
            self.add_quantised()
        else:
            self.contents.add(Tensor(self.path, first.dtype, first.whole or first.shape, tuple(self.parts())))

    def archive(self, item: Item) -> Archive:
        """An item's own archive."""
        contents = self.contents
        place = self.folder / item.file, item.offset, item.length
        return Archive(contents.files, *place, contents.foreign, checksums=contents.checksums)

    def parts(self) -> Iterable[Part]:
        """The boxes of a tensor."""
        for item in self.items:
            assert item.box is not None
            place = (item.file, item.offset)
            if item.whole is None:
                yield Part(*item.box, place, lambda item=item: self.opened(item))  # type: ignore[misc]
                continue
            *grid, elements = item.shape
            shard = tuple(size // n for size, n in zip(item.whole, grid, strict=True))
            origin = tuple(index * size for index, size in zip(item.box[0], shard, strict=False))
            opened = cache(lambda item=item: _as_flat(self.opened(item)))
            at = min(item.box[0][-1], elements)
            for part in flat_parts(shard, at, item.box[1][-1], opened, 0, place):
                start = tuple(o + s for o, s in zip(origin, part.start, strict=True))
                yield Part(start, part.size, part.place, part.opened)

    def opened(self, item: Item) -> View:
        """An item's tensor.

        Raises:
            CheckpointError: it is no such tensor.
        """
        assert item.box is not None
        archive = self.archive(item)
        value = archive.value()
        size = item.box[1]
        if not isinstance(value, Stored) or value.dtype != item.dtype or not _same(value.shape, size):
            raise self.other(item, value)
        return archive.view(value)

    def add_quantised(self) -> None:
        """A tensor in fp8, every part with a scale of its own."""
        parts, scales = [], []
        for number, item in enumerate(self.items):
            archive = self.archive(item)
            value = archive.value()
            if item.box is None or item.whole or not isinstance(value, Quantised) or value.data.shape != item.box[1]:
                raise self.other(item, value)
            view, inverse = archive.view(value.data), archive.view(value.scale_inv)
            of_scale = View(inverse.extent, inverse.dtype, inverse.offset, (1,), (1,))
            place = (item.file, item.offset)
            parts.append(
                Part(*item.box, place, cache(lambda v=view: View(v.extent, "fp8e4m3", v.offset, v.shape, v.stride)))
            )
            scales.append(Part((number,), (1,), place, cache(lambda v=of_scale: v)))
        self.contents.add(Tensor(self.path, "fp8e4m3", self.items[0].shape, tuple(parts)))
        self.contents.add(Tensor((*self.path, SCALE), "fp32", (len(scales),), tuple(scales)))

    def other(self, item: Item, value: Value) -> Exception:
        given = f"{value.dtype} of shape {value.shape}" if isinstance(value, Stored) else type(value).__name__
        assert item.box is not None
        where = f"{self.folder / item.file} at {item.offset}: key {item.key!r}: stored item"
        return bad(where, given, f"{item.dtype} of shape {item.box[1]}, as .metadata says", metadata.FORM)


def _same(shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """FSDP2 drops the inner dims of an empty shard."""
    return shape == size or prod(shape) == prod(size) == 0


def _as_flat(view: View) -> View:
    return view.flat(0, (prod(view.shape),))
