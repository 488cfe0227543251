"""The `.metadata` of a distributed checkpoint, field by field: what is made of it, and what is said where it is wrong.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`); the refusals are in
`golden/refusals.txt`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from shardproof.readers.errors import CheckpointError
from shardproof.readers.metadata import Item, read_metadata
from shardproof.readers.symbolic import Name
from shardproof.readers.values import JUDGED
from shardproof.readers.vocabulary import Vocabulary
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

pytestmark = pytest.mark.usefixtures("refused_word_for_word")

Edit = Callable[[Any], object]


def tensor(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> Any:
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def metadata() -> Any:
    """A weight of 4 × 3 in two pieces, which are not in the order of their places, a scalar, and an object."""
    weight = tensor((4, 3), ((2, 0), (2, 3)), ((0, 0), (2, 3)), dtype=torch.bfloat16)
    entries = {"m.w": weight, "it": BytesStorageMetadata(), "m.0": tensor((), ((), ()), dtype=torch.int64)}
    paths = {"m.w": ("m", "w"), "m.0": ("m", 0), "it": ("it",)}
    places = {("m.w", (2, 0)): 1, ("m.w", (0, 0)): 0, ("it", None): 0, ("m.0", ()): 0}
    storage = {
        MetadataIndex(key, None if start is None else torch.Size(start)): _StorageInfo(f"__{rank}_0.distcp", 8 * i, i)
        for i, ((key, start), rank) in enumerate(places.items())
    }
    return Metadata(entries, paths, storage)


def read(edit: Edit = lambda metadata: None) -> list[Item]:
    changed = metadata()
    edit(changed)
    return read_metadata(pickle.dumps(changed, protocol=4), "it")


WHOLE = [
    Item("it", ("it",), "", (), None, "__0_0.distcp", 16, 2),
    Item("m.0", ("m", 0), "int64", (), ((), ()), "__0_0.distcp", 24, 3),
    Item("m.w", ("m", "w"), "bf16", (4, 3), ((0, 0), (2, 3)), "__0_0.distcp", 8, 1),
    Item("m.w", ("m", "w"), "bf16", (4, 3), ((2, 0), (2, 3)), "__1_0.distcp", 0, 0),
]


def test_items_are_sorted_by_key_and_place() -> None:
    assert read() == WHOLE


def test_keys_without_paths_are_at_the_top() -> None:
    assert read(lambda m: setattr(m, "planner_data", None)) == [replace(item, path=(item.key,)) for item in WHOLE]
    partly = read(lambda m: m.planner_data.pop("m.0"))
    assert [item.path for item in partly] == [("it",), ("m.0",), ("m", "w"), ("m", "w")]


def test_a_key_is_there_once() -> None:
    changed = metadata()
    changed.state_dict_metadata["M.w"] = weight(changed)
    data = pickle.dumps(changed, protocol=4)
    with pytest.raises(CheckpointError):
        read_metadata(data.replace(b"M.w", b"m.w"), "it")


def test_a_pickle_has_at_most_as_many_bytes_as_is_said() -> None:
    for limit in (3, 4):  # which is refused for its length, and for what it is
        with pytest.raises(CheckpointError):
            read_metadata(b"\x80\x02N.", "it", replace(JUDGED, pickle_bytes=limit))


def test_dtypes_are_those_that_are_said() -> None:
    data = pickle.dumps(metadata(), protocol=4)
    found = read_metadata(data, "it", replace(JUDGED, dtypes={"bfloat16": "x", "int64": "y"}))
    assert [item.dtype for item in found] == ["", "y", "x", "x"]
    with pytest.raises(CheckpointError):
        read_metadata(data, "it", replace(JUDGED, dtypes={"int64": "y", "int32": "z"}))


class OfItsOwn(Metadata):
    """What a library has in the place of DCP's class."""


