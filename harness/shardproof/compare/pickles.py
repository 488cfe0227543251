"""Reads the pickles of arbitrary checkpoints as plain values, without executing anything. Any class name is accepted,
where the judge's reader refuses names that no scenario writes.

A training script saves its arguments, its optimizer's classes, random states of numpy. The judge's reader refuses such
names, since no scenario writes them. Here a name becomes its text, and an object a dict of what the pickle says of it,
so that two of them can be compared. Which names there were is kept, since loading such a file executes them.
"""

from __future__ import annotations

from shardproof.compare.dtypes import WIDE, itemsize
from shardproof.readers.symbolic import PERSISTENT, Mapping, Name, Node, parse
from shardproof.readers.values import Decoder, Scalar, Value

PLAIN = frozenset({Name("__builtin__", "complex"), Name("builtins", "complex"), Name("torch", "device")})
"""Names that say nothing about who wrote a file."""

FLAGS = frozenset({"neg", "conj"})
"""What `torch._utils.get_tensor_metadata` saves of a tensor beside its storage."""

BYTES = Name("_codecs", "encode")
"""How protocol 2 writes bytes."""


def values_of(data: bytes, origin: str, foreign: set[str]) -> Value:
    """What a pickle holds.

    Args:
        origin: which file and part, for messages. foreign: names that are no plain data are added to it.

    Raises:
        CheckpointError: it is damaged, too large or too deep.
    """
    return OpenDecoder(origin, foreign).decoded(parse(data, origin, WIDE.pickle_bytes))


class OpenDecoder(Decoder):
    """Takes every name, as text."""

    def __init__(self, origin: str, foreign: set[str]) -> None:
        super().__init__(origin, WIDE)
        self.names = foreign

    def foreign(self, node: object, depth: int) -> Value:
        match node:
            case Node(function=function, args=(("storage", *_) as storage,)) if function == PERSISTENT:
                return self.whole(list(storage))
            case Node(function=function, args=(*persistent,)) if function == PERSISTENT:
                return [self.value(part, depth - 1) for part in persistent]
            case Node(function=function, args=(str(text), "latin1")) if function == BYTES:
                return text.encode("latin1", "replace")
            case Name():
                self.note(node)
                return str(node)
            case Node():
                return self.instance_of(node, depth)
            case bytearray():
                return bytes(node)
        raise self.refused(node)

    def instance_of(self, node: Node, depth: int) -> dict[Scalar, Value]:
        """An object as what the pickle says of it."""
        self.note(node.function)
        held: dict[Scalar, Value] = {"class": str(node.function)}
        parts = (("args", list(node.args)), ("state", node.state), ("items", list(node.items)), ("pairs", node.pairs))
        for name, value in parts:
            if value:
                pairs = Mapping(node.pairs) if name == "pairs" else value
                held[name] = self.value(pairs, depth - 1)
        return held

    def note(self, name: Name) -> None:
        if name not in PLAIN:
            self.names.add(str(name))

    def key(self, key: object) -> Scalar:
        """A dict's key; one that is neither text nor a number, as text."""
        if isinstance(key, str | bytes | int | float | None):
            return key
        return _text(key, 8)

    def flags(self, node: object) -> frozenset[str] | None:
        pairs = node.pairs if isinstance(node, Mapping) else [] if node is None else [(node, node)]
        names = [name for name, value in pairs if value is True and isinstance(name, str) and name in FLAGS]
        return frozenset(names) if len(names) == len(pairs) else None

    def itemsize(self, dtype: str) -> int:
        return itemsize(dtype)


def _text(node: object, depth: int) -> str:
    """A key's parts as text, in one way for equal keys."""
    match node:
        case tuple() if depth:
            return f"({', '.join(_text(part, depth - 1) for part in node)})"
        case Node(function=function, args=args) if depth:
            return f"{function}{_text(args, depth - 1)}"
        case str() | bytes() | int() | float() | None | Name():
            return str(node) if isinstance(node, Name) else repr(node)
    return "…"
