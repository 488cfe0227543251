"""What a torch.save pickle holds, as plain values: scalars, dicts, lists, and tensors that say where their bytes lie.

A tensor is `torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)` and a storage the
persistent id `("storage", type, key, device, numel)`, as torch.serialization and Tensor.__reduce_ex__ write them;
`_rebuild_tensor_v3` has the dtype beside it, and a storage of bytes.
Every other name but dicts, sizes, dtypes and plain arrays of numpy (`shardproof.readers.arrays`) is refused, unless a
system knows it (`shardproof.readers.vocabulary`). A dict's key that is a tuple of dtypes becomes text.
"""

from __future__ import annotations

from collections.abc import Mapping as Table
from dataclasses import dataclass
from math import prod

from shardproof.observe.record import ITEMSIZE
from shardproof.observe.settings import ClassName
from shardproof.readers.arrays import array_of
from shardproof.readers.errors import CheckpointError, bad, unfamiliar
from shardproof.readers.symbolic import MAX_BYTES, PERSISTENT, Mapping, Name, Node
from shardproof.readers.vocabulary import known

STORAGE_DTYPE = {
    "FloatStorage": "fp32", "DoubleStorage": "fp64", "HalfStorage": "fp16", "BFloat16Storage": "bf16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip

TORCH_DTYPE = {
    "float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16",
    "int64": "int64", "int32": "int32", "int16": "int16", "uint8": "uint8", "bool": "bool", "uint32": "uint32",
}  # fmt: skip

MAX_DEPTH = 64
MAX_VALUES = 1_000_000
MAX_DIMS = 32


@dataclass(frozen=True)
class Bounds:
    """What a reader takes.

    pickle_bytes, values: at most so many bytes in a pickle, and so many values. storages: torch's class of a storage →
    the dtype of its elements. dtypes: torch's name of a dtype → ours.
    """

    pickle_bytes: int
    values: int
    storages: Table[str, str]
    dtypes: Table[str, str]


JUDGED = Bounds(MAX_BYTES, MAX_VALUES, STORAGE_DTYPE, TORCH_DTYPE)
"""What is taken of the checkpoint that a scenario wrote, which is small."""

TENSOR = Name("torch._utils", "_rebuild_tensor_v2")
TENSOR_V3 = Name("torch._utils", "_rebuild_tensor_v3")
"""How torch saves a tensor of a dtype that never had a storage class of its own, such as uint32 and fp8."""
UNTYPED = Name("torch.storage", "UntypedStorage")
PARAMETER = Name("torch._utils", "_rebuild_parameter")
WITH_STATE = Name("torch._utils", "_rebuild_parameter_with_state")  # attributes that somebody gave it, not looked at
WITH_ATTRIBUTES = Name("torch._tensor", "_rebuild_from_type_v2")
TENSOR_TYPES = (Name("torch", "Tensor"), Name("torch.nn.parameter", "Parameter"))
SIZE = Name("torch", "Size")
DICTS = (Name("collections", "OrderedDict"), Name("collections", "Counter"))
SETS = tuple(Name(module, name) for module in ("__builtin__", "builtins") for name in ("set", "frozenset"))
"""They have no order, and a pickle lists their members in the order of the writer's hashes: a run's own, another's
not."""

FORM = "torch.save({'model': model.state_dict()}, path)"


@dataclass(frozen=True, slots=True)
class Storage:
    """A flat run of elements: its dtype, its key in the archive (entry `data/{key}`), its element count."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a view of a storage: offset and stride count elements. flags: `neg` and `conj`, torch's bits that
    make it the negative, or the complex conjugate, of what is stored."""

    storage: Storage
    offset_elements: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flags: frozenset[str] = frozenset()

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor of fp8e4m3 with one scale: its bytes, the inverse of its scale (fp32), the dtype that it is read as."""

    data: Tensor
    scale_inv: Tensor
    dtype: str


Scalar = str | bytes | int | float | bool | None
Value = Scalar | Tensor | Quantised | dict[Scalar, "Value"] | list["Value"]


def decode(node: object, origin: str) -> Value:
    """The plain value of a parsed pickle; tuples and sizes become lists, dtypes text.

    Args:
        node: what `symbolic.parse` gave. origin: which file and part, for messages.

    Raises:
        CheckpointError: it names anything but plain data and tensors, or is too deep or too large.
    """
    return Decoder(origin, JUDGED).decoded(node)


class Decoder:
    """Makes plain values out of a parsed pickle. What it does not know it refuses (`foreign`, which a reader for
    another purpose may replace)."""

    def __init__(self, origin: str, bounds: Bounds) -> None:
        self.origin = origin
        self.bounds = bounds
        self.visited = 0
        self.known = known()

    def decoded(self, node: object) -> Value:
        """The plain value of the outermost node."""
        return self.value(node, MAX_DEPTH)

    def value(self, node: object, depth: int) -> Value:
        """The plain value of a node, which may have `depth` further levels."""
        self.visited += 1
        if depth <= 0 or self.visited > self.bounds.values:
            allowed = f"at most {MAX_DEPTH} levels and {self.bounds.values} values"
            raise bad(f"{self.origin}: saved structure", "a deeper or larger one", allowed, FORM)
        match node:
            case None | bool() | int() | float() | str() | bytes():
                return node
            case list() | tuple():
                return [self.value(element, depth - 1) for element in node]
            case Mapping(pairs=pairs):
                return self.mapping(pairs, depth)
            case Node(function=function, args=args, pairs=pairs, items=[]) if function in DICTS:
                initial = [pair for arg in args if isinstance(arg, Mapping) for pair in arg.pairs]
                return self.mapping(initial + pairs, depth)
            case Node(function=function, args=(list(members),), state=None, pairs=[], items=[]) if function in SETS:
                return sorted([self.value(member, depth - 1) for member in members], key=repr)
            case Node(function=function, args=args, state=Mapping() | None, pairs=[], items=[]) if (
                function in self.known.objects
            ):
                own = node.state.pairs if isinstance(node.state, Mapping) else []
                return self.mapping([("class", str(function)), ("args", list(args)), *own], depth)
            case Node(function=function, args=args, state=None, pairs=[], items=[]):
                return self.instance(function, args, depth)
            case Name(module="torch", name=name) if name in self.bounds.dtypes:
                return f"torch.{name}"
            case Name() if node in self.known.words:
                return ClassName(node)
        return self.foreign(node, depth)

    def foreign(self, node: object, depth: int) -> Value:
        """What stands for a node that is no plain data and no tensor: here only for an array of numpy, a dict of its
        dtype, shape and bytes.

        Raises:
            CheckpointError: it is anything else.
        """
        array = array_of(node)
        if array is None:
            raise self.refused(node)
        dtype, shape, data = array
        return {"dtype": dtype, "shape": list(shape), "data": data}

    def mapping(self, pairs: list[tuple[object, object]], depth: int) -> dict[Scalar, Value]:
        result: dict[Scalar, Value] = {}
        for named, value in pairs:
            key = self.key(self.dtypes(named))
            if key in result:
                raise bad(f"{self.origin}: key", repr(key), "every key once", FORM)
            result[key] = self.value(value, depth - 1)
        return result

    def key(self, key: object) -> Scalar:
        """A dict's key.

        Raises:
            CheckpointError: it is neither text nor a number.
        """
        if not isinstance(key, str | bytes | int | float | None):
            raise bad(f"{self.origin}: type of a key", type(key).__name__, "text or a number", FORM)
        return key

    def dtypes(self, key: object) -> object:
        """A dict's key that is made of torch dtypes, which have no plain value, as Python prints it; any other key as
        it is.

        Megatron's buffers are stored under such keys: `(torch.bfloat16, torch.float32)`.
        """
        names = [str(part) for part in key if isinstance(part, Name)] if isinstance(key, tuple) else []
        known = names and all(name.removeprefix("torch.") in TORCH_DTYPE for name in names)
        return f"({', '.join(names)})" if known and isinstance(key, tuple) and len(names) == len(key) else key

    def instance(self, function: Name, args: tuple[object, ...], depth: int) -> Value:
        if depth <= 0:
            raise bad(f"{self.origin}: saved structure", "a deeper one", f"at most {MAX_DEPTH} levels", FORM)
        if function == SIZE and len(args) == 1:
            return self.value(args[0], depth - 1)
        if function in (PARAMETER, WITH_STATE) and args:
            return self.value(args[0], depth - 1)
        match args:  # a tensor with attributes that somebody gave it, which are not looked at
            case (Name() as rebuild, kind, tuple(inner), _) if function == WITH_ATTRIBUTES and kind in TENSOR_TYPES:
                return self.instance(rebuild, inner, depth - 1)
        if function == TENSOR:
            return self.tensor(args)
        if function == TENSOR_V3:
            return self.untyped(args)
        if function in self.known.tensors:
            made = self.known.tensors[function](args, lambda part: self.value(part, depth - 1))
            if isinstance(made, Tensor | Quantised):
                return made
            raise bad(f"{self.origin}: tensor of {function}", "another one", "as its library writes it", FORM)
        return self.foreign(Node(function, args), depth)

    def tensor(self, args: tuple[object, ...]) -> Tensor:
        match args:
            case (Node(function=function, args=((*persistent,),)), int(offset), tuple(size), tuple(stride), *_):
                shape, strides = integers(size), integers(stride)
                flags = self.flags(args[6] if len(args) > 6 else None)
                sound = function == PERSISTENT and offset >= 0
                if sound and shape is not None and strides is not None and flags is not None:
                    return Tensor(self.storage(persistent), offset, shape, strides, flags)
        raise bad(f"{self.origin}: tensor", "damaged", "storage, offset, size and stride", FORM)

    def flags(self, node: object) -> frozenset[str] | None:
        """The bits of a tensor that change what its storage says; None for damaged ones.

        Raises:
            CheckpointError: there are some, which no scenario writes; a reader for another purpose may take them.
        """
        if isinstance(node, Mapping) and node.pairs:
            given = ", ".join(str(name) for name, _ in node.pairs if isinstance(name, str))
            raise unfamiliar(
                f"{self.origin}: flags of a tensor", given, "none: tensor.resolve_conj().resolve_neg()", FORM
            )
        return frozenset() if node is None or isinstance(node, Mapping) else None

    def untyped(self, args: tuple[object, ...]) -> Tensor:
        """A tensor whose dtype stands beside its storage of bytes.

        Raises:
            CheckpointError: it is damaged, or of a dtype that is not taken.
        """
        match args:
            case (
                Node(function=function, args=((*persistent,),)),
                int(offset),
                size,
                stride,
                _,
                _,
                Name() as kind,
                *rest,
            ):
                shape, strides = integers(size), integers(stride)
                flags = self.flags(rest[0] if rest else None)
                dtype = self.bounds.dtypes.get(kind.name) if kind.module == "torch" else None
                if dtype is None:
                    raise unfamiliar(f"{self.origin}: dtype of a tensor", str(kind), self.bounds.dtypes, FORM)
                match persistent:
                    case ["storage", Name() as storage, str(key), str(), int(count), *_] if (
                        function == PERSISTENT and storage == UNTYPED and count >= 0 and offset >= 0
                    ):
                        if shape is not None and strides is not None and flags is not None:
                            stored = Storage(dtype, key, count // self.itemsize(dtype))
                            return Tensor(stored, offset, shape, strides, flags)
        raise bad(f"{self.origin}: tensor", "damaged", "storage, offset, size, stride and dtype", FORM)

    def whole(self, persistent: list[object]) -> Tensor:
        """All elements of a storage that is in no tensor of a kind that is known, such as that of a quantised one."""
        match persistent:
            case [_, kind, str(key), str(), int(count), *_] if kind == UNTYPED and count >= 0:
                storage = Storage("uint8", key, count)
            case _:
                storage = self.storage(persistent)
        return Tensor(storage, 0, (storage.numel,), (1,))

    def itemsize(self, dtype: str) -> int:
        """Bytes of an element."""
        return ITEMSIZE[dtype]

    def storage(self, persistent: list[object]) -> Storage:
        match persistent:
            case ["storage", Name() as kind, str(key), str(), int(numel), *_] if numel >= 0:
                dtype = self.bounds.storages.get(kind.name) if kind.module == "torch" else None
                if dtype is None:
                    raise unfamiliar(
                        f"{self.origin}: storage type", str(kind), self.bounds.storages, "torch.FloatStorage"
                    )
                return Storage(dtype, key, numel)
        raise bad(f"{self.origin}: storage", "damaged", "('storage', type, key, device, numel)", FORM)

    def refused(self, node: object) -> CheckpointError:
        name = node.function if isinstance(node, Node) else node
        given = str(name) if isinstance(name, Name) else type(name).__name__
        allowed = (TENSOR, PARAMETER, WITH_STATE, WITH_ATTRIBUTES, SIZE, *DICTS, *SETS, "torch dtypes and storages")
        return unfamiliar(f"{self.origin}: name in the pickle (nothing was executed)", given, allowed, FORM)


def integers(node: object) -> tuple[int, ...] | None:
    """A shape, offset or stride: at most `MAX_DIMS` integers from 0 to 2^63 - 1, also as `torch.Size`; else None."""
    if isinstance(node, Node) and node.function == SIZE and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, tuple) or len(node) > MAX_DIMS:
        return None
    if not all(type(entry) is int and 0 <= entry < 1 << 63 for entry in node):
        return None
    return node