def test_a_library_may_have_a_class_of_its_own_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(OfItsOwn(**vars(metadata())), protocol=4)
    with pytest.raises(CheckpointError):
        read_metadata(data, "it")
    own = Vocabulary(metadata=frozenset({Name(__name__, "OfItsOwn")}))
    monkeypatch.setattr("shardproof.readers.metadata.known", lambda: own)
    assert read_metadata(data, "it") == WHOLE


def shards(whole: object, stored: tuple[int, ...], key: object = "w") -> list[Item]:
    """Flat shards of a tensor, as Megatron-Core stored them before 0.16: one chunk, and what it says of the whole."""
    empty = (0,) * len(stored)
    found = Metadata({"w": tensor(stored, (empty, stored), dtype=torch.float32)}, None, {
        MetadataIndex("w", torch.Size(empty)): _StorageInfo("__0_0.distcp", 0, 4),
    })  # fmt: skip
    told = {"plain": {}, key: {"nd_reformulated_orig_global_shape": whole}, "none": {"other": (1,)}}
    found.mcore_data = told  # type: ignore[attr-defined]
    return read_metadata(pickle.dumps(found, protocol=4), "it")


@pytest.mark.parametrize(
    ("whole", "stored"), [((4, 6), (2, 1, 12)), ((4, 6), (2, 3, 4)), ((4, 6), (1, 1, 24)), ((3,), (3, 1)), ((), (1,))]
)
def test_flat_shards_say_of_which_tensor_they_are(whole: tuple[int, ...], stored: tuple[int, ...]) -> None:
    for shape in (whole, torch.Size(whole)):
        (item,) = shards(shape, stored)
        assert (item.whole, item.shape, item.box) == (whole, stored, ((0,) * len(stored), stored))


def test_what_is_said_of_another_key_is_of_no_matter() -> None:
    assert [item.whole for item in shards((4, 6), (5,), "v")] == [None]


@pytest.mark.parametrize(
    ("whole", "stored"),
    [
        ((4, 6), (2, 1, 11)),
        ((4, 6), (24,)),
        ((4, 6), ()),
        ((4, 6), (0, 1, 24)),
        ((4, 6), (3, 1, 8)),
        ((4, 6), (2, 2, 2, 3)),
        ("4x6", (2, 1, 12)),
        ((), ()),
    ],
)
def test_flat_shards_that_do_not_make_a_whole(whole: object, stored: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError):
        shards(whole, stored)


def test_a_whole_that_is_said_of_no_key() -> None:
    with pytest.raises(CheckpointError):
        shards((4, 6), (2, 1, 12), 7)


def weight(metadata: Any) -> Any:
    return metadata.state_dict_metadata["m.w"]


def stored(metadata: Any, place: int = 0) -> Any:
    return list(metadata.storage_data.values())[place]


def as_state(node: Any, **fields: object) -> None:
    vars(node).update(fields)


