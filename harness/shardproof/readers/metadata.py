"""The `.metadata` file of a distributed checkpoint, read without torch and without unpickling it.

The file is a pickle of torch.distributed.checkpoint.metadata.Metadata: which keys there are, the chunks of each tensor,
the path of each key in the nested state dict, and in which file each item lies. `symbolic` reads it as data, and the
names below are the allow-list of what may occur in it.

*Verifies*: only the classes of DCP occur, with the fields and types they have; chunks lie inside their tensor and have
distinct offsets; each chunk and each object has exactly one item, and each item one of them; a key is its path joined
by dots.
*Does not verify*: that chunks cover their tensor without gap or overlap (assembly does), memory format and
requires_grad, the identity of the save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardproof.readers.errors import CheckpointError, bad, unfamiliar
from shardproof.readers.symbolic import Mapping, Name, Node, parse
from shardproof.readers.values import JUDGED, Bounds, integers
from shardproof.readers.vocabulary import known

FORM = "torch.distributed.checkpoint.save({'model': model.state_dict()}, checkpoint_id=path)"

_DCP = "torch.distributed.checkpoint"
METADATA = Name(f"{_DCP}.metadata", "Metadata")
TENSOR = Name(f"{_DCP}.metadata", "TensorStorageMetadata")
OBJECT = Name(f"{_DCP}.metadata", "BytesStorageMetadata")
PROPERTIES = Name(f"{_DCP}.metadata", "TensorProperties")
CHUNK = Name(f"{_DCP}.metadata", "ChunkStorageMetadata")
INDEX = Name(f"{_DCP}.metadata", "MetadataIndex")
STORAGE = Name(f"{_DCP}.filesystem", "_StorageInfo")

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One stored item. box: `(start, size)` in its tensor, None for an object. offset, length: bytes in `file`.

    whole: where Megatron-Core stored flat ranges of a tensor's shards, that tensor's shape; `shape` then is the number
    of shards in each of its dims, and the elements of a shard.
    """

    key: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    file: str
    offset: int
    length: int
    whole: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: dict[tuple[int, ...], tuple[int, ...]]  # offset → size


def read_metadata(data: bytes, origin: str, bounds: Bounds = JUDGED) -> list[Item]:
    """Every item of a checkpoint, sorted by key and offset.

    Args:
        data: the file's content. origin: which file it is, for messages. bounds: how large it may be, and its dtypes.

    Raises:
        CheckpointError: truncated, foreign, hostile or inconsistent.
    """
    return _Reader(origin, bounds).items(parse(data, origin, bounds.pickle_bytes))


