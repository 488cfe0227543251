"""What a parsed pickle stands for, node by node, and what is refused.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`); the refusals are in
`golden/refusals.txt`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardproof.readers.errors import CheckpointError
from shardproof.readers.symbolic import PERSISTENT, Mapping, Name, Node
from shardproof.readers.values import (
    DICTS,
    JUDGED,
    MAX_DEPTH,
    MAX_DIMS,
    PARAMETER,
    SETS,
    SIZE,
    TENSOR,
    TENSOR_TYPES,
    WITH_ATTRIBUTES,
    WITH_STATE,
    Decoder,
    Quantised,
    Storage,
    Tensor,
    Value,
    decode,
    integers,
)
from shardproof.readers.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("refused_word_for_word")

FLOATS, BF16 = Name("torch", "FloatStorage"), Name("torch", "bfloat16")
STORAGE = Node(PERSISTENT, (("storage", FLOATS, "7", "cpu", 6),))
PLAIN = Tensor(Storage("fp32", "7", 6), 1, (2, 2), (3, 1))


def tensor(*more: object, storage: object = STORAGE, offset: object = 1, size: object = (2, 2)) -> Node:
    return Node(TENSOR, (storage, offset, size, (3, 1), False, Mapping(), *more))


def nested(levels: int, kind: str) -> object:
    node: object = 1
    for _ in range(levels):
        inner = [node] if kind == "list" else Mapping([("k", node)])
        wrapped = {"list": inner, "dict": inner, "OrderedDict": Node(DICTS[0], (), pairs=[("k", node)])}
        wrapped |= {
            "set": Node(SETS[2], ([node],)),
            "size": Node(SIZE, ([node],)),
            "parameter": Node(PARAMETER, (node,)),
        }
        node = wrapped[kind]
    return node


LEVELS = {"list": 63, "dict": 63, "OrderedDict": 63, "set": 63, "size": 31, "parameter": 63}
"""Kind → levels of it. A size has a list, which is one more."""


@pytest.mark.parametrize(("kind", "levels"), LEVELS.items())
def test_as_many_levels_as_are_allowed(kind: str, levels: int) -> None:
    assert MAX_DEPTH == 64
    decode(nested(levels, kind), "it")
    with pytest.raises(CheckpointError):
        decode(nested(levels + 1, kind), "it")


def with_attributes(levels: int) -> Node:
    """A tensor with attributes, which has attributes itself, and so on."""
    function, args = TENSOR, tensor().args
    for _ in range(levels):
        function, args = WITH_ATTRIBUTES, (function, TENSOR_TYPES[0], args, None)
    return Node(function, args)


def test_as_many_levels_of_attributes_as_are_allowed() -> None:
    assert decode(with_attributes(63), "it") == PLAIN
    with pytest.raises(CheckpointError):
        decode(with_attributes(64), "it")


def test_members_of_a_set_are_in_the_order_of_their_texts() -> None:
    assert decode(Node(SETS[0], ([1, None, "a"],)), "it") == ["a", 1, None]


def test_a_reader_for_another_purpose_may_take_what_is_foreign() -> None:
    class Open(Decoder):
        def foreign(self, node: object, depth: int) -> Value:
            return f"{node} {depth}"

    call, name = Node(Name("its", "call"), (1,)), Name("its", "name")
    assert Open("it", JUDGED).decoded([call, name]) == [f"{call} 63", f"{name} 63"]


def test_as_many_values_as_are_allowed() -> None:
    assert Decoder("it", replace(JUDGED, values=4)).decoded([1, 2, 3]) == [1, 2, 3]
    with pytest.raises(CheckpointError):
        Decoder("it", replace(JUDGED, values=3)).decoded([1, 2, 3])


@pytest.mark.parametrize(
    ("node", "value"),
    [
        ((1, "a", b"b", None, True, 0.5), [1, "a", b"b", None, True, 0.5]),
        (Mapping([("a", 1), (2, (3,))]), {"a": 1, 2: [3]}),
        (Node(DICTS[0], (), pairs=[("a", 1)]), {"a": 1}),
        (Node(DICTS[1], (Mapping([("a", 1)]),), pairs=[("b", 2)], state=Mapping([("c", 3)])), {"a": 1, "b": 2}),
        (Node(SETS[0], ([3, 1, 2],)), [1, 2, 3]),
        (Node(SETS[3], (["b", "a"],)), ["a", "b"]),
        (Node(SIZE, ((2, 3),)), [2, 3]),
        (BF16, "torch.bfloat16"),
        (tensor(), PLAIN),
        (tensor(Mapping()), PLAIN),
        (tensor(None), PLAIN),
        (tensor(offset=0, size=Node(SIZE, ((2, 2),)).args[0]), replace(PLAIN, offset_elements=0)),
        (Node(PARAMETER, (tensor(), True, None)), PLAIN),
        (Node(WITH_STATE, (tensor(), True, None, Mapping([("tag", 1)]))), PLAIN),
        (Node(WITH_ATTRIBUTES, (TENSOR, TENSOR_TYPES[0], tensor().args, Mapping([("tag", 1)]))), PLAIN),
        (Node(WITH_ATTRIBUTES, (PARAMETER, TENSOR_TYPES[1], (tensor(),), None)), PLAIN),
        (Mapping([((BF16, Name("torch", "float32")), 1)]), {"(torch.bfloat16, torch.float32)": 1}),
        (Mapping([((BF16,), 1)]), {"(torch.bfloat16)": 1}),
    ],
)
def test_what_a_node_stands_for(node: object, value: Value) -> None:
    assert decode(node, "it") == value


def test_a_storage_may_be_empty() -> None:
    empty = Node(PERSISTENT, (("storage", FLOATS, "7", "cpu", 0),))
    assert decode(tensor(storage=empty), "it") == replace(PLAIN, storage=Storage("fp32", "7", 0))


@pytest.mark.parametrize(
    "node",
    [
        Mapping([("a", 1), ("a", 2)]),
        Mapping([((BF16,), 1), ("(torch.bfloat16)", 2)]),
        Mapping([(("a",), 1)]),
        Mapping([((), 1)]),
        Mapping([((BF16, "a"), 1)]),
        Mapping([((Name("torch", "Size"),), 1)]),
        Mapping([(BF16, 1)]),
        Node(SETS[0], ([1],), state=Mapping()),
        Node(SETS[0], ((1,),)),
        Node(DICTS[0], (), items=[1]),
        Node(SIZE, ((1,), (2,))),
        Node(PARAMETER, ()),
        Node(WITH_ATTRIBUTES, (TENSOR, Name("other", "Tensor"), tensor().args, None)),
        Node(WITH_ATTRIBUTES, (TENSOR, TENSOR_TYPES[0], tensor().args)),
        Node(Name("os", "system"), ("true",)),
        Node(TENSOR, tensor().args, state=Mapping()),
        Name("os", "system"),
        Name("torch", "complex64"),
        Name("numpy", "float32"),
        object(),
        tensor(Mapping([("conj", True)])),
        tensor(1),
        tensor(offset=-1),
        tensor(offset="0"),
        tensor(size=(2, -1)),
        tensor(storage=Node(SIZE, STORAGE.args)),
        tensor(storage=Node(PERSISTENT, (("storage", FLOATS, "7", "cpu", -1),))),
        tensor(storage=Node(PERSISTENT, (("storage", FLOATS, 7, "cpu", 6),))),
        tensor(storage=Node(PERSISTENT, (("module", FLOATS, "7", "cpu", 6),))),
        tensor(storage=Node(PERSISTENT, (("storage", Name("torch", "ComplexStorage"), "7", "cpu", 6),))),
        tensor(storage=Node(PERSISTENT, (("storage", Name("os", "FloatStorage"), "7", "cpu", 6),))),
        Node(TENSOR, (STORAGE, 0, (1,))),
    ],
)
def test_what_is_refused(node: object) -> None:
    with pytest.raises(CheckpointError):
        decode(node, "it")


# --- names that a system knows -------------------------------------------------------------------------

MINE, CONFIG, WORD = Name("mine", "scaled"), Name("mine", "Config"), Name("mine", "Adam")


def told(node: object, made: object = None) -> Value:
    """What a node stands for where a system knows these names, and `made` is what it makes of a scaled tensor."""
    decoder = Decoder("it", JUDGED)
    asked: list[object] = []

    def scaled(args: tuple[object, ...], part: object) -> object:
        asked.append(args)
        return part(args[0]) if made is None else made  # type: ignore[operator]

    decoder.known = Vocabulary(frozenset({WORD}), frozenset({CONFIG}), {MINE: scaled})
    return decoder.decoded(node)


def test_a_known_word_is_text_and_a_known_object_a_dict_of_what_it_was_made_of() -> None:
    assert told(WORD) == "mine.Adam"
    assert told(Node(CONFIG, (1, "a"))) == {"class": "mine.Config", "args": [1, "a"]}
    made = Node(CONFIG, (), state=Mapping([("lr", 0.5)]))
    assert told(made) == {"class": "mine.Config", "args": [], "lr": 0.5}
    for node in (Node(CONFIG, (), state="text"), Node(CONFIG, (), items=[1]), Node(CONFIG, (), pairs=[("a", 1)])):
        with pytest.raises(CheckpointError):
            told(node)


def test_a_known_tensor_is_what_its_system_makes_of_it() -> None:
    assert told(Node(MINE, (tensor(),))) == PLAIN
    scaled = Quantised(PLAIN, PLAIN, "bf16")
    assert told(Node(MINE, (tensor(),)), scaled) == scaled
    with pytest.raises(CheckpointError):
        told(Node(MINE, (tensor(),)), "nothing")
    with pytest.raises(CheckpointError):
        told(Node(MINE, (nested(62, "list"),)))
    decoder = Decoder("it", JUDGED)
    decoder.known = Vocabulary(tensors={MINE: lambda args, part: part(args[0]) and PLAIN})
    assert decoder.decoded(Node(MINE, (nested(62, "list"),))) == PLAIN
    with pytest.raises(CheckpointError):
        decoder.decoded(Node(MINE, (nested(63, "list"),)))


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        ((), ()), ((0, 5), (0, 5)), ((0,) * MAX_DIMS, (0,) * MAX_DIMS), ((0,) * (MAX_DIMS + 1), None),
        (((1 << 63) - 1,), ((1 << 63) - 1,)), ((1 << 63,), None), ((-1,), None), ((True,), None), ((1.0,), None),
        ([1], None), (Node(SIZE, ((2, 3),)), (2, 3)), (Node(SIZE, ((2,), (3,))), None), (Node(MINE, ((2,),)), None),
        (None, None),
    ],
)  # fmt: skip
def test_shapes_are_small_whole_numbers(node: object, shape: tuple[int, ...] | None) -> None:
    assert integers(node) == shape
