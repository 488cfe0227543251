"""From a tensor on a rank to records: its raw bytes, and its place in the logical tensor that it is a piece of.

A tensor tells its place by its kind:

* a plain tensor is whole;
* a DTensor is the boxes that its placements, shape and mesh coordinate come to (`boxes`); where a library has cut it
  unevenly, each part begins where that of the rank before it ends, which is known once all ranks' parts are there;
* a ShardedTensor is the boxes of its local shards, as its metadata says;
* a parameter of FSDP1, or one that ZeRO-3 has taken apart, is an interval of the flattened original (`modules` reads
  the library's own tables);
* a subclass that wraps other tensors, such as the 8-bit moments of a low-bit optimizer, is what `__tensor_flatten__`
  names: each inner tensor is recorded under its own name. An inner tensor in the outer one's shape lies where the outer
  one lies. Another, such as a scale for each block, has no place in the logical tensor.

State of an optimizer that lies beside a parameter in the parameter's local shape has the parameter's place. What has no
place in a logical tensor is recorded as the rank's own, under `rank{r}.`, so that it is compared between runs and never
joined with another rank's.

Reading copies local bytes. It starts no collective, and goes through no operator of a subclass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from shardproof.layout import Box
from shardproof.observe.record import LIVE, NUMPY_NAME, Record
from shardproof.trainer.observed import in_turn
from shardproof.trainer.rank.boxes import Sharding, cuts_of

DTYPE_NAME: dict[torch.dtype, str] = {
    torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64", torch.bool: "bool",
    torch.float8_e4m3fn: "fp8e4m3", torch.float8_e5m2: "fp8e5m2",
}  # fmt: skip
"""Other dtypes are recorded as their bytes, with one more dim, the item size, where it is more than one."""

_NUMPY = {numpy: name for name, numpy in NUMPY_NAME.items() if name not in ("utf8", "bf16")}


class Unreadable(Exception):  # noqa: N818 (it is a reason that the reader is told, and no error of a program)
    """Why a tensor cannot be recorded."""


class At(NamedTuple):
    """Of which operation and which rank a record is; `folders` as `own_folders` has them."""

    op: int
    rank: int
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """A part of a local tensor and where it lies in a logical one.

    * names: the parameter's fully qualified names; several where it is tied, of which the first is the canonical one.
    * shape: of the logical tensor. box: what the part is of it; of one dim where `flat`.
    * window: which part of the local tensor it is.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    box: Box
    window: Box
    flat: bool = False