class Instance:
    """Pickled as a call of a class of DCP with arguments, items or pairs, which no instance of it has."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return (MetadataIndex, *self.parts)


def index(**fields: object) -> Any:
    """An index that equals no other one in a dict."""
    return Instance((), fields)


INDEX = MetadataIndex("m.w", torch.Size((0, 0)))

WRONG: dict[str, Edit] = {
    "another root": lambda m: m.__dict__.clear(),
    "no entries": lambda m: as_state(m, state_dict_metadata=None),
    "no items": lambda m: as_state(m, storage_data=None),
    "paths that are no dict": lambda m: as_state(m, planner_data=[]),
    "wholes that are no dict": lambda m: as_state(m, mcore_data=[]),
    "a whole that is no dict": lambda m: as_state(m, mcore_data={"m.w": 1}),
    "a key that is no text": lambda m: m.state_dict_metadata.update({7: weight(m)}),
    "an item that is missing": lambda m: m.storage_data.pop(INDEX),
    "an object without an item": lambda m: m.storage_data.pop(MetadataIndex("it")),
    "two items at one offset": lambda m: m.storage_data.update(
        {index(fqn="m.w", offset=torch.Size((0, 0))): stored(m)}
    ),
    "two items of one object": lambda m: m.storage_data.update({index(fqn="it"): stored(m)}),
    "an item of no key": lambda m: m.storage_data.update({MetadataIndex("v"): stored(m)}),
    "an item of a key that is no text": lambda m: m.storage_data.update({MetadataIndex(7): stored(m)}),  # type: ignore[arg-type]
    "an item of an object with an offset": lambda m: m.storage_data.update({MetadataIndex("it", (0,)): stored(m)}),
    "an item of a tensor without an offset": lambda m: m.storage_data.update({MetadataIndex("m.w"): stored(m)}),
    "an item at the offset of no chunk": lambda m: m.storage_data.update({MetadataIndex("m.w", (1, 0)): stored(m)}),
    "an index of another class": lambda m: m.storage_data.update({torch.Size((1,)): stored(m)}),
    "an index that is no instance": lambda m: m.storage_data.update({"m.w": stored(m)}),
    "a class for an index": lambda m: m.storage_data.update({torch.Size: stored(m)}),
    "a place that is no instance": lambda m: m.storage_data.update({INDEX: 7}),
    "a file that is no text": lambda m: as_state(stored(m), relative_path=7),
    "an offset that is no number": lambda m: as_state(stored(m), offset="0"),
    "a length that is no number": lambda m: as_state(stored(m), length="0"),
    "a compressed item": lambda m: as_state(stored(m), transform_descriptors=["zstd"]),
    "a size that is no shape": lambda m: as_state(weight(m), size=7),
    "chunks that are no list": lambda m: as_state(weight(m), chunks=()),
    "a chunk of another class": lambda m: weight(m).chunks.append(BytesStorageMetadata()),
    "a chunk without offsets": lambda m: as_state(weight(m).chunks[0], offsets=None),
    "a chunk without sizes": lambda m: as_state(weight(m).chunks[0], sizes=None),
    "offsets of another number of dims": lambda m: as_state(weight(m).chunks[0], offsets=(2,)),
    "sizes of another number of dims": lambda m: as_state(weight(m).chunks[0], sizes=(2,)),
    "a chunk of another number of dims": lambda m: as_state(weight(m).chunks[0], offsets=(2,), sizes=(2,)),
    "a chunk that leaves its tensor": lambda m: as_state(weight(m).chunks[0], sizes=(2, 4)),
    "two chunks at one place": lambda m: weight(m).chunks.append(weight(m).chunks[0]),
    "properties of another class": lambda m: as_state(weight(m), properties=BytesStorageMetadata()),
    "properties that are text": lambda m: as_state(weight(m), properties="bf16"),
    "a dtype of another module": lambda m: as_state(weight(m).properties, dtype=pickle.Pickler),
    "a dtype that is text": lambda m: as_state(weight(m).properties, dtype="bf16"),
    "a dtype that is not taken": lambda m: as_state(weight(m).properties, dtype=torch.complex64),
    "a path that is no tuple": lambda m: m.planner_data.update({"m.w": ["m", "w"]}),
    "a path with a part that is neither text nor a number": lambda m: m.planner_data.update({"m.w": ("m", b"w")}),
    "a path of a key that is no text": lambda m: m.planner_data.update({7: ("m", "w")}),
    "a path of another key": lambda m: m.planner_data.update({"m.w": ("m", "v")}),
    "an instance with arguments": lambda m: m.storage_data.update({Instance(("m.w",)): stored(m)}),
    "an instance without its fields": lambda m: m.storage_data.update({Instance(()): stored(m)}),
    "an instance with items": lambda m: m.storage_data.update({Instance((), {"fqn": "m.w"}, iter([1])): stored(m)}),
    "an instance with pairs": lambda m: m.storage_data.update(
        {Instance((), {"fqn": "m.w"}, None, iter([(1, 2)])): stored(m)}
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_and_said(what: str) -> None:
    with pytest.raises(CheckpointError):
        read(WRONG[what])
