"""Where the reference keeps every element: flat buffers, buckets, padding and rank-owned shards.

Two shardings, one picture. On every tensor-parallel coordinate the parameters of one storage dtype form a flat
buffer of buckets; each bucket is padded until all `dp_shard` ranks own equally much of it, in rank order.

* `zero1`: a bucket is a unit, parameters lie in reverse order, padding comes at the bucket's end. A rank's share
  begins and ends anywhere in a parameter (Megatron's `_ParamAndGradBuffer`).
* `fully_shard`: a bucket is one parameter, and a rank's share is a whole number of rows: torch.chunk along dim 0
  of the tensor-parallel shard, so trailing ranks may own padding only (FSDP2's `FSDPParam`).

Elements are named by their position in the catalogue: the model's logical tensors, flattened and concatenated.
The number after the last one stands for padding. This module shares no code with `shardproof.layout`.

Nothing here depends on values, so catalogues and layouts are shared by all scenarios that have equal ones:
`catalogue_of` and `lay_out` remember them, and a layout remembers what is read off it. Their arrays are read-only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from math import lcm, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardproof.models import ModelSpec, NamedParam
from shardproof.probe import element_keys_of
from shardproof.scenario import Mesh

Index = npt.NDArray[np.int64]
Shape = tuple[int, ...]

LAYOUTS = 8192
"""How many layouts a process remembers. Each of the two workers of the reference's nightly meets some 2,600, again and
again in no order; with too little room it works out most of them anew, which takes longer than what is done with
them."""


class Catalogue:
    """The logical elements of a model, numbered: parameter by parameter in module order, row-major within one.

    keys: the element keys of every name a parameter has, tied aliases included. names: these names, its own first.
    uses: the names under which each parameter takes part in a forward.
    """

    def __init__(self, model: ModelSpec, seed: int) -> None:
        self.model, self.seed = model, seed
        self.params = model.unique_params
        self.keys = element_keys_of({p.fqn: p.spec.numel for p in model.params}, seed)
        self.uses = {p.fqn: model.uses(p.fqn) for p in self.params}
        self.names = {p.fqn: [p.fqn, *(a.fqn for a in model.params if a.spec.tied_to == p.fqn)] for p in self.params}
        self.known = frozenset(p.fqn for p in model.params)
        self.used = frozenset(use for uses in self.uses.values() for use in uses)
        self.offset: dict[str, int] = {}
        total = 0
        for param in self.params:
            self.offset[param.fqn] = total
            total += param.spec.numel
        self.padding = total
        self._starts = np.fromiter(self.offset.values(), np.int64, len(self.offset))

        self._spans = {p.fqn: slice(at := self.offset[p.fqn], at + p.spec.numel) for p in self.params}

    def span(self, param: NamedParam) -> slice:
        """Where the parameter's elements lie in an array over the catalogue."""
        return self._spans[param.fqn]

    def within(self, param: NamedParam, start: Shape, size: Shape) -> Index:
        """The numbers of the elements in a box of a parameter, row-major, shape (product(size),)."""
        offset, shape = self.offset[param.fqn], param.spec.shape
        if size == shape:
            return np.arange(offset, offset + param.spec.numel)
        window = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        return np.arange(offset, offset + param.spec.numel).reshape(shape)[window].ravel()

    def owners(self, elements: Index) -> Index:
        """The number of the parameter each element belongs to; `len(params)` for padding."""
        owner = np.searchsorted(self._starts, elements, side="right") - 1
        owner[elements == self.padding] = len(self.params)
        return owner

    def belongs_to(self, names: Collection[str], elements: Index) -> npt.NDArray[np.bool_]:
        """Which numbers are elements of the named parameters; padding is not."""
        chosen = np.array([p.fqn in names for p in self.params] + [False])
        return chosen[self.owners(elements)]


@lru_cache(maxsize=256)
def catalogue_of(model: ModelSpec, seed: int) -> Catalogue:
    """The catalogue of a model; the same one for an equal model and seed."""
    return Catalogue(model, seed)


class Slot(NamedTuple):
    """A parameter's place in a flat buffer. start, size: its tensor-parallel shard, a box of the logical tensor."""

    param: NamedParam
    start: Shape
    size: Shape
    offset: int
    numel: int


class Bucket(NamedTuple):
    """A run of a flat buffer. start, numel: without padding. share: elements each rank owns, padding included.

    at: where the bucket's share begins in a rank's own shard."""

    slots: tuple[Slot, ...]
    start: int
    numel: int
    share: int
    at: int