@dataclass(frozen=True)
class Held:
    """What a rank holds of one tensor, or of several that one flat parameter joins.

    * local: the plain tensor, or the wrapping subclass, to read from. cuts: its parts.
    * names: of all cuts, each once.
    * own: it is this rank's alone, whatever its box says.
    """

    local: torch.Tensor
    cuts: tuple[Cut, ...]
    own: bool = False

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names of every parameter: one tuple of names per parameter."""
        return tuple(dict.fromkeys(cut.names for cut in self.cuts))

    @property
    def whole(self) -> bool:
        """Whether this rank holds every element of every parameter."""
        return not self.own and all(cut.box.volume == prod(cut.shape) for cut in self.cuts)

    def renamed(self, name: str = "", prefix: str = "") -> Held:
        """The same under another name for each cut: under `name`, or its first one behind `prefix`."""
        cuts = tuple(replace(cut, names=(name or f"{prefix}{cut.names[0]}",)) for cut in self.cuts)
        return replace(self, cuts=cuts)

    def nothing_of(self, names: tuple[str, ...]) -> bool:
        """Whether this rank holds no element of a parameter that has some. What an optimizer counts for it there moves
        nothing, and libraries let it differ: torch's `get_state_dict` makes it with a step that other ranks' state,
        which exists already, does not take."""
        own = [cut for cut in self.cuts if cut.names == names]
        return not any(cut.box.volume for cut in own) and any(prod(cut.shape) for cut in own)


def whole_tensor(tensor: torch.Tensor, names: tuple[str, ...], *, own: bool = False) -> Held:
    """A tensor as the whole of a logical one; own: as one of this rank alone."""
    box = Box((0,) * tensor.dim(), tuple(tensor.shape))
    return Held(tensor, (Cut(names, tuple(tensor.shape), box, box),), own)


def held(tensor: torch.Tensor, names: tuple[str, ...], *, own: bool = False, declared: bool = False) -> list[Held]:
    """A tensor by itself: one entry for each local tensor behind it. own: a plain one is this rank's alone.
    declared: so is what it has of a DTensor, as of experts that some ranks share out and others have others of.

    Raises:
        Unreadable: it is a sum over ranks that nobody has added up yet, or an uninitialised parameter.
    """
    if isinstance(tensor, DTensor):
        return [whole_tensor(tensor._local_tensor, names, own=True) if declared else _of_dtensor(tensor, names)]
    if isinstance(tensor, ShardedTensor):
        return list(_of_sharded_tensor(tensor, names))
    if isinstance(tensor, UninitializedTensorMixin):
        raise Unreadable("it is a lazy parameter, which has no shape before the first forward")
    return [whole_tensor(tensor, names, own=own)]


def _of_dtensor(tensor: DTensor, names: tuple[str, ...]) -> Held:
    """A DTensor's local tensor with its boxes. Where the local tensor has not the shape that the placements come to, as
    of `DTensor.from_local` with uneven parts, its place is known once the parts of all ranks are (`uneven`). One that
    is cut by several mesh dims is recorded as the rank's own then."""
    mesh, shape, local = tensor.device_mesh, tuple(tensor.shape), tensor._local_tensor
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return _nothing(local, names, shape)
    shardings = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise Unreadable(f"mesh dim {mesh_dim} is {placement}: each rank has a summand, and nobody the sum")
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int):
            raise Unreadable(f"placement {placement} of mesh dim {mesh_dim} is unknown")
        factor = int(getattr(placement, "split_factor", 1))
        shardings.append(Sharding(dim % len(shape), mesh.size(mesh_dim), coordinate[mesh_dim], factor))
    cuts = tuple(Cut(names, shape, box, window) for box, window in cuts_of(shape, shardings))
    if sum(cut.box.volume for cut in cuts) != local.numel():
        box = uneven(cuts[0].box, shardings, tuple(local.shape), shape) if mesh.size() == shardings[0].parts else None
        if box is None:
            return whole_tensor(local, names, own=True)
        cuts = (Cut(names, shape, box, Box((0,) * local.dim(), box.size)),)
    return Held(local, cuts)


def uneven(rule: Box, shardings: Sequence[Sharding], local: tuple[int, ...], shape: tuple[int, ...]) -> Box | None:
    """The box of a local tensor that is longer or shorter in the dim of its one sharding than it should be: with the
    order of the parts in the place of the start, which `observed.placed` puts there. None where it is no such part.

    Args:
        rule: the box that the placements come to. shape: of the logical tensor.
    """
    dims = {sharding.dim for sharding in shardings}
    if len(shardings) != 1 or len(local) != len(shape):
        return None
    if any(one != other for dim, (one, other) in enumerate(zip(local, shape, strict=True)) if dim not in dims):
        return None
    return Box(tuple(in_turn(start) if dim in dims else 0 for dim, start in enumerate(rule.start)), local)


def _of_sharded_tensor(tensor: ShardedTensor, names: tuple[str, ...]) -> Iterator[Held]:
    shape = tuple(tensor.size())
    for shard in tensor.local_shards():
        size = tuple(shard.metadata.shard_sizes)
        cut = Cut(names, shape, Box(tuple(shard.metadata.shard_offsets), size), Box((0,) * len(size), size))
        yield Held(shard.tensor, (cut,))
    if not tensor.local_shards():
        yield _nothing(torch.empty(0, dtype=tensor.dtype), names, shape)


def _nothing(local: torch.Tensor, names: tuple[str, ...], shape: tuple[int, ...]) -> Held:
    """What a rank holds that has no part in a tensor; local: of no elements."""
    return Held(local.reshape(-1), (Cut(names, shape, Box((prod(shape),), (0,)), Box((0,), (0,)), flat=True),))


def records_beside(at: At, role: str, tensor: torch.Tensor, parameter: Held, suffix: str = "") -> Iterator[Record]:
    """A tensor that an optimizer keeps beside a parameter, under the parameter's name and `suffix`.

    Raises:
        Unreadable: its bytes cannot be had.
    """
    if isinstance(tensor, (DTensor, ShardedTensor)):
        for names in parameter.names:
            for one in held(tensor, names[:1], declared=parameter.own):
                yield from records_of(at, role, one, suffix=suffix)
        return
    first = tuple(Cut(cut.names[:1], cut.shape, cut.box, cut.window, cut.flat) for cut in parameter.cuts)
    yield from records_of(at, role, Held(parameter.local, first, parameter.own), tensor, suffix)


