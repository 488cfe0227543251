"""A pickle read as data: what it would call is recorded, never called.

`parse` interprets the binary opcodes that torch and its distributed checkpoint write (protocols 2 to 4).
A class or function becomes a `Name`, a call of it a `Node` with its arguments, a dict a `Mapping` of pairs;
the caller then accepts the names that it knows. So nothing out of the file can run, by construction.

*Verifies*: the stream is complete, well formed and not larger than what is taken (`MAX_BYTES`); memory grows with its
length only. *Does not verify*: that any name exists or that a node makes sense; that is up to the caller, who must also
bound its own walk, since a small pickle can describe a structure that is endless or exponentially large.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from shardproof.readers.errors import bad

MAX_BYTES = 8 << 20

_FORM = "a file written by torch.save or torch.distributed.checkpoint.save"


@dataclass(frozen=True, slots=True)
class Name:
    """A global: what `from module import name` would give."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Mapping:
    """A dict as its key and value pairs, in order, duplicates kept."""

    pairs: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Node:
    """An object that unpickling would make: `function(*args)`, then its state, items or pairs set."""

    function: Name
    args: tuple[object, ...]
    state: object = None
    pairs: list[tuple[object, object]] = field(default_factory=list)
    items: list[object] = field(default_factory=list)


PERSISTENT = Name("pickle", "persistent id")


def parse(data: bytes, origin: str, limit: int = MAX_BYTES) -> object:
    """The one value a pickle describes: scalars, str, bytes, tuples, lists, `Mapping`, `Name` and `Node`.

    Args:
        data: the whole pickle. origin: which file and part it is, for messages. limit: how many bytes it may have.

    Raises:
        CheckpointError: not a pickle, truncated, too large, or an opcode that torch does not write.
    """
    if len(data) > limit:
        raise bad(f"{origin}: size of the pickle", len(data), f"at most {limit} bytes", _FORM)
    value, end = parse_first(data, origin)
    if end != len(data):
        raise bad(f"{origin}: pickle", f"{len(data) - end} bytes after its end", "a well-formed one", _FORM)
    return value


def parse_first(data: bytes, origin: str) -> tuple[object, int]:
    """The value of a pickle that other bytes may follow, and where it ends.

    Raises:
        CheckpointError: as `parse`.
    """
    if data[:1] != b"\x80":
        raise bad(f"{origin}: first bytes", data[:16].hex(" "), "80 and a protocol from 2 to 4", _FORM)
    machine = _Machine(data, origin)
    try:
        return machine.run(), machine.position
    except (IndexError, struct.error):
        raise bad(
            f"{origin}: pickle of {len(data)} bytes", "a truncated or damaged one", "a whole one", _FORM
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise bad(f"{origin}: pickle", str(error), "a well-formed one", _FORM) from None


class _Machine:
    """The pickle machine: a stack, the marks in it, and the memo (a dict, so that a huge index costs nothing)."""

    def __init__(self, data: bytes, origin: str) -> None:
        self.data = data
        self.origin = origin
        self.position = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        while True:
            code = self.data[self.position]
            self.position += 1
            if code == _STOP:
                return self.finish()
            action = _ACTIONS.get(code)
            if action is None:
                raise bad(f"{self.origin}: pickle opcode at byte {self.position - 1}", f"0x{code:02x}",
                          "the binary opcodes of protocols 2 to 4", _FORM)  # fmt: skip
            action(self)

    def finish(self) -> object:
        if len(self.stack) != 1 or self.marks:
            raise ValueError(f"{len(self.stack)} values where it stops")
        return self.stack[0]

    # Reading
    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise IndexError
        return self.data[start : self.position]

    def number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def line(self) -> str:
        end = self.data.index(b"\n", self.position)
        text = self.take(end - self.position).decode()
        self.position += 1
        return text

    # The stack
    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> object:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError
        return self.stack.pop()

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def pop_to_mark(self) -> list[object]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def build_tuple(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    # Objects
    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a global's module and name must be text")
        self.push(Name(module, name))

    def call(self) -> None:
        args, function = self.pop(), self.pop()
        if not isinstance(function, Name) or not isinstance(args, tuple):
            raise TypeError("a call of something that is not a global")
        self.push(Node(function, args))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, Node) or target.state is not None:
            raise TypeError("state for something that takes none")
        target.state = state

    def set_items(self, flat: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, Mapping | Node) or len(flat) % 2:
            raise TypeError("items for something that is no dict")
        target.pairs.extend(zip(flat[::2], flat[1::2], strict=True))

    def append(self, values: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Node):
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise TypeError("an element for something that is no list")

    def protocol(self) -> None:
        version = self.byte()
        if not 2 <= version <= 4:
            raise ValueError(f"protocol {version}")

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(value)


_STOP = ord(".")

_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    0x95: lambda m: (m.take(8), None)[1],  # FRAME: a hint for buffered reading
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("K"): lambda m: m.push(m.byte()),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    0x8A: lambda m: m.push(int.from_bytes(m.take(m.byte()), "little", signed=True)),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): lambda m: m.push(m.take(m.number("<I")).decode()),
    0x8C: lambda m: m.push(m.take(m.byte()).decode()),
    0x8D: lambda m: m.push(m.take(m.number("<Q")).decode()),
    ord("B"): lambda m: m.push(m.take(m.number("<I"))),
    ord("C"): lambda m: m.push(m.take(m.byte())),
    ord(")"): _constant(()),
    ord("("): _Machine.mark,
    ord("t"): lambda m: m.push(tuple(m.pop_to_mark())),
    0x85: lambda m: m.build_tuple(1),
    0x86: lambda m: m.build_tuple(2),
    0x87: lambda m: m.build_tuple(3),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_to_mark()),
    ord("}"): lambda m: m.push(Mapping()),
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    ord("c"): lambda m: m.push(Name(m.line(), m.line())),
    0x93: _Machine.stack_global,
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): lambda m: m.push(Node(PERSISTENT, (m.pop(),))),
    ord("q"): lambda m: m.memo.__setitem__(m.byte(), m.stack[-1]),
    ord("r"): lambda m: m.memo.__setitem__(m.number("<I"), m.stack[-1]),
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    ord("h"): lambda m: m.push(m.memo[m.byte()]),
    ord("j"): lambda m: m.push(m.memo[m.number("<I")]),
}