@dataclass(frozen=True, eq=False)
class Fragment:
    """What one rank owns of one parameter: `numel` elements from `start` of the flattened tensor-parallel shard,
    kept from position `at` of the rank's own shard."""

    slot: Slot
    shard: int
    at: int
    start: int
    numel: int


class Piece(NamedTuple):
    """A box of the logical tensor (or, with `flat`, a run of it flattened), `skip` elements into a fragment."""

    flat: bool
    start: Shape
    size: Shape
    skip: int
    numel: int


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """A flat buffer, of parameters of one storage dtype, whichever that is, on one tensor-parallel coordinate.

    element: catalogue number of each buffer position, shape (n,). order: buffer position of each position of
    each rank's shard, shape (dp_shard, m). shard_element: `element[order]`. flat_records: whether a rank's
    share is a run of elements (`zero1`) or whole rows.
    """

    catalogue: Catalogue
    mesh: Mesh
    tp_index: int
    buckets: tuple[Bucket, ...]
    element: Index
    order: Index
    shard_element: Index
    flat_records: bool

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """Every fragment, parameter by parameter in buffer order, then by owning rank: those that have elements, and of
        a parameter that has none the first rank's."""
        return tuple(self._fragments())

    @cached_property
    def by_expert(self) -> tuple[tuple[bool, tuple[str, ...]], ...]:
        """The parameter names in two groups: dense parameters (False) and experts (True). An empty group is left
        out."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for slot in self.slots:
            names[slot.param.spec.ep_dim is not None].append(slot.param.fqn)
        return tuple((experts, tuple(found)) for experts, found in names.items() if found)

    @cached_property
    def own_row(self) -> Index:
        """The index of each rank, (dp_shard, 1): beside `order` it picks from (dp_shard, n) what each rank owns."""
        return np.arange(self.mesh.dp_shard)[:, None]

    @cached_property
    def gathering(self) -> Index:
        """The inverse of `order`: for every buffer position, the position in the concatenation of all ranks' shards."""
        inverse = np.empty(self.element.size, np.int64)
        inverse[self.order.ravel()] = np.arange(self.order.size)
        return inverse

    def positions(self, names: frozenset[str]) -> Index | None:
        """The positions of the named parameters in the concatenation of all ranks' shards (S·m). None if the names
        cover every parameter of the buffer."""
        if names not in self._positions:
            every = all(slot.param.fqn in names for slot in self.slots)
            chosen = self.catalogue.belongs_to(names, self.shard_element.ravel())
            self._positions[names] = None if every else np.flatnonzero(chosen)
        return self._positions[names]

    @cached_property
    def _positions(self) -> dict[frozenset[str], Index | None]:
        return {}

    def _fragments(self) -> Iterator[Fragment]:
        for bucket in self.buckets:
            for slot in bucket.slots:
                low, high = slot.offset - bucket.start, slot.offset - bucket.start + slot.numel
                if not slot.param.spec.numel:
                    yield Fragment(slot, 0, bucket.at, 0, 0)
                for shard in range(low // bucket.share, -(-high // bucket.share)) if high > low else ():
                    first, last = max(low, shard * bucket.share), min(high, (shard + 1) * bucket.share)
                    at = bucket.at + first - shard * bucket.share
                    yield Fragment(slot, shard, at, first - low, last - first)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """`(start, length)` of one chunk in torch.chunk order: ceiling-sized, the last ones short or empty."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def tensor_parallel_box(param: NamedParam, tp: int, index: int) -> tuple[Shape, Shape]:
    """Start and size of the shard of `param` on tensor-parallel coordinate `index`: a box of the logical tensor."""
    shape, dim = param.spec.shape, param.spec.tp_dim
    if tp == 1 or dim is None:
        return (0,) * len(shape), shape
    start, length = chunk(shape[dim], tp, index)
    return (0,) * dim + (start,) + (0,) * (len(shape) - dim - 1), (*shape[:dim], length, *shape[dim + 1 :])


@lru_cache(maxsize=LAYOUTS)
def lay_out(catalogue: Catalogue, names: tuple[str, ...], mesh: Mesh, tp_index: int, zero1: bool) -> FlatLayout:
    """The flat buffer of the named parameters, which have one storage dtype, on one tensor-parallel coordinate."""
    params = [p for p in catalogue.params if p.fqn in names]
    buckets: list[Bucket] = []
    elements: list[Index] = []
    start = at = 0
    for members in _units_in_reverse(params) if zero1 else [[p] for p in params]:
        slots, offset = [], start
        for param in members:
            slot = Slot(param, *(box := tensor_parallel_box(param, mesh.tp, tp_index)), offset, prod(box[1]))
            slots.append(slot)
            elements.append(catalogue.within(param, slot.start, slot.size))
            offset += slot.numel
        share = _even_share(offset - start, mesh.dp_shard) if zero1 else _row_share(slots[0].size, mesh.dp_shard)
        buckets.append(Bucket(tuple(slots), start, offset - start, share, at))
        elements.append(np.full(share * mesh.dp_shard - (offset - start), catalogue.padding))
        start, at = start + share * mesh.dp_shard, at + share
    order = np.concatenate(
        [np.arange(b.start, b.start + b.share * mesh.dp_shard).reshape(mesh.dp_shard, b.share) for b in buckets], axis=1
    )
    element = np.concatenate(elements)
    shard_element = element[order]
    for array in (element, order, shard_element):
        array.setflags(write=False)
    return FlatLayout(catalogue, mesh, tp_index, tuple(buckets), element, order, shard_element, zero1)


def _units_in_reverse(params: Sequence[NamedParam]) -> Iterator[list[NamedParam]]:
    """Units last to first, parameters of each last to first; modules that are no unit share the root's bucket."""
    last_first = params[::-1]
    ordered = [p for p in last_first if p.module.unit] + [p for p in last_first if not p.module.unit]
    for _, members in groupby(ordered, key=lambda p: p.module.path if p.module.unit else ""):
        yield list(members)


def _even_share(numel: int, ranks: int) -> int:
    """Elements of a bucket each rank owns once it is padded to a multiple of lcm(ranks, 2)."""
    multiple = lcm(ranks, 2)
    return -(-numel // multiple) * multiple // ranks


def _row_share(size: Shape, ranks: int) -> int:
    """Elements of a parameter each rank owns once dim 0 is padded to full chunks; a parameter without dims is one
    row."""
    return -(-(size[0] if size else 1) // ranks) * prod(size[1:])


@lru_cache(maxsize=16 * LAYOUTS)
def pieces(fragment: Fragment, as_runs: bool) -> list[Piece]:
    """A fragment as boxes of the logical tensor, in order; with `as_runs` as one flat run where that is possible."""
    slot = fragment.slot
    shape, start, end = slot.param.spec.shape, fragment.start, fragment.start + fragment.numel
    if as_runs and slot.size[1:] == shape[1:]:
        begin = (slot.start[0] * prod(shape[1:]) if shape else 0) + start
        return [Piece(True, (begin,), (fragment.numel,), 0, fragment.numel)]
    found, skip = [], 0
    for corner, size in _boxes(slot.size, start, end):
        start_in_tensor = tuple(a + b for a, b in zip(corner, slot.start, strict=True))
        found.append(Piece(False, start_in_tensor, size, skip, prod(size)))
        skip += prod(size)
    return found


def _boxes(size: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Boxes, in row-major order, that make up elements `start` to `end` of a flattened tensor; the tensor itself where
    it has no element, or no dim."""
    if not size or not prod(size):
        yield (0,) * len(size), size
        return
    if len(size) == 1:
        yield (start,), (end - start,)
        return
    row = prod(size[1:])
    first_whole, end_whole = -(-start // row), end // row
    if first_whole > end_whole:
        yield from _in_row(size, end_whole, start, end)
        return
    if start < first_whole * row:
        yield from _in_row(size, first_whole - 1, start, first_whole * row)
    if end_whole > first_whole:
        yield (first_whole,) + (0,) * (len(size) - 1), (end_whole - first_whole, *size[1:])
    if end > end_whole * row:
        yield from _in_row(size, end_whole, end_whole * row, end)


def _in_row(size: Shape, index: int, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    row = prod(size[1:])
    for corner, inner in _boxes(size[1:], start - index * row, end - index * row):
        yield (index, *corner), (1, *inner)


@lru_cache(maxsize=4 * LAYOUTS)
def runs_of(catalogue: Catalogue, fragment: Fragment) -> list[tuple[int, int, int]]:
    """A fragment as runs of the flattened logical tensor: `(start in it, from, to within the fragment)`."""
    slot = fragment.slot
    within = catalogue.within(slot.param, slot.start, slot.size) - catalogue.offset[slot.param.fqn]
    elements = within[fragment.start : fragment.start + fragment.numel]
    return [(int(elements[begin]), begin, end) for begin, end in runs(elements)] or [(0, 0, 0)]


def runs(elements: Index) -> list[tuple[int, int]]:
    """`(start, stop)` positions of the maximal runs of consecutive numbers."""
    if not len(elements):
        return []
    breaks = (np.flatnonzero(np.diff(elements) != 1) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(elements)], strict=True))