def records_of(
    at: At, role: str, place: Held, tensor: torch.Tensor | None = None, suffix: str = ""
) -> Iterator[Record]:
    """The records of a local tensor, under every name: that of `place`, or `tensor`, which lies beside it.

    Raises:
        Unreadable: its bytes cannot be had.
    """
    for inner, part in parts(place.local if tensor is None else tensor):
        if tuple(part.shape) == tuple(place.local.shape):
            for cut in place.cuts:
                yield from _records_of_cut(at, role, cut, part, suffix + inner, own=place.own)
            continue
        for names in place.names:
            (alone,) = whole_tensor(part, names).cuts
            yield from _records_of_cut(at, role, alone, part, suffix + inner, own=not place.whole)


def _records_of_cut(at: At, role: str, cut: Cut, tensor: torch.Tensor, suffix: str, *, own: bool) -> Iterator[Record]:
    if tensor.is_meta:
        raise Unreadable("it is on the device meta, which has shapes and no data")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise Unreadable(f"its layout {tensor.layout} or dtype {tensor.dtype} is not read")
    window = tuple(slice(start, start + n) for start, n in zip(*cut.window, strict=True))
    dtype, each, data = raw(tensor.detach()[window])
    last = () if each == 1 else (each,)
    if own:  # in the shape in which it lies here
        cut = Cut(cut.names, cut.window.size, Box((0,) * len(cut.window.size), cut.window.size), cut.window)
    start, size = cut.box
    if cut.flat:
        start, size = (start[0] * each,), (size[0] * each,)
    else:
        start, size = (*start, *(0 for _ in last)), (*size, *last)
    for name in cut.names:
        fqn = owned(at.rank, name + suffix) if own else name + suffix
        yield Record(at.op, at.rank, LIVE, role, fqn, dtype, (*cut.shape, *last), start, size, data, cut.flat)


def owned(rank: int, name: str) -> str:
    """The name under which a rank records a value that other ranks have in their own way."""
    return f"rank{rank}.{name}"


def parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors behind a tensor, each with what its name has behind the tensor's."""
    if isinstance(tensor, DTensor):  # a subclass may wrap one; its box is not that of what wraps it
        yield from parts(tensor._local_tensor)
    elif wraps(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            for inner, part in parts(getattr(tensor, name)):
                yield f".{name}{inner}", part
    else:
        yield "", tensor


def wraps(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass that keeps its data in inner tensors."""
    return type(tensor) is not torch.Tensor and hasattr(type(tensor), "__tensor_flatten__")


def raw(tensor: torch.Tensor) -> tuple[str, int, bytes]:
    """A plain tensor's dtype name, how many items of it make an element, and its bytes, row-major.

    Raises:
        Unreadable: it has no storage to read.
    """
    if (
        tensor.numel()
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.untyped_storage().nbytes()
    ):
        raise Unreadable("its memory has been given back, as FSDP does with a gathered parameter after its use")
    try:
        copy = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).clone()
        data = copy.view(torch.uint8).numpy().tobytes() if copy.numel() else b""
    except RuntimeError as error:
        raise Unreadable(f"reading it raises {type(error).__name__}: {str(error).splitlines()[0]}") from error
    name = DTYPE_NAME.get(tensor.dtype)
    if name is not None:
        return name, 1, data
    if tensor.dtype in (torch.complex64, torch.complex128):
        return ("fp32" if tensor.dtype == torch.complex64 else "fp64"), 2, data
    return "uint8", tensor.element_size(), data


def array_records(at: At, role: str, fqn: str, array: np.ndarray[Any, Any]) -> Iterator[Record]:
    """The record of an array of numpy's, whole.

    Raises:
        Unreadable: its elements are objects.
    """
    if array.dtype.hasobject:
        raise Unreadable("it is an array of objects")
    name, shape = _NUMPY.get(array.dtype.name), tuple(array.shape)
    data = np.ascontiguousarray(array).tobytes()
    if name is None:
        name, shape = "uint8", (*shape, array.dtype.itemsize)
    yield Record(at.op, at.rank, LIVE, role, fqn, name, shape, (0,) * len(shape), shape, data)


def described(tensors: Sequence[torch.Tensor]) -> str:
    """The kinds of some tensors in words, such as `DTensor`; empty where all are plain."""
    plain = ("Tensor", "Parameter", "Buffer")
    return ", ".join(sorted({type(t).__name__ for t in tensors if type(t).__name__ not in plain}))