class _Reader:
    def __init__(self, origin: str, bounds: Bounds) -> None:
        self.origin = origin
        self.known_dtypes = bounds.dtypes
        self.wholes: dict[str, tuple[int, ...]] = {}

    def items(self, root: object) -> list[Item]:
        fields = self.fields(root, METADATA, *known().metadata)
        self.wholes = self.reformulated(fields.get("mcore_data"))
        entries = dict(self.entries(fields.get("state_dict_metadata"), "state_dict_metadata"))
        paths = self.paths(fields.get("planner_data"))
        items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
        for index, info in self.pairs(fields.get("storage_data"), "storage_data"):
            item = self.item(index, info, entries, paths)
            place = (item.key, item.box[0] if item.box else None)
            if place in items:
                raise self.bad(f"storage_data of key {item.key!r}", "two items at one offset", "one item each")
            items[place] = item
        expected = {(key, offset) for key, entry in entries.items() for offset in (entry.chunks if entry else [None])}
        for key, offset in sorted(expected - items.keys(), key=str):
            raise self.bad(f"storage_data of key {key!r}", f"none at offset {offset}", "an item for each chunk")
        return [items[place] for place in sorted(items, key=lambda place: (place[0], place[1] or ()))]

    def item(self, index: object, info: object, entries: dict[str, _Tensor | None], paths: dict[str, Path]) -> Item:
        where = self.fields(index, INDEX)
        key, offset = where.get("fqn"), where.get("offset")
        if not isinstance(key, str) or key not in entries:
            raise self.bad("key of an item in storage_data", key, "a key of state_dict_metadata")
        tensor = entries[key]
        start = None if offset is None else integers(offset)
        if (tensor is None) != (start is None) or (tensor and start not in tensor.chunks):
            raise self.bad(f"offset of an item of key {key!r}", str(start), "the offset of one of its chunks")
        stored = self.fields(info, STORAGE)
        file, begin, length = stored.get("relative_path"), stored.get("offset"), stored.get("length")
        if not isinstance(file, str) or not isinstance(begin, int) or not isinstance(length, int):
            raise self.bad(f"item of key {key!r}", "damaged", "relative_path, offset and length")
        if stored.get("transform_descriptors"):
            raise self.bad(f"item of key {key!r}", "a transformed (compressed) one", "items as torch.save writes them")
        path = paths.get(key, (key,))
        if tensor is None or start is None:
            return Item(key, path, "", (), None, file, begin, length)
        box = (start, tensor.chunks[start])
        return Item(key, path, tensor.dtype, tensor.shape, box, file, begin, length, self.whole(key, tensor.shape))

    def reformulated(self, node: object) -> dict[str, tuple[int, ...]]:
        """Key → shape of the tensor whose shards were flattened (Megatron-Core before 0.16)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for key, value in [] if node is None else self.pairs(node, "mcore_data"):
            told = dict(self.pairs(value, "mcore_data")).get("nd_reformulated_orig_global_shape")
            if told is None:
                continue
            shape = integers(told)
            if not isinstance(key, str) or shape is None:
                raise self.bad("mcore_data", key, "a key and a shape")
            shapes[key] = shape
        return shapes

    def whole(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the tensor that a stored one of `shape` holds the flat shards of, if it does."""
        whole = self.wholes.get(key)
        if whole is None:
            return None
        *grid, elements = shape or (0,)
        divides = len(grid) == len(whole) and all(n and not size % n for size, n in zip(whole, grid, strict=True))
        if not divides or elements * prod(grid) != prod(whole):
            raise self.bad(f"shape of key {key!r}", str(shape), f"equal shards of {whole}")
        return whole

    def entries(self, node: object, what: str) -> Iterator[tuple[str, _Tensor | None]]:
        seen: set[str] = set()
        for key, value in self.pairs(node, what):
            if not isinstance(key, str) or key in seen:
                raise self.bad(f"key of {what}", key, "text, every key once")
            seen.add(key)
            if isinstance(value, Node) and value.function == OBJECT:
                yield key, None
            else:
                yield key, self.tensor(key, value)

    def tensor(self, key: str, node: object) -> _Tensor:
        fields = self.fields(node, TENSOR)
        shape, chunks = integers(fields.get("size")), fields.get("chunks")
        if shape is None or not isinstance(chunks, list):
            raise self.bad(f"tensor {key!r}", "damaged", "a size and a list of chunks")
        boxes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for chunk in chunks:
            box = self.fields(chunk, CHUNK)
            start, size = integers(box.get("offsets")), integers(box.get("sizes"))
            if start is None or size is None or not len(start) == len(size) == len(shape):
                raise self.bad(f"chunk of tensor {key!r}", "damaged", f"offsets and sizes of {len(shape)} dims")
            if any(a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
                raise self.bad(f"chunk of tensor {key!r}", f"{size} at {start}", f"a box inside {shape}")
            if start in boxes:
                raise self.bad(f"chunk of tensor {key!r}", f"two at {start}", "one at each offset")
            boxes[start] = size
        return _Tensor(self.dtype(key, fields.get("properties")), shape, boxes)

    def dtype(self, key: str, node: object) -> str:
        if isinstance(node, Node) and node.function == PROPERTIES and isinstance(node.state, tuple):
            match node.state:
                case (Name(module="torch", name=name), *_) if name in self.known_dtypes:
                    return self.known_dtypes[name]
                case (Name() as other, *_):
                    allowed = ", ".join(f"torch.{n}" for n in self.known_dtypes)
                    raise self.bad(f"dtype of tensor {key!r}", str(other), allowed)
        raise self.bad(f"properties of tensor {key!r}", "damaged", "TensorProperties")

    def paths(self, node: object) -> dict[str, Path]:
        if node is None:  # the planner did not flatten: keys are top-level
            return {}
        paths: dict[str, Path] = {}
        for key, path in self.pairs(node, "planner_data"):
            parts = path if isinstance(path, tuple) and all(isinstance(part, str | int) for part in path) else None
            if not isinstance(key, str) or parts is None or ".".join(str(part) for part in parts) != key:
                raise self.bad("path of a key in planner_data", key, "the key's parts")
            paths[key] = parts
        return paths

    def pairs(self, node: object, what: str) -> list[tuple[object, object]]:
        if not isinstance(node, Mapping):
            raise self.bad(what, type(node).__name__, "a dict")
        return node.pairs

    def fields(self, node: object, expected: Name, *others: Name) -> dict[str, object]:
        """The attributes of an instance of an allowed class."""
        if not isinstance(node, Node) or node.function not in (expected, *others):
            given = node.function if isinstance(node, Node) else node if isinstance(node, Name) else type(node).__name__
            raise unfamiliar(
                f"{self.origin}: name in the pickle (nothing was executed)", str(given), str(expected), FORM
            )
        if node.args or node.items or node.pairs or not isinstance(node.state, Mapping):
            raise self.bad(f"{expected}", "damaged", "an instance with its fields")
        return {name: value for name, value in node.state.pairs if isinstance(name, str)}

    def bad(self, what: str, given: object, allowed: str) -> CheckpointError:
        return bad(f"{self.origin}: {what}", given, allowed, FORM)
